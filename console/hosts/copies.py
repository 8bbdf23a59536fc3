"""`fab put` and `fab get`: files and folders copied to all hosts of a target, or from them, all at once."""

from __future__ import annotations

import dataclasses
import functools
import posixpath
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from contracts.atomic import beside_name
from contracts.errors import RequestError
from contracts.files import DiskFiles
from contracts.inventory import Host
from launch.hosts import Count, HostError, HostsError, Transport, in_thread
from launch.output import last_line, say, terminal
from launch.targets import Target

SH_LIMIT_S = 30.0

LOOK = """
see() { if [ -d "$1" ]; then echo folder; elif [ -e "$1" ] || [ -L "$1" ]; then echo file; else echo nothing; fi; }
case $1 in "~") p=$HOME;; "~/"*) p=$HOME/${1#"~/"};; *) p=$1;; esac
see "$p"; see "$p/$2"; printf '%s\\n' "$p"
"""
"""What there is at $1 and at $2 in it, and $1 with the home directory for "~"."""

SWAP = """
mv -- "$1" "$3" || { rm -rf -- "$2"; exit 1; }
mv -- "$2" "$1" || { mv -- "$3" "$1"; rm -rf -- "$2"; exit 1; }
rm -rf -- "$3"
"""
"""$2 takes the place of the folder $1, which is $3 for a moment."""


def put(target: Target, source: str, path_there: str, *, force: bool) -> int:
    """Copy a file or folder of this machine to every host. The exit code: 0, or 1 where some hosts could not.

    Raises:
        RequestError: there is no such file.
        HostsError: no host could.
    """
    local = Path(source).expanduser().absolute()
    kind, size = path_kind(local), tree_size(local)
    name = local.resolve().name if local.name in ("", "..") else local.name
    if kind == "nothing":
        raise RequestError(f"{source}: there is no such file on this machine")
    if not local.exists():
        raise RequestError(f"{source}: is a link to nothing; name the file that is meant")

    def copy(host: Host, transport: Transport, count: Count) -> int:
        copied = decide(name, kind, _look(host, transport, path_there, name), force=force)
        fresh = _temporary_path(copied.path) if copied.replaces else copied.path
        transport.put(local, fresh, count)
        if copied.replaces:
            _sh(host, transport, SWAP, copied.path, fresh, _temporary_path(copied.path))
        return size

    hosts = _different(target)
    return _on_all(hosts, copy, f"{source} to", size * len(hosts))


def get(target: Target, source: str, path_here: str, *, force: bool) -> int:
    """Copy a file or folder of every host to this machine: of several hosts each into a folder named by its index.

    The exit code: 0, or 1 where some hosts could not.

    Raises:
        RequestError: a file is where the folder must be.
        HostsError: no host could.
    """
    hosts, local = _different(target), Path(path_here).expanduser().absolute()
    name = posixpath.basename(posixpath.normpath(source))
    if name in ("", ".", "..", "~"):
        raise RequestError(f"{source}: name the folder itself, so that its copy has a name")
    if len(hosts) > 1 and path_kind(local) == "file":
        raise RequestError(f"{path_here} is a file, and the copies of {len(hosts)} hosts need a folder")

    def copy(host: Host, transport: Transport, count: Count) -> int:
        source_place = _look(host, transport, source, ".")
        if source_place.kind == "nothing":
            raise RequestError(f"{source}: there is no such file on the host")
        path = local / str(host.index) if len(hosts) > 1 else local
        slash = "/" if len(hosts) > 1 or path_here.endswith("/") else ""
        place = Place(path=f"{path}{slash}", kind=path_kind(path), inside=path_kind(path / name))
        copied = decide(name, source_place.kind, place, force=force)
        fresh = Path(_temporary_path(copied.path) if copied.replaces else copied.path)
        transport.get(source_place.path, fresh, count)
        if copied.replaces:
            swap(Path(copied.path), fresh, Path(_temporary_path(copied.path)))
        return tree_size(Path(copied.path))

    return _on_all(hosts, copy, f"{source} from", None)


def _different(target: Target) -> list[tuple[Host, Transport]]:
    """Return the hosts that have a disk of their own; those that are one machine share one."""
    both = list(zip(target.hosts, target.transports, strict=True))
    return both[:1] if target.capabilities.shares_host else both


def _count(hosts: Sequence[object]) -> str:
    return f"{len(hosts)} hosts" if len(hosts) > 1 else "1 host"


def _temporary_path(path: str) -> str:
    folder, name = posixpath.split(path)
    return posixpath.join(folder, beside_name(name))


