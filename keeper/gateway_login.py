"""How a keeper on a gateway logs in.

By OS Login as the gateway's own account, inside the network, without gcloud. The key is made here. It is in the
folder that systemd makes in memory for the service (`/run`). OS Login knows it for a day, and it is replaced before
that. On other machines the keeper logs in as `fab` does.
https://cloud.google.com/compute/docs/oslogin/rest/v1/users/importSshPublicKey
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path

from contracts import atomic
from contracts.inventory import Inventory
from infra.documents.lease import clock_s
from launch.hosts import HostError

VARIABLE = "TPU_STACK_KEEPER_LOGIN"
METADATA = "metadata"
"""The variable's value where the machine's account comes from Google's metadata server and hosts are in its network."""
ENDPOINT = "https://oslogin.googleapis.com"
SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)
ANSWER_LIMIT_S = 30.0
KEY_LIFE_S = 24 * 3600.0
RENEW_BEFORE_S = 4 * 3600.0
"""How long before its end a key is replaced, as a recovery may take a few hours."""


def from_here(inventory: Inventory, environ: Mapping[str, str]) -> Inventory:
    """Return the inventory with the hosts as this machine reaches them.

    Raises:
        HostError: OS Login does not take the key.
    """
    if environ.get(VARIABLE) != METADATA or inventory.project is None:
        return inventory
    from backends.vm.login import KEY_VARIABLE

    return inside(inventory, user(inventory.project, Path(environ[KEY_VARIABLE])))


def inside(inventory: Inventory, user_name: str) -> Inventory:
    """Return the inventory with every host reached at its internal address, as that user. Pure."""
    slices = tuple(
        dataclasses.replace(
            one_slice,
            hosts=tuple(
                dataclasses.replace(host, reach="direct", external_address=None, user=user_name)
                for host in one_slice.hosts
            ),
        )
        for one_slice in inventory.slices
    )
    return dataclasses.replace(inventory, slices=slices)


def user(project: str, key: Path) -> str:
    """Return the user name of this machine's account. Makes `key` and adds it to the account where that is needed.

    Asks Google only where there is no key yet, or it is about to expire. Raises as `from_here`.
    """
    note = key.with_suffix(".json")
    try:
        content = json.loads(note.read_text(encoding="utf-8"))
        if key.exists() and clock_s() < float(content["renew_at_s"]):
            return str(content["user"])
    except (OSError, ValueError, LookupError, TypeError):
        pass
    import asyncssh  # which a quiet pass does without

    from backends.vm.login import user_of_profile

    note.unlink(missing_ok=True)
    fresh = asyncssh.generate_private_key("ssh-ed25519", comment="tpu-stack keeper")
    name = user_of_profile(_add_to_account(project, fresh.export_public_key("openssh").decode().strip()))
    atomic.write(key, fresh.export_private_key("openssh"), mode=0o600)
    # By a clock that begins with each boot, as the key does.
    atomic.write(note, json.dumps({"user": name, "renew_at_s": clock_s() + KEY_LIFE_S - RENEW_BEFORE_S}))
    return name


def _add_to_account(project: str, public_key: str) -> str:
    """Add a key to this machine's account in OS Login; return the account's profile as JSON."""
    import google.auth.compute_engine
    import google.auth.exceptions
    import google.auth.transport.requests

    try:
        account = google.auth.compute_engine.Credentials(scopes=SCOPES)  # type: ignore[no-untyped-call]
        account.refresh(google.auth.transport.requests.Request())  # type: ignore[no-untyped-call]
        session = google.auth.transport.requests.AuthorizedSession(account)  # type: ignore[no-untyped-call]
        answer = session.post(
            f"{ENDPOINT}/v1/users/{account.service_account_email}:importSshPublicKey",
            params={"projectId": project},
            json={"key": public_key, "expirationTimeUsec": str(int((time.time() + KEY_LIFE_S) * 1e6))},
            timeout=ANSWER_LIMIT_S,
        )
        if answer.status_code == 200:
            return json.dumps(answer.json().get("loginProfile", {}))
        reason = str(answer.json()["error"]["message"])
    except (LookupError, TypeError, ValueError, google.auth.exceptions.GoogleAuthError, OSError) as error:
        reason = str(error) or repr(error)
    raise HostError(
        host="",
        reason=f"OS Login does not take a key of this machine's account: {reason.strip().splitlines()[0]}",
        remedy=(
            "`pulumi up` with tpu-stack:keeper: true gives the gateway its account and switches on the OS Login API"
        ),
    )
