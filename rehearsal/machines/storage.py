"""What stands for storage, and outlives all hosts: a volume for NFS, and a server of the Cloud Storage API for buckets.

One container keeps both. Buckets live in its memory, the share in a volume of limited size that it keeps mounted."""

from __future__ import annotations

import dataclasses
import http.client
import json
import re
from pathlib import Path

import docker
import docker.types

from rehearsal.machines.docker_engine import asking, labels
from rehearsal.machines.errors import MachinesError
from rehearsal.machines.machine import SPARE_SHARE, archive
from rehearsal.machines.network import Network
from rehearsal.machines.waiting import wait_for

PORT = 4443
SHARE_MIB = 2048
PROGRAM = "/opt/tpu-stack/bucket-server"
ANSWER_LIMIT_S = 10
START_LIMIT_S = 30
# https://cloud.google.com/storage/docs/buckets#naming, without the dots that need a domain
_BUCKET = re.compile(r"[a-z0-9][a-z0-9_-]{1,61}[a-z0-9]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Storage:
    """address and PORT: of the bucket server, the same for hosts and this machine."""

    address: str

    @property
    def url(self) -> str:
        return f"http://{self.address}:{PORT}"

    @property
    def environment(self) -> dict[str, str]:
        """With it gcsfs, etils, TensorStore and Google's clients take this server for Cloud Storage.

        gcsfs otherwise asks for a bucket's kind over gRPC, which this server does not speak, and waits a minute.
        """
        return {
            "STORAGE_EMULATOR_HOST": self.url,
            "TENSORSTORE_GCS_HTTP_URL": self.url,
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            "NO_GCE_CHECK": "true",
        }

    def make_bucket(self, name: str) -> None:
        """Nothing happens where it is there. Raises MachinesError."""
        if not _BUCKET.fullmatch(name):
            raise MachinesError(
                f"bucket {name!r}: 3 to 63 of a-z, 0-9, - and _, a letter or digit at either end"
            )
        status, said = self._ask("POST", "/storage/v1/b?project=rehearsal", {"name": name})
        if status not in (200, 409):
            raise MachinesError(f"bucket {name}: the bucket server answers {status}: {said[:300]}")

    def bucket_names(self) -> list[str]:
        """Raises MachinesError."""
        status, said = self._ask("GET", "/storage/v1/b?project=rehearsal")
        if status != 200:
            raise MachinesError(f"the bucket server answers {status}: {said[:300]}")
        return sorted(each["name"] for each in json.loads(said).get("items") or [])

    def answers(self) -> bool:
        """Whether the server is up."""
        try:
            return self._ask("GET", "/storage/v1/b?project=rehearsal")[0] == 200
        except MachinesError:
            return False

    def _ask(self, method: str, path: str, body: dict[str, str] | None = None) -> tuple[int, str]:
        """No proxy is asked, whatever the environment says: the server is on this machine."""
        connection = http.client.HTTPConnection(self.address, PORT, timeout=ANSWER_LIMIT_S)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, body=data, headers={"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise MachinesError(f"the bucket server at {self.url} does not answer: {error}") from None
        finally:
            connection.close()


def container_name(rehearsal: str) -> str:
    return f"tpu-stack-{rehearsal}-storage"


def volume_name(rehearsal: str) -> str:
    return f"tpu-stack-{rehearsal}-share"


def share_at(rehearsal: str, path: str) -> docker.types.Mount:
    """The share as a mount of a container; its rights are its own, not those of the image's folder at that path."""
    return docker.types.Mount(path, volume_name(rehearsal), type="volume", no_copy=True)


def start(
    client: docker.DockerClient, rehearsal: str, network: Network, image: str, program: Path
) -> Storage:
    """The server, answering. Raises MachinesError."""
    storage = Storage(address=network.storage_address)
    options = {"type": "tmpfs", "device": "tmpfs", "o": f"size={SHARE_MIB}m,mode=1777"}
    with asking(f"the storage of rehearsal {rehearsal}"):
        client.volumes.create(volume_name(rehearsal), driver_opts=options, labels=labels(rehearsal))
        container = client.containers.create(
            image, name=container_name(rehearsal), hostname="storage", labels=labels(rehearsal, role="storage"),
            entrypoint=[PROGRAM], command=server_arguments(storage), init=True, cap_drop=["ALL"],
            mounts=[share_at(rehearsal, SPARE_SHARE)], network=network.name,
            networking_config={
                network.name: client.api.create_endpoint_config(ipv4_address=storage.address, aliases=["storage"])
            },
        )  # fmt: skip
        container.put_archive("/", archive({PROGRAM: (program.read_bytes(), 0o755)}))
        container.start()
        wait_for(storage.answers, START_LIMIT_S, container, f"the bucket server at {storage.url}")
    return storage


def server_arguments(storage: Storage) -> list[str]:
    """The addresses are those that it gives clients for what they fetch or send in parts. Pure."""
    return [
        "-scheme", "http", "-host", "0.0.0.0", "-port", str(PORT), "-backend", "memory", "-log-level", "warn",
        "-external-url", storage.url, "-public-host", f"{storage.address}:{PORT}",
    ]  # fmt: skip
