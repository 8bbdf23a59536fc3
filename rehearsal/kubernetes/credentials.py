"""The certificates of one cluster, and the kubeconfig files of those who ask its API server."""

from __future__ import annotations

import base64
import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFE = datetime.timedelta(days=30)
# A certificate is good from a little before it was made: clocks of a rehearsal's hosts may be off.
SLACK = datetime.timedelta(hours=1)


class Authority:
    """An authority of its own in a new folder, which only its user can read: ca.crt, and the pairs that it signs."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True)
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("tpu-stack rehearsal", ())
        basic = x509.BasicConstraints(ca=True, path_length=0)
        signed = _builder(self._name, self._name, self._key).add_extension(basic, critical=True)
        self.certificate = _pem(signed.sign(self._key, hashes.SHA256()))
        _write(folder / "ca.crt", self.certificate)

    def issue(
        self, name: str, common_name: str, *, groups: Sequence[str] = (), addresses: Sequence[str] = ()
    ) -> tuple[bytes, bytes]:
        """Writes name.crt and name.key, for a client and, where it has addresses, for a server. → both, PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if addresses else [])]
        builder = _builder(_name(common_name, groups), self._name, key).add_extension(
            x509.ExtendedKeyUsage(usages), critical=False
        )
        if addresses:
            alternatives = x509.SubjectAlternativeName([_general_name(address) for address in addresses])
            builder = builder.add_extension(alternatives, critical=False)
        certificate = _pem(builder.sign(self._key, hashes.SHA256()))
        private = _private(key)
        _write(self.folder / f"{name}.crt", certificate)
        _write(self.folder / f"{name}.key", private)
        return certificate, private

    def kubeconfig(
        self,
        path: Path,
        server: str,
        user: str,
        *,
        context: str,
        groups: Sequence[str] = (),
        namespace: str = "default",
    ) -> None:
        """Writes a kubeconfig with a fresh certificate of that user in it, and one context."""
        certificate, key = self.issue(f"user-{path.stem}", user, groups=groups)
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": context,
                    "cluster": {"server": server, "certificate-authority-data": _base64(self.certificate)},
                }
            ],
            "users": [
                {
                    "name": user,
                    "user": {
                        "client-certificate-data": _base64(certificate),
                        "client-key-data": _base64(key),
                    },
                }
            ],
            "contexts": [
                {"name": context, "context": {"cluster": context, "user": user, "namespace": namespace}}
            ],
            "current-context": context,
        }
        _write(path, yaml.safe_dump(config).encode())


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SLACK)
        .not_valid_after(now + LIFE)
    )


def _name(common_name: str, groups: Sequence[str]) -> x509.Name:
    """Kubernetes reads a user from the common name, and its groups from the organisations."""
    organisations = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
    return x509.Name([*organisations, x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _general_name(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        return x509.DNSName(address)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _write(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content)
