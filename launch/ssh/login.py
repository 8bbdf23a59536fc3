"""The name to log in as, where the inventory has none: OS Login's, which gets a key first, or this machine's."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from launch.errors import HostError
from launch.ssh.access import Access
from launch.ssh.identities import Identities, fingerprint, public_data, public_line

PROFILE = ("gcloud", "compute", "os-login", "describe-profile", "--format=json")
ADD_KEY = ("gcloud", "compute", "os-login", "ssh-keys", "add")
PROFILE_LIMIT_S = 30.0


async def user_of(access: Access, identities: Identities | None = None) -> str:
    """The user to log in as.

    Raises:
        HostError: OS Login's cannot be found out.
    """
    if access.user:
        return access.user
    return await os_login_user(access.project, identities) if access.os_login else getpass.getuser()


async def os_login_user(project: str | None = None, identities: Identities | None = None) -> str:
    """The name that OS Login gives the account which gcloud is logged in with. The `host` of its error is empty.

    An account without any key in OS Login, as every new one is, gets the first of `identities`, which makes its user
    name too. It is done once, and announced; an account that has keys is left as it is.
    """
    profile = await _gcloud(PROFILE)
    if identities is not None and not known_keys(profile):
        key = identities.keys[0]
        in_project = () if project is None else (f"--project={project}",)
        await _gcloud((*ADD_KEY, f"--key={public_line(key.public_data)}", "--format=json", *in_project))
        print(
            f"OS Login knew no SSH key of your account: added {identities.names[0]} "
            f"({fingerprint(key.public_data)}), which lets you in to every host where you have the role. "
            "`gcloud compute os-login ssh-keys list` shows it, `… remove` takes it away",
            file=sys.stderr,
            flush=True,
        )
        profile = await _gcloud(PROFILE)
    return user_of_profile(profile)


async def _gcloud(command: Sequence[str]) -> str:
    """What gcloud prints."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise HostError(
            host="",
            reason=f"gcloud cannot be run, and only it knows the user name of OS Login: {error.strerror}",
            remedy="install the Google Cloud CLI (https://cloud.google.com/sdk/docs/install), then `gcloud auth login`",
        ) from None
    try:
        async with asyncio.timeout(PROFILE_LIMIT_S):
            stdout, stderr = await process.communicate()
    except TimeoutError:
        raise HostError(
            host="",
            reason=f"`{' '.join(command[:4])}` gave no answer within {PROFILE_LIMIT_S:g} s",
            remedy="run it by itself and see what it waits for",
        ) from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # gcloud is a shell that starts another program
            await process.wait()
    if process.returncode != 0:
        said = stderr.decode(errors="replace").strip().splitlines()
        last = said[-1] if said else "no reason given"
        reason = f"gcloud does not tell the user name of OS Login: {last}"
        if command[: len(ADD_KEY)] == ADD_KEY:
            reason = f"gcloud does not take a key for OS Login: {last}"
        raise HostError(
            host="",
            reason=reason,
            remedy="`gcloud auth login`, then `gcloud compute os-login describe-profile` must show an account",
        )
    return stdout.decode(errors="replace")


def known_keys(profile: str) -> set[bytes]:
    """The public keys in the profile that gcloud prints; one that has expired, or cannot be read, is none.

    Raises:
        HostError: it is no such profile.
    """
    found = set()
    try:
        for each in (json.loads(profile).get("sshPublicKeys") or {}).values():
            expires_us = int(each.get("expirationTimeUsec") or 0)
            if not expires_us or expires_us > time.time() * 1e6:
                found.add(public_data(str(each["key"])))
    except (ValueError, AttributeError, LookupError, TypeError):
        raise HostError(
            host="",
            reason="gcloud's answer about OS Login cannot be read",
            remedy="`gcloud components update`",
        ) from None
    return found - {b""}


def user_of_profile(text: str) -> str:
    """The user name in the profile that gcloud prints: the primary account's, else the first.

    Raises:
        HostError: there is none in it.
    """
    try:
        accounts: list[dict[str, Any]] = json.loads(text).get("posixAccounts", [])
        names = [account["username"] for account in accounts if account.get("primary")]
        names += [account["username"] for account in accounts]
        return str(names[0])
    except (ValueError, AttributeError, LookupError, TypeError):
        raise HostError(
            host="",
            reason="the account of gcloud has no user name in OS Login yet",
            remedy="`gcloud compute os-login ssh-keys add --key-file ~/.ssh/id_ed25519.pub` gives it one",
        ) from None
