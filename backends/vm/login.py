"""Who logs in: the keys of the SSH agent and ~/.ssh, and the user name, OS Login's where the inventory has none."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import getpass
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import asyncssh

from backends.vm.access import Access
from launch.hosts import HostError
from launch.output import last_line

PROFILE = ("gcloud", "compute", "os-login", "describe-profile", "--format=json")
ADD_KEY = ("gcloud", "compute", "os-login", "ssh-keys", "add")
PROFILE_LIMIT_S = 30.0


async def find_user(access: Access, identities: Identities | None = None) -> str:
    """Return the user to log in as.

    Raises:
        HostError: OS Login's cannot be found out.
    """
    if access.user:
        return access.user
    return await os_login_user(access.project, identities) if access.os_login else getpass.getuser()


async def os_login_user(project: str | None = None, identities: Identities | None = None) -> str:
    """Return the name that OS Login gives the account which gcloud is logged in with. The `host` of its error is empty.

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
    """Return what gcloud prints."""
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
        last = last_line(stderr.decode(errors="replace"), "no reason given")
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
    """Return the public keys in the profile that gcloud prints; one that has expired, or cannot be read, is none.

    Raises:
        HostError: it is no such profile.
    """
    keys = set()
    try:
        for entry in (json.loads(profile).get("sshPublicKeys") or {}).values():
            expires_us = int(entry.get("expirationTimeUsec") or 0)
            if not expires_us or expires_us > time.time() * 1e6:
                keys.add(public_data(str(entry["key"])))
    except (ValueError, AttributeError, LookupError, TypeError):
        raise HostError(
            host="",
            reason="gcloud's answer about OS Login cannot be read",
            remedy="`gcloud components update`",
        ) from None
    return keys - {b""}


def user_of_profile(text: str) -> str:
    """Return the user name in the profile that gcloud prints: the primary account's, else the first.

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


KEY_VARIABLE = "TPU_STACK_SSH_KEY"
FILES = ("google_compute_engine", "id_ed25519", "id_ecdsa", "id_rsa")
AGENT_LIMIT_S = 5.0
# An OpenSSH server hangs up at the sixth key that it refuses (MaxAuthTries).
MOST_OFFERED = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identities:
    """keys: in the order in which they are offered. kept_back: why others are not."""

    keys: tuple[asyncssh.SSHKeyPair, ...]
    kept_back: tuple[str, ...]
    agent: asyncssh.SSHAgentClient | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Each key as a user knows it: its comment, else its fingerprint."""
        return tuple(key.get_comment(errors="replace") or fingerprint(key.public_data) for key in self.keys)

    async def close(self) -> None:
        if self.agent is not None:
            self.agent.close()
            with contextlib.suppress(OSError):
                await self.agent.wait_closed()


def fingerprint(public_data: bytes) -> str:
    """As `ssh-keygen -l` prints it."""
    digest = hashlib.sha256(public_data).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def public_data(line: str) -> bytes:
    """Of a public key as an inventory has it, "TYPE BASE64"; what is none has none."""
    try:
        return asyncssh.import_public_key(line).public_data
    except asyncssh.KeyImportError:
        return b""


def public_line(data: bytes) -> str:
    """Return the same, the other way round: the data begin with their kind's name."""
    length = int.from_bytes(data[:4], "big")
    return f"{data[4 : 4 + length].decode()} {base64.b64encode(data).decode()}"


def files(environment: Mapping[str, str], home: Path) -> tuple[Path, ...]:
    """Return the key files that there are; only the one that $TPU_STACK_SSH_KEY names, where it is set."""
    if named := environment.get(KEY_VARIABLE):
        return (Path(named).expanduser(),)
    return tuple(path for name in FILES if (path := home / ".ssh" / name).is_file())


async def load(environment: Mapping[str, str], home: Path) -> Identities:
    """Return the keys to offer: files that need no passphrase, then what the agent holds.

    Raises:
        HostError: there is none, with what to do about it. Its `host` is empty.
    """
    agent, held, kept_back = await _agent_keys(environment.get("SSH_AUTH_SOCK"))
    named = environment.get(KEY_VARIABLE)
    keys: list[asyncssh.SSHKeyPair] = []
    public_halves: set[bytes] = set()
    for path in files(environment, home):
        pairs, data, reason = _read(path)
        keys += pairs
        public_halves |= data
        if reason and not data & {key.public_data for key in held}:
            kept_back.append(reason)
    keys += [key for key in held if not named or key.public_data in public_halves]
    by_data: dict[bytes, asyncssh.SSHKeyPair] = {}
    for key in keys:
        by_data.setdefault(key.public_data, key)
    distinct = list(by_data.values())
    if not distinct:
        if agent is not None:
            agent.close()
        raise _no_key(kept_back)
    if len(distinct) > MOST_OFFERED:
        kept_back.append(
            f"{len(distinct) - MOST_OFFERED} more keys are not offered, as a server would hang up: "
            f"name the right one with {KEY_VARIABLE}"
        )
    return Identities(keys=tuple(distinct[:MOST_OFFERED]), kept_back=tuple(kept_back), agent=agent)


def _read(path: Path) -> tuple[Sequence[asyncssh.SSHKeyPair], set[bytes], str | None]:
    """Return the key of a file, its public half where that can be told, and why it cannot be used."""
    public = set(_public(path))
    try:
        pairs = asyncssh.load_keypairs(str(path))
    except asyncssh.KeyImportError as error:
        if "Passphrase" in str(error):
            return (), public, f"{path} has a passphrase, and no agent holds it (`ssh-add {path}`)"
        return (), public, f"{path} cannot be read as a key: {error}"
    except OSError as error:
        return (), public, f"{path} cannot be read: {error.strerror}"
    for key in pairs:
        if not key.get_comment_bytes():
            key.set_comment(str(path))
    return pairs, public | {key.public_data for key in pairs}, None


def _public(path: Path) -> Iterator[bytes]:
    with contextlib.suppress(OSError, asyncssh.KeyImportError):
        yield asyncssh.read_public_key(f"{path}.pub").public_data


async def _agent_keys(
    socket_path: str | None,
) -> tuple[asyncssh.SSHAgentClient | None, Sequence[asyncssh.SSHKeyPair], list[str]]:
    if not socket_path or not os.path.exists(socket_path):
        return None, (), []
    try:
        async with asyncio.timeout(AGENT_LIMIT_S):
            agent = await asyncssh.connect_agent(socket_path)
            return agent, await agent.get_keys(), []
    except (OSError, ValueError) as error:
        reason = str(error) or f"no answer within {AGENT_LIMIT_S:g} s"
        return None, (), [f"the SSH agent at {socket_path} cannot be asked ({reason})"]


def _no_key(kept_back: Sequence[str]) -> HostError:
    if kept_back:
        return HostError(
            host="",
            reason="this machine has no SSH key that can be used: " + "; ".join(kept_back),
            remedy="`ssh-add` puts a key with a passphrase into the agent",
        )
    return HostError(
        host="",
        reason="this machine has no SSH key, neither in ~/.ssh nor in an agent",
        remedy=(
            "`ssh-keygen -t ed25519`, then "
            "`gcloud compute os-login ssh-keys add --key-file ~/.ssh/id_ed25519.pub`"
        ),
    )
