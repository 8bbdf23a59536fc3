"""Shells on hosts by the system's own OpenSSH, told the routes, users and keys of a target."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from backends.vm import login
from backends.vm.access import Access, routes
from contracts import atomic
from contracts.errors import RequestError
from contracts.inventory import Slice
from jobs.runtime.storage.cache import user_cache_dir
from launch.hosts import HostError
from launch.output import say, terminal
from launch.targets import Target

FOLDER = "tpu-stack"


def command(target: Target, host: int | None, arguments: Sequence[str] = ()) -> list[str]:
    """Return the `ssh` command for a shell on a host, or for another program there; its configuration goes to the
    cache. host: None is the first.

    Raises:
        RequestError: there is no such host, or no `ssh`.
        HostError: nobody knows whom to log in as, or a host's key is not known.
    """
    if shutil.which("ssh") is None:
        raise RequestError("`ssh` is not on PATH; install OpenSSH's client (Debian: openssh-client)")
    indices = [listed.index for listed in target.hosts]
    index = indices[0] if host is None else host
    if index not in indices:
        raise RequestError(f"--host {host}: the hosts are {', '.join(map(str, indices))}")
    path = _write(_entries(target, [index]), user_cache_dir(os.environ) / "ssh", f"{_name(target)}-{index}")
    alias = host_alias(target.inventory.stack, target.slice, index)
    tty = ["-t"] if arguments and sys.stdin.isatty() else []  # a shell has one by itself
    return ["ssh", "-F", str(path), *tty, alias, *([shlex.join(arguments)] if arguments else [])]


def show_config(target: Target, *, write: bool) -> int:
    """Print the configuration for all hosts, or keep it in ~/.ssh where `ssh` and VS Code find it.

    Raises: as `command`.
    """
    entries = _entries(target, [host.index for host in target.hosts])
    ssh = Path.home() / ".ssh"
    if not write:
        path = _write(entries, user_cache_dir(os.environ) / "ssh", _name(target))
        print(path.read_text(encoding="utf-8"), end="")
        hint = f"# `fab ssh-config --write` keeps this in {ssh / FOLDER} and puts this line first in {ssh / 'config'}:"
        print(f"\n{hint}\n# {INCLUDE}")
        return 0
    path = _write(entries, ssh / FOLDER, _name(target))
    changed = _include(ssh / "config")
    say(terminal())(f"{path}: {', '.join(entry.alias for entry in entries)}")
    say(terminal())(f"{ssh / 'config'}: " + (f'"{INCLUDE}" added' if changed else "includes it already"))
    return 0


def _name(target: Target) -> str:
    return host_alias(target.inventory.stack, target.slice, 0).removeprefix("tpu-").removesuffix("-0")


def _entries(target: Target, indices: Sequence[int]) -> list[Entry]:
    """Return the hosts at `indices`, after those through which they are reached."""
    stack = target.inventory.stack
    accesses = routes(target.inventory, target.slice)
    # Through the first host of a slice behind IAP is quicker for many; a shell has a tunnel of its own and so depends
    # on no other host.
    chosen = {index: accesses[index].otherwise or accesses[index] for index in indices}
    aliases = {access: host_alias(stack, target.slice, index) for index, access in chosen.items()}
    hops = {access.through for access in chosen.values() if access.through is not None} - set(aliases)
    for number, hop in enumerate(sorted(hops, key=lambda hop: hop.name)):
        aliases[hop] = _word(f"tpu-{stack}-gateway") + (f"-{number}" if number else "")
    users = asyncio.run(_users(list(aliases)))
    return [
        Entry(
            alias=alias,
            access=_with_whole_path(access),
            user=users[access],
            jump=None if access.through is None else aliases[access.through],
        )
        for access, alias in sorted(aliases.items(), key=lambda pair: pair[0] not in hops)
    ]


async def _users(accesses: Sequence[Access]) -> dict[Access, str]:
    """OS Login is asked once for all."""
    os_login_access = next((access for access in accesses if access.os_login and not access.user), None)
    os_login_user = await login.find_user(os_login_access, await _identities()) if os_login_access else ""
    return {
        access: os_login_user if access.os_login and not access.user else await login.find_user(access)
        for access in accesses
    }


async def _identities() -> login.Identities | None:
    """Return what OS Login may be given; OpenSSH says itself where there is none."""
    try:
        identities = await login.load(os.environ, Path.home())
    except HostError:
        return None
    await identities.close()
    return identities


def _with_whole_path(access: Access) -> Access:
    """What starts `ssh` may have another PATH than this shell: an editor's, for one."""
    if access.proxy_command is None:
        return access
    program, *proxy_arguments = access.proxy_command
    return dataclasses.replace(access, proxy_command=(shutil.which(program) or program, *proxy_arguments))


