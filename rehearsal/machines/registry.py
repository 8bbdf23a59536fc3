"""The rehearsal's image registry: one name for this machine and for all hosts, 127.0.0.1 and a port.

Docker takes a registry without TLS on loopback alone. So the port is published on this machine's loopback, where its
Docker pushes to, and every host passes the same port of its own loopback on to the registry's address."""

from __future__ import annotations

import dataclasses
import http.client
from pathlib import Path

import docker
import docker.errors

from rehearsal.machines.docker_engine import asking, labels
from rehearsal.machines.errors import MachinesError
from rehearsal.machines.machine import archive
from rehearsal.machines.network import Network
from rehearsal.machines.waiting import wait_for

INNER_PORT = 5000
PROGRAM = "/opt/tpu-stack/registry"
CONFIGURATION = "/opt/tpu-stack/registry.yml"
SETTINGS = f"""version: 0.1
log: {{level: warn, accesslog: {{disabled: true}}}}
storage: {{filesystem: {{rootdirectory: /var/lib/registry}}}}
http: {{addr: ":{INNER_PORT}"}}
"""
CONFLICT = 409
ANSWER_LIMIT_S = 10
START_LIMIT_S = 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Registry:
    """address: in the machines' network. port: of loopback, here and on every host."""

    address: str
    port: int

    @property
    def host(self) -> str:
        """What the names of its images begin with."""
        return f"127.0.0.1:{self.port}"


def container_name(rehearsal: str) -> str:
    return f"tpu-stack-{rehearsal}-registry"


def front_name(rehearsal: str) -> str:
    return f"tpu-stack-{rehearsal}-front"


def start(
    client: docker.DockerClient, rehearsal: str, network: Network, image: str, program: Path
) -> Registry:
    """The registry, answering and empty; its images go with its container. Raises MachinesError."""
    address = network.registry_address
    with asking(f"the image registry of rehearsal {rehearsal}"):
        # Out of the machines' network, which leads nowhere, no port can be published: hence the second one.
        front = client.networks.create(front_name(rehearsal), labels=labels(rehearsal))
        container = client.containers.create(
            image, name=container_name(rehearsal), hostname="registry", labels=labels(rehearsal, role="registry"),
            entrypoint=[PROGRAM], command=["serve", CONFIGURATION], init=True, cap_drop=["ALL"], network=front.name,
            ports={f"{INNER_PORT}/tcp": ("127.0.0.1", None)}, environment={"OTEL_TRACES_EXPORTER": "none"},
        )  # fmt: skip
        client.networks.get(network.name).connect(container, ipv4_address=address, aliases=["registry"])
        container.put_archive(
            "/",
            archive(
                {PROGRAM: (program.read_bytes(), 0o755), CONFIGURATION: (SETTINGS.encode(), 0o644)},
            ),
        )
        container.start()
        wait_for(
            lambda: answers(address), START_LIMIT_S, container, f"the registry at {address}:{INNER_PORT}"
        )
        container.reload()
        return Registry(address=address, port=published(container.attrs))


def forget_images(client: docker.DockerClient, rehearsal: str) -> list[str]:
    """Takes its names from the images of this machine, before it goes; → those names. An image that has another name
    stays, and so does one of which a container is made."""
    try:
        host = f"127.0.0.1:{published(client.api.inspect_container(container_name(rehearsal)))}/"
    except (
        docker.errors.NotFound,
        MachinesError,
    ):  # there is none, or it ended: nobody knows its port any more
        return []
    found = client.api.images()
    names = [name for image in found for name in [*(image["RepoTags"] or []), *(image["RepoDigests"] or [])]]
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


def answers(address: str) -> bool:
    """Whether a registry is up there. No proxy is asked: it is on this machine."""
    connection = http.client.HTTPConnection(address, INNER_PORT, timeout=ANSWER_LIMIT_S)
    try:
        connection.request("GET", "/v2/")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def published(attributes: dict[str, object]) -> int:
    """The port that Docker chose on loopback, from its words of the container. Pure. Raises MachinesError."""
    settings = attributes["NetworkSettings"]
    assert isinstance(settings, dict)
    for each in settings["Ports"].get(f"{INNER_PORT}/tcp") or []:
        if each["HostIp"] == "127.0.0.1":
            return int(each["HostPort"])
    raise MachinesError(
        "Docker has published no port of the image registry on 127.0.0.1; it does so unless /etc/docker/daemon.json"
        " forbids it, as a Docker without iptables and userland-proxy does"
    )
