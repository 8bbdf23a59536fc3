"""What stands beside a rehearsal's hosts: their network, the storage that outlives them, an image registry.

The network is a bridge of its own that leads nowhere else, so that no host reaches a real cloud. Storage is one
container: buckets in the memory of a server of the Cloud Storage API, the share (for NFS) in a volume of limited size
that it keeps mounted. The registry has one name for this machine and for all hosts, 127.0.0.1 and a port, because
Docker takes a registry without TLS on loopback only: the port is published on this machine's loopback, where its Docker
pushes to, and every host passes the same port of its own loopback on to the registry's address.

Both servers are built from their Go modules, once, and kept (rehearsal/images/<name>).
"""

from __future__ import annotations

import dataclasses
import hashlib
import ipaddress
import itertools
import json
import os
import subprocess
import urllib.parse
from collections.abc import Mapping
from pathlib import Path

import docker
import docker.errors
import docker.types
from docker.models.containers import Container

from contracts.aliases import Say
from rehearsal.local_servers import CONFLICT, RefusalError, ask
from rehearsal.machines.containers import Containers, container_name
from rehearsal.machines.docker_engine import MachinesError, asking, labels, wait_for
from rehearsal.machines.host_image import BUILD_LIMIT_S, ROOT, SPARE_SHARE, cache_folder, one_at_a_time
from tools import go

NETWORK_TRIES = 5
STORAGE, REGISTRY = "storage", "registry"
"""Names of containers, also in the hosts' network."""

PORT = 4443
BUCKETS = "/storage/v1/b"
SHARE_MIB = 2048
BUCKET_PROGRAM = "/opt/tpu-stack/bucket-server"
START_LIMIT_S = 30

REGISTRY_PORT = 5000
REGISTRY_PROGRAM = "/opt/tpu-stack/registry"
REGISTRY_CONFIGURATION = "/opt/tpu-stack/registry.yml"
REGISTRY_SETTINGS = f"""version: 0.1
log: {{level: warn, accesslog: {{disabled: true}}}}
storage: {{filesystem: {{rootdirectory: /var/lib/registry}}}}
http: {{addr: ":{REGISTRY_PORT}"}}
"""

# No C library: it has to run in whatever the hosts' base image is.
GO_SETTINGS = {"GOFLAGS": "-mod=readonly", "GOWORK": "off", "CGO_ENABLED": "0", "GOOS": "linux"}
GO_FLAGS = ("-trimpath", "-ldflags=-s -w")
VERSION_SYMBOL = "k8s.io/component-base/version.gitVersion"


# --- the network ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostNetwork:
    """subnet: as 172.18.0.0/16; laptop_address: this machine's in it; storage_address: the bucket server's;
    registry_address: the image registry's, where there is one."""

    name: str
    subnet: str
    laptop_address: str
    storage_address: str
    registry_address: str

    def addresses(self, count: int) -> list[str]:
        """The first `count` addresses that are free for machines. Raises MachinesError if there are too few."""
        reserved = {self.laptop_address, self.storage_address, self.registry_address}
        free = (
            str(address)
            for address in ipaddress.ip_network(self.subnet).hosts()
            if str(address) not in reserved
        )
        addresses = list(itertools.islice(free, count))
        if len(addresses) < count:
            raise MachinesError(
                f"{self.name}: {self.subnet} has no {count} free addresses; ask for fewer hosts"
            )
        return addresses


def described_network(attributes: dict[str, object]) -> HostNetwork:
    """Read Docker's description of a network. Pure. Raises MachinesError if it has no IPv4 subnet."""
    ipam = attributes["IPAM"]
    assert isinstance(ipam, dict)
    for config in ipam.get("Config") or []:
        subnet = ipaddress.ip_network(config["Subnet"])
        if subnet.version == 4 and subnet.num_addresses >= 16:
            return HostNetwork(
                name=str(attributes["Name"]),
                subnet=str(subnet),
                laptop_address=config.get("Gateway") or str(subnet[1]),
                storage_address=str(subnet[-2]),
                registry_address=str(subnet[-3]),
            )
    raise MachinesError(
        f"Docker gave {attributes['Name']} no IPv4 subnet of 16 addresses or more; look at default-address-pools"
        " in /etc/docker/daemon.json"
    )