def _keys() -> Keys:
    files = login.files(os.environ, Path.home())
    return Keys(files=tuple(str(file) for file in files), only=login.KEY_VARIABLE in os.environ)


def _write(entries: Sequence[Entry], folder: Path, name: str) -> Path:
    """Write the configuration and its pinned keys; return the path of the configuration."""
    path, pinned = folder / f"{name}.conf", folder / f"{name}.known_hosts"
    text, keys = config(entries, str(pinned), _keys()), known_hosts(entries)
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    _replace(pinned, keys)
    _replace(path, text)
    return path


def _include(path: Path) -> bool:
    """Let `path` include our configurations; return whether it had to be changed."""
    real = path.resolve()  # a link into somebody's own repository of settings stays one
    text = ""
    with contextlib.suppress(FileNotFoundError):
        text = real.read_bytes().decode(errors="surrogateescape")
    included = with_include(text)
    if included != text:
        _replace(real, included)
    return included != text


def _replace(path: Path, text: str) -> None:
    """Write a file that only its owner can read, or with the mode that it had."""
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
    atomic.write(path, text.encode(errors="surrogateescape"), mode=mode)


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
    """Return a host's alias, such as "tpu-dev-main-0": only characters with no meaning for ssh or a shell."""
    return _word(f"tpu-{stack}-{one_slice.name}-{index}")


def _word(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", text)


def config(entries: Sequence[Entry], known_hosts: str, keys: Keys) -> str:
    """Return the configuration for these hosts. known_hosts: the path of the file with the pinned keys.

    Raises:
        RequestError: a value cannot be written so that OpenSSH reads it as it is.
    """
    return "\n".join(_block(entry, known_hosts, keys) for entry in entries)


def known_hosts(entries: Sequence[Entry]) -> str:
    """Return the pinned keys, each under its host's alias.

    Raises:
        HostError: a host has none, or one that is no key.
    """
    lines = []
    for entry in entries:
        if not entry.access.host_keys:
            raise entry.access.host_key_unknown()
        for key in entry.access.host_keys:
            if not re.fullmatch(r"[a-z0-9@.-]+ [A-Za-z0-9+/]+=*", key):
                raise entry.access.host_key_unreadable(key, "it is not a type and a key")
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


def _plain(label: str, value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.:\[@][A-Za-z0-9_.:@\[\]+-]*\$?", value):
        raise RequestError(
            f'the {label} "{value}" of the inventory cannot be written for OpenSSH; change it there'
        )
    return value


def _path(value: str) -> str:
    """Quoted; OpenSSH would put something in place of % and ${…}, and has no way to write the latter as it is."""
    if "${" in value or not value.isprintable():
        raise RequestError(
            f"the path {value!r} cannot be written for OpenSSH; use one without ${{ and controls"
        )
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%") + '"'


def _command(arguments: Sequence[str]) -> str:
    """A line for sh that OpenSSH's own reading of quotes lets pass too: in a word in single quotes, as `shlex.join`
    would write it, a backslash would make the quotes uneven for it."""
    line = " ".join(
        word
        if re.fullmatch(r"[A-Za-z0-9_./:=@,+-]+", word)
        else '"' + re.sub(r'([\\"$`])', r"\\\1", word) + '"'
        for word in arguments
    )
    if not line.isprintable():
        raise RequestError(
            f"the command {line!r} cannot be written for OpenSSH; its words hold control characters"
        )
    return line.replace("%", "%%")


def with_include(text: str) -> str:
    """Return a user's ~/.ssh/config with the line that reads ours; unchanged if that line is in force already."""
    for line in text.splitlines():
        arguments = line.split()
        if [word.lower() for word in arguments[:1]] in (["host"], ["match"]):
            break
        if arguments[:1] and arguments[0].lower() == "include" and set(arguments[1:]) & {INCLUDE.split()[1]}:
            return text
    newline = "\r\n" if "\r\n" in text else "\n"
    return f"{INCLUDE}{newline}{newline}{text}" if text else f"{INCLUDE}\n"
