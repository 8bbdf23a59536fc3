"""The rehearsal's `gcloud`: tunnels to its hosts, and what a launcher asks about its user. Nothing of Google.

Says in words like those of gcloud what gcloud would say where something is wrong, and exits as it does.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from typing import Any, NoReturn

FOLDER_VARIABLE = "TPU_STACK_REHEARSAL"
ACCOUNT = "you@rehearsal.example"
PROJECT = "my-rehearsal"
VERSION = "478.0.0"
"""Whose tunnels this one makes: the oldest that `fab doctor` takes."""
KEYS = "os-login.json"
CONNECT_LIMIT_S = 10.0
PIECE = 1 << 16
DESCRIBED = {
    "compute tpus queued-resources": "v2/projects/{project}/locations/{zone}/queuedResources",
    "compute tpus tpu-vm": "v2/projects/{project}/locations/{zone}/nodes",
    "compute instances": "compute/v1/projects/{project}/zones/{zone}/instances",
    "compute instance-groups managed": "compute/v1/projects/{project}/zones/{zone}/instanceGroupManagers",
}
"""What `describe` shows: the words before it, and the collection in the simulated APIs."""

State = dict[str, Any]


def main(arguments: list[str]) -> int:
    positional = [argument for argument in arguments if not argument.startswith("-")]
    if positional[:2] == ["compute", "start-iap-tunnel"]:
        return tunnel(positional, arguments)
    for words, collection in DESCRIBED.items():
        if positional[:-1] == [*words.split(), "describe"]:
            return describe(collection, positional[-1], arguments)
    if positional[:3] == ["compute", "os-login", "describe-profile"]:
        print(json.dumps(profile(state())))
    elif positional[:4] == ["compute", "os-login", "ssh-keys", "add"]:
        add_key(arguments)
        print(json.dumps({"loginProfile": profile(state())}))
    elif positional[:2] == ["auth", "list"]:
        print(json.dumps([{"account": ACCOUNT, "status": "ACTIVE"}]) if _as_json(arguments) else ACCOUNT)
    elif positional[:1] == ["version"] or arguments == ["--version"]:
        versions = {"Google Cloud SDK": VERSION, "rehearsal": "a stand-in"}
        print(
            json.dumps(versions)
            if _as_json(arguments)
            else f"Google Cloud SDK {VERSION} (the rehearsal's stand-in)"
        )
    else:
        fail(
            f"({'.'.join(['gcloud', *positional[:3]])}) this is the rehearsal's stand-in for gcloud and does not "
            "know that; outside of the rehearsal the real one would be asked"
        )
    return 0


def state() -> State:
    """The state that the rehearsal's daemon has written. Ends the command if no rehearsal is up."""
    folder = os.environ.get(FOLDER_VARIABLE, "")
    try:
        with open(os.path.join(folder, "state.json"), encoding="utf-8") as file:
            rehearsal_state: State = json.load(file)
    except (OSError, ValueError):
        fail(f"no rehearsal is up in {folder or '$' + FOLDER_VARIABLE}; `fab rehearsal up` starts one")
    return rehearsal_state


def profile(rehearsal_state: State) -> State:
    """The profile of OS Login: the user's name on the hosts, and the public keys that they accept.

    As with Google, it has only its own name until the first key is added, which also makes the user.
    """
    public_keys = keys()
    if not public_keys:
        return {"name": "rehearsal"}
    account = {"primary": True, "username": rehearsal_state["user"], "operatingSystemType": "LINUX"}
    public = {str(number): {"fingerprint": str(number), "key": key} for number, key in enumerate(public_keys)}
    return {"name": "rehearsal", "posixAccounts": [account], "sshPublicKeys": public}


def keys() -> list[str]:
    """The public keys that were added."""
    try:
        with open(os.path.join(os.environ[FOLDER_VARIABLE], KEYS), encoding="utf-8") as file:
            added: list[str] = json.load(file)
            return added
    except FileNotFoundError:
        return []