def make_network(client: docker.DockerClient, rehearsal: str) -> HostNetwork:
    """The rehearsal's network, tried again where another rehearsal took its subnet. Raises MachinesError."""
    with asking(f"the network of rehearsal {rehearsal}"):
        for left in reversed(range(NETWORK_TRIES)):
            try:
                return described_network(_make_network(client, rehearsal))
            except docker.errors.APIError as error:
                if left == 0 or "overlap" not in str(error).lower():
                    raise
    raise AssertionError("the last try returns or raises")


def _make_network(client: docker.DockerClient, rehearsal: str) -> dict[str, object]:
    """Made twice: Docker chooses the subnet, but only in one that was asked for may a container ask for its address."""
    name, marks = f"tpu-stack-{rehearsal}", labels(rehearsal)
    probe = client.networks.create(f"{name}-probe", internal=True, labels=marks)
    probe.reload()
    pool = docker.types.IPAMPool(subnet=probe.attrs["IPAM"]["Config"][0]["Subnet"])
    probe.remove()
    ipam = docker.types.IPAMConfig(pool_configs=[pool])
    network = client.networks.create(name, internal=True, labels=marks, ipam=ipam)
    network.reload()
    attributes: dict[str, object] = network.attrs
    return attributes


# --- storage --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class StorageServer:
    """address and PORT: of the bucket server, the same for hosts and this machine."""

    address: str

    @property
    def url(self) -> str:
        return f"http://{self.address}:{PORT}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which gcsfs, etils, TensorStore and Google's clients take this server for Cloud Storage.

        gcsfs otherwise asks for a bucket's kind over gRPC, which this server does not speak, and waits a minute.
        """
        return {
            "STORAGE_EMULATOR_HOST": self.url,
            "TENSORSTORE_GCS_HTTP_URL": self.url,
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            "NO_GCE_CHECK": "true",
        }

    def make_bucket(self, name: str) -> None:
        """Make a bucket. Raises MachinesError."""
        self._ask("POST", "?project=rehearsal", json.dumps({"name": name}).encode())

    def empty_bucket(self, name: str) -> None:
        """Remove every object of a bucket. Raises MachinesError."""
        listed = json.loads(self._ask("GET", f"/{name}/o?prefix="))
        for item in listed.get("items") or []:
            self._ask("DELETE", f"/{name}/o/{urllib.parse.quote(item['name'], safe='')}")

    def _ask(self, method: str, path: str, data: bytes | None = None) -> bytes:
        try:
            return ask(method, f"{self.url}{BUCKETS}{path}", data)
        except RefusalError as refusal:
            raise MachinesError(f"the bucket server: {refusal}") from None
        except OSError as error:
            raise MachinesError(f"the bucket server at {self.url} does not answer: {error}") from None


def volume_name(rehearsal: str) -> str:
    return f"tpu-stack-{rehearsal}-share"


def share_at(rehearsal: str, path: str) -> docker.types.Mount:
    """The share as a mount of a container; its rights are its own, not those of the image's folder at that path."""
    return docker.types.Mount(path, volume_name(rehearsal), type="volume", no_copy=True)


def start_storage(containers: Containers, network: HostNetwork, program: Path) -> StorageServer:
    """The server, answering. Raises MachinesError."""
    storage, rehearsal = StorageServer(address=network.storage_address), containers.rehearsal
    options = {"type": "tmpfs", "device": "tmpfs", "o": f"size={SHARE_MIB}m,mode=1777"}
    with asking(f"the storage of rehearsal {rehearsal}"):
        containers.client.volumes.create(
            volume_name(rehearsal), driver_opts=options, labels=labels(rehearsal)
        )
    container = containers.create(
        STORAGE,
        role="storage",
        files={BUCKET_PROGRAM: (program.read_bytes(), 0o755)},
        network=network.name,
        address=storage.address,
        entrypoint=[BUCKET_PROGRAM],
        command=_bucket_arguments(storage),
        cap_drop=["ALL"],
        mounts=[share_at(rehearsal, SPARE_SHARE)],
    )
    _start(container, f"{storage.url}{BUCKETS}?project=rehearsal")
    return storage


