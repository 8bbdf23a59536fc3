"""Shells on hosts by the system's own OpenSSH, told what this launcher knows: routes, users, pinned keys."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from contracts.errors import RequestError
from jobs.runtime.cache import user_cache_dir
from launch.beside import beside
from launch.display import say, terminal
from launch.errors import HostError
from launch.ssh import identities, login
from launch.ssh.access import Access, routes
from launch.ssh_config import (
    INCLUDE,
    Entry,
    Keys,
    config,
    gateway_alias,
    host_alias,
    known_hosts,
    with_include,
)
from launch.target import Target

FOLDER = "tpu-stack"


def command(target: Target, host: int | None) -> list[str]:
    """The `ssh` that is a shell on a host, its configuration written to the cache. host: default the first.

    Raises:
        RequestError: there is no such host, no `ssh`, or the target is this machine.
        HostError: nobody knows whom to log in as, or a host's key is not known.
    """
    if shutil.which("ssh") is None:
        raise RequestError("`ssh` is not on PATH; install OpenSSH's client (Debian: openssh-client)")
    indices = [each.index for each in target.hosts]
    index = indices[0] if host is None else host
    if index not in indices:
        raise RequestError(f"--host {host}: the hosts are {', '.join(map(str, indices))}")
    path = _write(_entries(target, [index]), user_cache_dir(os.environ) / "ssh", f"{_name(target)}-{index}")
    return ["ssh", "-F", str(path), host_alias(target.inventory.stack, target.slice, index)]


def show_config(target: Target, *, write: bool) -> int:
    """Print the configuration for all hosts, or keep it in ~/.ssh where `ssh` and VS Code find it.

    Raises: as `command`.
    """
    entries = _entries(target, [each.index for each in target.hosts])
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
    """The hosts at `indices`, behind those that lead there."""
    if target.is_local:
        raise RequestError("the hosts are this machine, which needs no SSH; say --stack as well")
    stack = target.inventory.stack
    found = routes(target.inventory, target.slice)
    # Through the first host of a slice behind IAP is quicker for many; a shell has a tunnel of its own and so depends
    # on no other host.
    wanted = {index: found[index].otherwise or found[index] for index in indices}
    aliases = {access: host_alias(stack, target.slice, index) for index, access in wanted.items()}
    hops = {access.through for access in wanted.values() if access.through is not None} - set(aliases)
    for number, hop in enumerate(sorted(hops, key=lambda hop: hop.name)):
        aliases[hop] = gateway_alias(stack) + (f"-{number}" if number else "")
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
    asked = next((access for access in accesses if access.os_login and not access.user), None)
    of_os_login = await login.user_of(asked, await _identities()) if asked else ""
    return {
        access: of_os_login if access.os_login and not access.user else await login.user_of(access)
        for access in accesses
    }


async def _identities() -> identities.Identities | None:
    """What OS Login may be given; OpenSSH says itself where there is none."""
    try:
        found = await identities.load(os.environ, Path.home())
    except HostError:
        return None
    await found.close()
    return found


def _with_whole_path(access: Access) -> Access:
    """What starts `ssh` may have another PATH than this shell: an editor's, for one."""
    if access.proxy_command is None:
        return access
    program, *rest = access.proxy_command
    return dataclasses.replace(access, proxy_command=(shutil.which(program) or program, *rest))


def _keys() -> Keys:
    files = identities.files(os.environ, Path.home())
    return Keys(files=tuple(str(file) for file in files), only=identities.KEY_VARIABLE in os.environ)


def _write(entries: Sequence[Entry], folder: Path, name: str) -> Path:
    """Write the configuration and its pinned keys; the path of the first."""
    path, pinned = folder / f"{name}.conf", folder / f"{name}.known_hosts"
    text, keys = config(entries, str(pinned), _keys()), known_hosts(entries)
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    _replace(pinned, keys)
    _replace(path, text)
    return path


def _include(path: Path) -> bool:
    """Have `path` include our configurations; whether it had to be changed."""
    real = path.resolve()  # a link into somebody's own repository of settings stays one
    text = ""
    with contextlib.suppress(FileNotFoundError):
        text = real.read_bytes().decode(errors="surrogateescape")
    wanted = with_include(text)
    if wanted != text:
        _replace(real, wanted)
    return wanted != text


def _replace(path: Path, text: str) -> None:
    """Write a file that only its owner reads, or with the mode that it had."""
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
    with beside(path) as fresh:
        fresh.touch(mode=0o600)
        fresh.write_bytes(text.encode(errors="surrogateescape"))
        fresh.chmod(mode)
