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
TPU_KINDS = {"queued-resources": "queuedResources", "tpu-vm": "nodes"}

State = dict[str, Any]


def main(arguments: list[str]) -> int:
    words = [each for each in arguments if not each.startswith("-")]
    if words[:2] == ["compute", "start-iap-tunnel"]:
        return tunnel(words, arguments)
    if words[:2] == ["compute", "tpus"] and words[3:4] == ["describe"] and words[2] in TPU_KINDS:
        return describe(TPU_KINDS[words[2]], words, arguments)
    if words[:3] == ["compute", "os-login", "describe-profile"]:
        print(json.dumps(profile(state())))
    elif words[:4] == ["compute", "os-login", "ssh-keys", "add"]:
        add_key(arguments)
        print(json.dumps({"loginProfile": profile(state())}))
    elif words[:2] == ["auth", "list"]:
        print(json.dumps([{"account": ACCOUNT, "status": "ACTIVE"}]) if _as_json(arguments) else ACCOUNT)
    elif words[:1] == ["version"] or arguments == ["--version"]:
        told = {"Google Cloud SDK": VERSION, "rehearsal": "a stand-in"}
        print(
            json.dumps(told)
            if _as_json(arguments)
            else f"Google Cloud SDK {VERSION} (the rehearsal's stand-in)"
        )
    else:
        fail(
            f"({'.'.join(['gcloud', *words[:3]])}) this is the rehearsal's stand-in for gcloud and does not know that; "
            "outside of the rehearsal the real one would be asked"
        )
    return 0


def state() -> State:
    """What the rehearsal's daemon has written. Ends the command where no rehearsal is up."""
    folder = os.environ.get(FOLDER_VARIABLE, "")
    try:
        with open(os.path.join(folder, "state.json"), encoding="utf-8") as file:
            found: State = json.load(file)
    except (OSError, ValueError):
        fail(f"no rehearsal is up in {folder or '$' + FOLDER_VARIABLE}; `fab rehearsal up` starts one")
    return found


def profile(found: State) -> State:
    """Of OS Login: the user's name on the hosts and the public keys that they take.

    As Google gives it: nothing but its name before the first key was added, which makes the user too.
    """
    given = keys()
    if not given:
        return {"name": "rehearsal"}
    account = {"primary": True, "username": found["user"], "operatingSystemType": "LINUX"}
    public = {str(number): {"fingerprint": str(number), "key": key} for number, key in enumerate(given)}
    return {"name": "rehearsal", "posixAccounts": [account], "sshPublicKeys": public}


def keys() -> list[str]:
    """The public keys that were added."""
    try:
        with open(os.path.join(os.environ[FOLDER_VARIABLE], KEYS), encoding="utf-8") as file:
            found: list[str] = json.load(file)
            return found
    except FileNotFoundError:
        return []


def add_key(arguments: list[str]) -> None:
    """The key of --key or --key-file. The hosts accept only the rehearsal's own, whatever else is added."""
    state()
    given = dict(each[2:].split("=", 1) for each in arguments if each.startswith("--") and "=" in each)
    key = given.get("key", "")
    if path := given.get("key-file"):
        with open(os.path.expanduser(path), encoding="utf-8") as file:
            key = file.read()
    if not key.strip():
        fail("(gcloud.compute.os-login.ssh-keys.add) Exactly one of (--key | --key-file) must be specified.")
    path = os.path.join(os.environ[FOLDER_VARIABLE], KEYS)
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(sorted({*keys(), key.strip()}), file)
    os.replace(f"{path}.new", path)


def describe(kind: str, words: list[str], arguments: list[str]) -> int:
    """What the simulated Cloud TPU API says of one thing; --format=value(a.b) prints that field, else all as JSON."""
    import http.client  # only now: tunnels are opened often, and have to be there quickly
    import urllib.parse

    given = dict(each[2:].split("=", 1) for each in arguments if each.startswith("--") and "=" in each)
    zone, project, form = given.get("zone", ""), given.get("project", PROJECT), given.get("format", "")
    url = urllib.parse.urlsplit(state()["tpu_url"])
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=CONNECT_LIMIT_S)
    try:
        connection.request(
            "GET", f"/v2/projects/{project}/locations/{zone}/{kind}/{urllib.parse.quote(words[4])}"
        )
        answer = json.loads(connection.getresponse().read())
    except (OSError, ValueError) as error:
        fail(f"(gcloud.compute.tpus) the simulated Cloud TPU API does not answer: {error}")
    if "error" in answer:
        fail(f"(gcloud.compute.tpus.describe) {answer['error']['status']}: {answer['error']['message']}")
    if form.startswith("value(") and form.endswith(")"):
        for name in form[6:-1].split("."):
            answer = answer.get(name, "") if isinstance(answer, dict) else ""
        print(answer)
    else:
        print(json.dumps(answer, indent=2))
    return 0


def tunnel(words: list[str], arguments: list[str]) -> int:
    """Standard input and output as a connection to an instance's port."""
    if len(words) < 4 or "--listen-on-stdin" not in arguments or not words[3].isdigit():
        fail("(gcloud.compute.start-iap-tunnel) the stand-in takes NAME PORT --listen-on-stdin")
    name, port = words[2], int(words[3])
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
    """From standard input until it ends; what still comes back is passed on."""
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


def fail(words: str) -> NoReturn:
    sys.stderr.write(f"ERROR: {words}\n")
    sys.exit(1)


def _as_json(arguments: list[str]) -> bool:
    return "--format=json" in arguments


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