def _bucket_arguments(storage: StorageServer) -> list[str]:
    """The addresses are those that it gives clients for what they fetch or send in parts. Pure."""
    return [
        "-scheme", "http", "-host", "0.0.0.0", "-port", str(PORT), "-backend", "memory", "-log-level", "warn",
        "-external-url", storage.url, "-public-host", f"{storage.address}:{PORT}",
    ]  # fmt: skip


# --- the image registry ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegistryServer:
    """address: in the machines' network. port: of loopback, here and on every host."""

    address: str
    port: int

    @property
    def host(self) -> str:
        """The prefix of its images' names."""
        return f"127.0.0.1:{self.port}"


def start_registry(containers: Containers, network: HostNetwork, program: Path) -> RegistryServer:
    """The registry, answering and empty; its images go with its container. Raises MachinesError."""
    client, rehearsal, address = containers.client, containers.rehearsal, network.registry_address
    with asking(f"the image registry of rehearsal {rehearsal}"):
        # Out of the machines' network, which leads nowhere, no port can be published: hence the second one.
        front = client.networks.create(f"tpu-stack-{rehearsal}-front", labels=labels(rehearsal))
        container = containers.create(
            REGISTRY,
            role="registry",
            files={
                REGISTRY_PROGRAM: (program.read_bytes(), 0o755),
                REGISTRY_CONFIGURATION: (REGISTRY_SETTINGS.encode(), 0o644),
            },
            network=front.name,
            entrypoint=[REGISTRY_PROGRAM],
            command=["serve", REGISTRY_CONFIGURATION],
            cap_drop=["ALL"],
            ports={f"{REGISTRY_PORT}/tcp": ("127.0.0.1", None)},
            environment={"OTEL_TRACES_EXPORTER": "none"},
        )
        client.networks.get(network.name).connect(container, ipv4_address=address, aliases=[REGISTRY])
        _start(container, f"http://{address}:{REGISTRY_PORT}/v2/")
        container.reload()
        return RegistryServer(address=address, port=published_port(container.attrs))


def forget_images(client: docker.DockerClient, rehearsal: str) -> list[str]:
    """Remove the registry's names from this machine's images, and return them. An image that has another name or that a
    container uses stays."""
    try:
        host = (
            f"127.0.0.1:{published_port(client.api.inspect_container(container_name(rehearsal, REGISTRY)))}/"
        )
    except (
        docker.errors.NotFound,
        MachinesError,
    ):  # there is none, or it ended: nobody knows its port any more
        return []
    images = client.api.images()
    names = [name for image in images for name in [*(image["RepoTags"] or []), *(image["RepoDigests"] or [])]]
    ours = sorted(name for name in names if name.startswith(host))
    for name in ours:
        try:
            client.api.remove_image(name, noprune=True)
        except docker.errors.ImageNotFound:  # went with the name before it
            continue
        except docker.errors.APIError as error:
            if error.status_code != CONFLICT:
                raise
    return ours


def published_port(attributes: dict[str, object]) -> int:
    """The port that Docker has published on loopback for a container. Pure. Raises MachinesError."""
    settings = attributes["NetworkSettings"]
    assert isinstance(settings, dict)
    for binding in settings["Ports"].get(f"{REGISTRY_PORT}/tcp") or []:
        if binding["HostIp"] == "127.0.0.1":
            return int(binding["HostPort"])
    raise MachinesError(
        "Docker has published no port of the image registry on 127.0.0.1; it does so unless /etc/docker/daemon.json"
        " forbids it, as a Docker without iptables and userland-proxy does"
    )


