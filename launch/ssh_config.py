"""What OpenSSH, and so VS Code, is told about the hosts of a slice: the text of its configuration. Pure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from contracts.errors import RequestError
from contracts.inventory import Slice
from launch.ssh import problems
from launch.ssh.access import Access

INCLUDE = "Include tpu-stack/*.conf"
"""OpenSSH looks for it in ~/.ssh, and reads it wherever ~/.ssh/config has no Host or Match before it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One host. alias: as `ssh` is told. user: whom to log in as. jump: the alias of the host that leads there."""

    alias: str
    access: Access
    user: str
    jump: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keys:
    """The key files to log in with. only: no others, and of an agent's keys only these."""

    files: tuple[str, ...]
    only: bool


def host_alias(stack: str, one_slice: Slice, index: int) -> str:
    """ "tpu-dev-main-0": of characters alone that neither ssh nor a shell reads as anything else."""
    return _word(f"tpu-{stack}-{one_slice.name}-{index}")


def gateway_alias(stack: str) -> str:
    return _word(f"tpu-{stack}-gateway")


def _word(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", text)


def config(entries: Sequence[Entry], known_hosts: str, keys: Keys) -> str:
    """The configuration for these hosts. known_hosts: the path of the file that `known_hosts` is the text of.

    Raises:
        RequestError: a value cannot be written so that OpenSSH reads it as it is.
    """
    return "\n".join(_block(entry, known_hosts, keys) for entry in entries)


def known_hosts(entries: Sequence[Entry]) -> str:
    """The pinned keys, each under its host's alias.

    Raises:
        HostError: a host has none, or one that is no key.
    """
    lines = []
    for entry in entries:
        if not entry.access.host_keys:
            raise problems.host_key_unknown(entry.access)
        for key in entry.access.host_keys:
            if not re.fullmatch(r"[a-z0-9@.-]+ [A-Za-z0-9+/]+=*", key):
                raise problems.host_key_unreadable(entry.access, key, "it is not a type and a key")
            lines.append(f"{entry.alias} {key}\n")
    return "".join(lines)


def _block(entry: Entry, known_hosts_path: str, keys: Keys) -> str:
    access = entry.access
    lines = [
        f"Host {entry.alias}",
        f"HostName {_plain('address', access.address)}",
        f"Port {access.port}",
        f"User {_plain('user', entry.user)}",
        f"HostKeyAlias {entry.alias}",
        f"UserKnownHostsFile {_path(known_hosts_path)}",
        "GlobalKnownHostsFile /dev/null",
        "StrictHostKeyChecking yes",
        "UpdateHostKeys no",
        *(f"IdentityFile {_path(file)}" for file in keys.files),
        *(["IdentitiesOnly yes"] if keys.only else []),
        "ConnectTimeout 20",
        "ServerAliveInterval 15",
        "ServerAliveCountMax 3",
    ]
    if entry.jump is not None:
        lines.append(f"ProxyJump {entry.jump}")
    elif access.proxy_command is not None:
        lines.append(f"ProxyCommand {_command(access.proxy_command)}")
    return "\n    ".join(lines) + "\n"


def _plain(what: str, value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.:\[@][A-Za-z0-9_.:@\[\]+-]*\$?", value):
        raise RequestError(
            f'the {what} "{value}" of the inventory cannot be written for OpenSSH; change it there'
        )
    return value


def _path(value: str) -> str:
    """Quoted; OpenSSH would put something in place of % and ${…}, and has no way to write the latter as it is."""
    if "${" in value or not value.isprintable():
        raise RequestError(
            f"the path {value!r} cannot be written for OpenSSH; use one without ${{ and controls"
        )
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%") + '"'


def _command(words: Sequence[str]) -> str:
    """A line for sh that OpenSSH's own reading of quotes lets pass too: in a word in single quotes, as `shlex.join`
    would write it, a backslash would make the quotes uneven for it."""
    line = " ".join(
        word
        if re.fullmatch(r"[A-Za-z0-9_./:=@,+-]+", word)
        else '"' + re.sub(r'([\\"$`])', r"\\\1", word) + '"'
        for word in words
    )
    if not line.isprintable():
        raise RequestError(
            f"the command {line!r} cannot be written for OpenSSH; its words hold control characters"
        )
    return line.replace("%", "%%")


def with_include(text: str) -> str:
    """A user's ~/.ssh/config with the line that reads ours; as it is where it has that line in force already."""
    for line in text.splitlines():
        words = line.split()
        if [word.lower() for word in words[:1]] in (["host"], ["match"]):
            break
        if words[:1] and words[0].lower() == "include" and set(words[1:]) & {INCLUDE.split()[1]}:
            return text
    newline = "\r\n" if "\r\n" in text else "\n"
    return f"{INCLUDE}{newline}{newline}{text}" if text else f"{INCLUDE}\n"