def swap(old: Path, new: Path, aside: Path) -> None:
    """Let the folder `new` take the place of the folder `old`, which is `aside` for a moment."""
    old.rename(aside)
    try:
        new.rename(old)
    except OSError:
        aside.rename(old)
        raise
    shutil.rmtree(aside)


def _look(host: Host, transport: Transport, path: str, name: str) -> Place:
    output = _sh(host, transport, LOOK, path, name)
    kind, _, remaining = output.partition("\n")
    inside, _, path_found = remaining.partition("\n")
    kinds: dict[str, Kind] = {"file": "file", "folder": "folder", "nothing": "nothing"}
    if kind not in kinds or inside not in kinds:
        raise HostError(
            host=host.name,
            reason=f"its shell says more than was asked for: {output[:80]!r}",
            remedy="let ~/.bashrc there be silent in shells that are not interactive",
        )
    return Place(path=path_found.removesuffix("\n"), kind=kinds[kind], inside=kinds[inside])


def _sh(host: Host, transport: Transport, script: str, *arguments: str) -> str:
    done = transport.begin(["sh", "-c", script, "sh", *arguments], "", timeout_s=SH_LIMIT_S).result()
    if done.exit_code != 0:
        reason = last_line(done.stderr or done.stdout, f"exit code {done.exit_code}")
        late = f"did not answer within {SH_LIMIT_S:g} s"
        raise HostError(host=host.name, reason=late if done.exit_code is None else reason)
    return done.stdout


def _on_all(
    hosts: Sequence[tuple[Host, Transport]],
    copy: Callable[[Host, Transport, Count], int],
    title: str,
    total_bytes: int | None,
) -> int:
    """Copy on all hosts at once, show the progress, and return the exit code.

    Raises:
        HostsError: no host could.
    """
    began_s, errors, copied = time.monotonic(), list[HostError](), 0
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn())
    console = terminal()
    bars = Progress(
        *columns, TransferSpeedColumn(), console=console, disable=not console.is_terminal, transient=True
    )
    with bars as progress:
        bar = progress.add_task(f"{title} {_count(hosts)}", total=total_bytes)
        count = functools.partial(progress.advance, bar)
        futures = [in_thread(functools.partial(copy, host, transport, count)) for host, transport in hosts]
        for (host, _), future in zip(hosts, futures, strict=True):
            try:
                copied += future.result()
            except (HostError, OSError, RequestError) as error:
                errors.append(HostError.from_error(host.name, error))
    if len(errors) == len(hosts):
        raise HostsError(f"{title} {_count(hosts)}: nothing was copied", errors)
    took_s = max(time.monotonic() - began_s, 1e-3)
    good = f"{len(hosts) - len(errors)} of {_count(hosts)}" if errors else _count(hosts)
    say(console)(f"{title} {good}: {decimal(copied)}, {decimal(round(copied / took_s))}/s")
    for failed in errors:
        print(f"not copied: {failed}", file=sys.stderr)
    return 1 if errors else 0


Kind = Literal["file", "folder", "nothing"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """What exists where a copy is to go: at `path` itself, and in it under the source's name."""

    path: str
    kind: Kind
    inside: Kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copy:
    """Where a copy goes. replaces: whether it takes the place of a folder."""

    path: str
    replaces: bool


def decide(name: str, kind: Kind, place: Place, *, force: bool) -> Copy:
    """Decide where a file or folder called `name` goes: as with `cp`, into an existing folder, else under that name.

    A file takes the place of a file. A folder takes the place of a folder only by force, and is never mixed with it.

    Raises:
        RequestError: something is in the way.
    """
    into = place.kind == "folder" or place.path.endswith("/")
    path = posixpath.join(place.path, name) if into else place.path
    existing = place.inside if into else place.kind
    if place.kind == "file" and into:
        raise RequestError(f"{place.path} is a file, not a folder; name another target")
    if existing != "nothing" and existing != kind:
        raise RequestError(f"{path} is a {existing} and the source is a {kind}; name another target")
    if existing == "folder" and not force:
        raise RequestError(
            f"{path} is there already; --force replaces the whole folder, or name another target"
        )
    return Copy(path=path, replaces=existing == "folder")


def tree_size(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder; links are not followed."""
    if not path.is_dir() or path.is_symlink():
        return path.lstat().st_size if path_kind(path) == "file" else 0
    return DiskFiles().folder_bytes(str(path))


def path_kind(path: Path) -> Kind:
    return "folder" if path.is_dir() else "file" if path.exists() or path.is_symlink() else "nothing"