# --- both -----------------------------------------------------------------------------------------------------------


def _start(container: Container, url: str) -> None:
    """Starts a server, and returns when it answers there. Raises MachinesError."""

    def answers() -> bool:
        try:
            ask("GET", url)
        except (RefusalError, OSError):
            return False
        return True

    container.start()
    wait_for(answers, START_LIMIT_S, container, f"the server at {url}")


# --- programs -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoProgram:
    """title: as people call it. folder: of its go.mod and go.sum, in rehearsal/images. package: of its main function.

    name: of the file, where a folder has several programs. version: of Kubernetes, which its programs are told to tell.
    manifests: YAML files of its module that are kept beside it.
    """

    title: str
    folder: str
    package: str
    name: str = "server"
    version: str = ""
    manifests: tuple[str, ...] = ()

    @property
    def module(self) -> Path:
        return ROOT / "rehearsal" / "images" / self.folder

    @property
    def recipe(self) -> str:
        """Changes when the program would."""
        parts = [(self.module / name).read_bytes() for name in ("go.mod", "go.sum")]
        built = repr((GO_SETTINGS, self.flags, *self.manifests)).encode()
        return hashlib.sha256(b"".join([*parts, built])).hexdigest()[:16]

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of the compiler."""
        if not self.version:
            return GO_FLAGS
        return (*GO_FLAGS[:-1], f"{GO_FLAGS[-1]} -X {VERSION_SYMBOL}={self.version}")


BUCKET_SERVER = GoProgram(
    title="the bucket server", folder="bucket", package="github.com/fsouza/fake-gcs-server"
)
REGISTRY_SERVER = GoProgram(
    title="the image registry",
    folder="registry",
    package="github.com/distribution/distribution/v3/cmd/registry",
)


def find_or_build_program(program: GoProgram, environ: Mapping[str, str], say: Say) -> Path:
    """The path of a program, with `manifests_beside` it; minutes the first time. Raises MachinesError."""
    target = cache_folder(environ) / f"{program.folder}-{program.name}-{program.recipe}"
    with one_at_a_time(target):
        if not target.is_file():
            _build_program(program, target, environ, say)
    return target


def manifests_beside(program: Path) -> Path:
    """The file with all of GoProgram.manifests."""
    return program.with_name(f"{program.name}.yaml")


def _build_program(program: GoProgram, target: Path, environ: Mapping[str, str], say: Say) -> None:
    try:
        compiler = go.find(environ)
    except go.GoError as error:
        raise MachinesError(
            f"the rehearsal builds {program.title} with Go, and {error}; install it and try again"
        ) from None
    say(f"building {program.title} with {compiler}; once, some minutes on two cores …")
    new = target.with_name(f"{target.name}.new")
    try:
        done = subprocess.run(
            [compiler, "build", *program.flags, "-o", str(new), program.package], cwd=program.module,
            env={**environ, **GO_SETTINGS}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, errors="replace", timeout=BUILD_LIMIT_S, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise MachinesError(
                f"building {program.title} failed:\n{done.stderr.strip()[-2000:]}\n"
                "It needs the Go module proxy that `go env GOPROXY` names, and 1 GB of disk; mend that and try again"
            )
        if program.manifests:
            listed = [compiler, "list", "-f", "{{.Module.Dir}}", program.package]
            module = go.answer(listed, {**environ, **GO_SETTINGS}, program.module)
            matches = [sorted(Path(module or "").glob(pattern)) for pattern in program.manifests]
            if module is None or not all(matches):
                raise MachinesError(
                    f"the module of {program.title} has no {' or no '.join(program.manifests)}"
                )
            files = itertools.chain.from_iterable(matches)
            manifests_beside(target).write_text(
                "\n---\n".join(path.read_text("utf-8") for path in files), "utf-8"
            )
        os.replace(new, target)
    except subprocess.TimeoutExpired:
        raise MachinesError(f"{program.title} is not built after {BUILD_LIMIT_S // 60} minutes") from None
    finally:
        new.unlink(missing_ok=True)
