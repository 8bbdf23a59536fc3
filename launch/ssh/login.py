"""The name to log in as, where the inventory has none: OS Login's, or this machine's."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import json
import os
import signal
from typing import Any

from launch.errors import HostError
from launch.ssh.access import Access

PROFILE = ("gcloud", "compute", "os-login", "describe-profile", "--format=json")
PROFILE_LIMIT_S = 30.0


async def user_of(access: Access) -> str:
    """The user to log in as.

    Raises:
        HostError: OS Login's cannot be found out.
    """
    if access.user:
        return access.user
    return await os_login_user() if access.os_login else getpass.getuser()


async def os_login_user() -> str:
    """The name that OS Login gives the account which gcloud is logged in with. The `host` of its error is empty."""
    try:
        process = await asyncio.create_subprocess_exec(
            *PROFILE,
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
            reason=f"`{' '.join(PROFILE)}` gave no answer within {PROFILE_LIMIT_S:g} s",
            remedy="run it by itself and see what it waits for",
        ) from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # gcloud is a shell that starts another program
            await process.wait()
    if process.returncode != 0:
        said = stderr.decode(errors="replace").strip().splitlines()
        raise HostError(
            host="",
            reason=f"gcloud does not tell the user name of OS Login: {said[-1] if said else 'no reason given'}",
            remedy="`gcloud auth login`, then `gcloud compute os-login describe-profile` must show an account",
        )
    return user_of_profile(stdout.decode(errors="replace"))


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
