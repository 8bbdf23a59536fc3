"""Fresh ed25519 key pairs: of hosts, and of the rehearsal's user."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyPair:
    """private_pem: in OpenSSH's form, without a passphrase. public: "ssh-ed25519 AAAA…"."""

    private_pem: str
    public: str


def new_pair() -> KeyPair:
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return KeyPair(private_pem=private.decode(), public=public.decode())


def new_identity(folder: Path) -> str:
    """A pair in a new folder, id_ed25519 and id_ed25519.pub as ssh-keygen leaves them. → the public line."""
    folder.mkdir(mode=0o700)
    pair = new_pair()
    path = folder / "id_ed25519"
    path.touch(mode=0o600)
    path.write_text(pair.private_pem, encoding="utf-8")
    line = f"{pair.public} rehearsal"
    path.with_suffix(".pub").write_text(f"{line}\n", encoding="utf-8")
    return line
