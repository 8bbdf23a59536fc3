"""Removes all that carries a rehearsal's label: containers, then the volumes and networks that they used; and the names
in its registry that images of this machine have."""

from __future__ import annotations

import time

import docker
import docker.errors
import requests

from rehearsal.machines import registry
from rehearsal.machines.docker_engine import LABEL, asking, connect
from rehearsal.machines.errors import MachinesError

LIMIT_S = 90
AGAIN_S = 0.5


def remove_everything(rehearsal: str, client: docker.DockerClient | None = None) -> list[str]:
    """What was removed, by name; nothing where there is nothing. From any process; twice is as good as once.

    A container whose making was asked for just before may appear later: so it ends when a second look finds nothing.
    Raises MachinesError, with what is left, after 90 s.
    """
    own = client or connect()
    try:
        return _remove(own, rehearsal)
    finally:
        if client is None:
            own.close()


def left(client: docker.DockerClient, rehearsal: str) -> list[tuple[str, str]]:
    """(kind, name) of all that carries the label."""
    only = {"label": f"{LABEL}={rehearsal}"}
    containers = [
        ("container", each["Names"][0].lstrip("/")) for each in client.api.containers(all=True, filters=only)
    ]
    volumes = [("volume", each["Name"]) for each in client.api.volumes(filters=only)["Volumes"] or []]
    networks = [("network", each["Name"]) for each in client.api.networks(filters=only)]
    return containers + volumes + networks


def _remove(client: docker.DockerClient, rehearsal: str) -> list[str]:
    with asking(f"the images that rehearsal {rehearsal} pushed"):
        removed = registry.forget_images(client, rehearsal)
    until = time.monotonic() + LIMIT_S
    clear = 0
    refused = ""
    while clear < 2:
        with asking(f"looking for what rehearsal {rehearsal} left"):
            found = left(client, rehearsal)
        clear = 0 if found else clear + 1
        for kind, name in found:
            refused = _remove_one(client, kind, name) or refused
            removed += [name] if name not in removed else []
        if time.monotonic() > until:
            names = ", ".join(f"{kind} {name}" for kind, name in found)
            raise MachinesError(f"after {LIMIT_S} s there is still {names} ({refused}); is Docker well?")
        if clear < 2:
            time.sleep(AGAIN_S)
    return removed


def _remove_one(client: docker.DockerClient, kind: str, name: str) -> str:
    """Why it could not be removed; empty where it was, or where another did."""
    try:
        if kind == "container":
            client.api.remove_container(name, force=True, v=True)
        elif kind == "volume":
            client.api.remove_volume(name, force=True)
        else:
            client.api.remove_network(name)
    except docker.errors.NotFound:
        return ""
    except (docker.errors.APIError, requests.RequestException) as error:
        return str(error)  # in use for a moment yet, or being removed: the next round sees
    return ""