def add_key(arguments: list[str]) -> None:
    """The key of --key or --key-file. The hosts accept only the rehearsal's own, whatever else is added."""
    state()
    options = dict(
        argument[2:].split("=", 1) for argument in arguments if argument.startswith("--") and "=" in argument
    )
    key = options.get("key", "")
    if path := options.get("key-file"):
        with open(os.path.expanduser(path), encoding="utf-8") as file:
            key = file.read()
    if not key.strip():
        fail("(gcloud.compute.os-login.ssh-keys.add) Exactly one of (--key | --key-file) must be specified.")
    path = os.path.join(os.environ[FOLDER_VARIABLE], KEYS)
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(sorted({*keys(), key.strip()}), file)
    os.replace(f"{path}.new", path)


def describe(collection: str, name: str, arguments: list[str]) -> int:
    """Print a resource of a simulated API: as JSON, or one field with --format=value(a.b[0].c)."""
    import http.client  # only now: tunnels are opened often, and have to be there quickly
    import urllib.parse

    options = dict(
        argument[2:].split("=", 1) for argument in arguments if argument.startswith("--") and "=" in argument
    )
    zone, project, form = options.get("zone", ""), options.get("project", PROJECT), options.get("format", "")
    url = urllib.parse.urlsplit(state()["tpu_url"])
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=CONNECT_LIMIT_S)
    try:
        path = collection.format(project=project, zone=zone)
        connection.request("GET", f"/{path}/{urllib.parse.quote(name)}")
        answer = json.loads(connection.getresponse().read())
    except (OSError, ValueError) as error:
        fail(f"(gcloud.compute) the simulated cloud does not answer: {error}")
    if "error" in answer:
        problem = answer["error"]
        fail(f"(gcloud.compute.describe) {problem.get('status') or problem['code']}: {problem['message']}")
    if form.startswith("value(") and form.endswith(")"):
        for field in form[6:-1].replace("[", ".").replace("]", "").split("."):
            if isinstance(answer, list):
                answer = answer[int(field)] if int(field) < len(answer) else ""
            else:
                answer = answer.get(field, "") if isinstance(answer, dict) else ""
        print(answer)
    else:
        print(json.dumps(answer, indent=2))
    return 0


def tunnel(positional: list[str], arguments: list[str]) -> int:
    """Standard input and output as a connection to an instance's port."""
    if len(positional) < 4 or "--listen-on-stdin" not in arguments or not positional[3].isdigit():
        fail("(gcloud.compute.start-iap-tunnel) the stand-in takes NAME PORT --listen-on-stdin")
    name, port = positional[2], int(positional[3])
    address = state()["instances"].get(name)
    if address is None:
        fail(
            "(gcloud.compute.start-iap-tunnel) Could not fetch resource:\n"
            f" - The resource 'projects/{PROJECT}/instances/{name}' was not found"
        )
    try:
        connection = socket.create_connection((address, port), timeout=CONNECT_LIMIT_S)
    except OSError:
        fail(
            "(gcloud.compute.start-iap-tunnel) Error while connecting [4003: 'failed to connect to backend'].\n"
            "(Failed to connect to port 22)"
        )
    connection.settimeout(None)
    threading.Thread(target=upstream, args=(connection,), daemon=True).start()
    while True:
        try:
            piece = connection.recv(PIECE)
        except OSError:
            return 1
        if not piece:
            return 0
        try:
            write(1, piece)
        except OSError:
            return 0  # nobody reads any more


def upstream(connection: socket.socket) -> None:
    """Copy standard input to the connection until it ends; what still comes back is passed on."""
    try:
        while True:
            piece = os.read(0, PIECE)
            if not piece:
                break
            connection.sendall(piece)
        connection.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # the other direction sees that it has ended, and ends the command


def write(descriptor: int, piece: bytes) -> None:
    while piece:
        piece = piece[os.write(descriptor, piece) :]


def fail(message: str) -> NoReturn:
    sys.stderr.write(f"ERROR: {message}\n")
    sys.exit(1)


def _as_json(arguments: list[str]) -> bool:
    return "--format=json" in arguments


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
