"""Injects faults into a machine, and undoes them. Each method may be called twice."""

from __future__ import annotations

from collections.abc import Callable

import docker
from docker.models.containers import Container

from rehearsal.machines.docker_engine import LABEL, MachinesError, asking, labels, wait_for
from rehearsal.machines.machine import (
    DEVICE,
    DOCKER_DATA,
    DOCKER_START,
    HOME_MIB,
    HOST_KEY,
    PYTHON,
    SETTINGS,
    SPARE_SHARE,
    Standing,
    authorized_keys_path,
    home,
    shifted,
)
from rehearsal.machines.servers import SHARE_MIB

RELOAD_LIMIT_S = 15
LISTENS = b"Server listening on"

# What is run in or around a machine, as text for `sh -c`; the words after it are $1, $2 …
CUT = """set -eu
for chain in "INPUT ! -i lo" "OUTPUT ! -o lo"; do
  iptables -w 5 -C $chain -j DROP 2>/dev/null || iptables -w 5 -I $chain -j DROP
done"""
HEAL = """set -eu
for chain in "INPUT ! -i lo" "OUTPUT ! -o lo"; do
  if iptables -w 5 -C $chain -j DROP 2>/dev/null; then iptables -w 5 -D $chain -j DROP; fi
done"""

# The file system shrinks to what is in it, so that nothing has to be written to make it full. It may grow between the
# two commands, and then the second is refused: hence the tries. Without a file in it its size would be 0, which means
# no limit.
FILL = """head -c 4096 /dev/zero >"$1/.full" 2>/dev/null
for attempt in 1 2 3 4 5 6 7 8 9; do
  used=$(df -k --output=used "$1" | tail -n 1)
  if mount -o "remount,size=$((used))k" "$1"; then exit 0; fi
done
exit 1"""
EMPTY = """set -eu
mount -o "remount,size=$2m" "$1"
rm -f "$1/.full\""""

UNMOUNT = """set -eu
if mountpoint -q "$1"; then umount --lazy "$1"; fi"""
MOUNT = """set -eu
if ! mountpoint -q "$1"; then mount --bind "$2" "$1"; fi"""

READ = 'cat "$1"'
WRITE = 'printf %s "$2" >"$1.new" && mv "$1.new" "$1"'
TAKE_AWAY = """set -eu
if [ -e "$1.away" ] || [ -L "$1.away" ]; then exit 0; fi
mv "$1" "$1.away\""""
BRING_BACK = 'if [ -e "$1.away" ] || [ -L "$1.away" ]; then mv "$1.away" "$1"; fi'

# Left over when this shell ends, it is a child of the container's first process like any other of the user's.
HOLD = 'exec 9<>"$1" || exit 1; sleep infinity >/dev/null 2>&1 & echo $!'
RELEASE = """for process in /proc/[0-9]*; do
  [ "$(cat "$process/comm" 2>/dev/null)" = sleep ] || continue
  for each in "$process"/fd/*; do
    if [ "$(readlink "$each")" = "$1" ]; then kill -KILL "${process#/proc/}"; break; fi
  done
done
exit 0"""

NEW_HOST_KEY = """set -eu
[ -e "$1.own" ] || cp -p "$1" "$1.own"
rm -f "$1.other" "$1.other.pub"
ssh-keygen -q -t ed25519 -N '' -C '' -f "$1.other"
mv "$1.other" "$1"
cat "$1.other.pub\""""
OWN_HOST_KEY = 'if [ -e "$1.own" ]; then mv "$1.own" "$1"; fi'
RELOAD = 'kill -HUP "$(cat /run/sshd.pid)"'

# Its containers go on, and the next daemon ends them.
KILL_DOCKER = """set -eu
daemon=$(cat /run/docker.pid)
kill -KILL "$daemon"
while kill -0 "$daemon" 2>/dev/null; do sleep 0.05; done"""

# Field 22 of stat is when it started; its command may hold blanks and is cut off first.
NEWEST_JOB = """for process in /proc/[0-9]*; do
  tr '\\0' '\\n' 2>/dev/null <"$process/cmdline" | grep -qx 'jobs\\.[a-z0-9_]*' || continue
  started=$(sed 's/.*) //' "$process/stat" 2>/dev/null | cut -d ' ' -f 20)
  [ -n "$started" ] && echo "$started ${process#/proc/}"
done | sort -n | tail -n 1 | cut -d ' ' -f 2"""
SIGNAL = 'kill -s "$1" "$2"'

Find = Callable[[str], tuple[Container, Standing]]


class Faults:
    """Of the machines of one rehearsal. Every method takes a running machine's name and raises MachinesError."""

    def __init__(self, client: docker.DockerClient, find: Find, image: str) -> None:
        self._client = client
        self._find = find
        self._image = image

    def cut(self, name: str) -> None:
        """Drops all packets to and from it, and tells nobody; what it does within itself goes on."""
        self._from_outside(name, "NET_ADMIN", ["sh", "-c", CUT], f"cutting {name} off")

    def heal(self, name: str) -> None:
        self._from_outside(name, "NET_ADMIN", ["sh", "-c", HEAL], f"healing {name}'s network")

    def fill_disk(self, name: str) -> None:
        """Its home has no byte left."""
        self._mount(name, FILL, home(self._running(name)[1].user))

    def empty_disk(self, name: str) -> None:
        self._mount(name, EMPTY, home(self._running(name)[1].user), str(HOME_MIB))

    def fill_share(self, name: str) -> None:
        """The share has no byte left, for all machines."""
        self._share_of(name)
        self._mount(name, FILL, SPARE_SHARE)

    def empty_share(self, name: str) -> None:
        self._share_of(name)
        self._mount(name, EMPTY, SPARE_SHARE, str(SHARE_MIB))

    def unmount_share(self, name: str) -> None:
        """Its mount point is an empty folder; files that are open stay usable."""
        self._mount(name, UNMOUNT, self._share_of(name))

    def mount_share(self, name: str) -> None:
        self._mount(name, MOUNT, self._share_of(name), SPARE_SHARE)

    def set_clock(self, name: str, seconds: float) -> None:
        """ssh connections made from now on see a clock that is so much ahead (negative: behind); 0.0 undoes it."""
        container, _ = self._running(name)
        settings = self._inside(name, READ, SETTINGS)
        self._inside(name, WRITE, SETTINGS, shifted(settings, seconds))
        self._reload(name, container)

    def hold_device(self, name: str) -> int:
        """A process of the machine's user has DEVICE open; → its pid there."""
        user = self._running(name)[1].user
        return int(self._inside(name, HOLD, DEVICE, user=user))

    def release_device(self, name: str) -> None:
        user = self._running(name)[1].user  # root here may not look into processes of others
        self._inside(name, RELEASE, DEVICE, user=user)

    def break_python(self, name: str, path: str = PYTHON) -> None:
        """The interpreter is not there for what is started from now on."""
        self._inside(name, TAKE_AWAY, path)

    def mend_python(self, name: str, path: str = PYTHON) -> None:
        self._inside(name, BRING_BACK, path)

    def refuse_keys(self, name: str) -> None:
        """New connections of its user are refused, whatever their key."""
        self._inside(name, TAKE_AWAY, authorized_keys_path(self._running(name)[1].user))

    def accept_keys(self, name: str) -> None:
        self._inside(name, BRING_BACK, authorized_keys_path(self._running(name)[1].user))

    def change_host_key(self, name: str) -> str:
        """New connections are shown another key; → its public line, "ssh-ed25519 AAAA…"."""
        container, _ = self._running(name)
        line = self._inside(name, NEW_HOST_KEY, HOST_KEY)
        self._reload(name, container)
        return " ".join(line.split()[:2])

    def restore_host_key(self, name: str) -> None:
        container, _ = self._running(name)
        self._inside(name, OWN_HOST_KEY, HOST_KEY)
        self._reload(name, container)

    def wedge(self, name: str, pid: int | None = None) -> int:
        """SIGSTOP to that process, or to the newest one that runs a job (python -m jobs.…); → its pid there."""
        chosen = str(pid) if pid is not None else self._inside(name, NEWEST_JOB).strip()
        if not chosen:
            raise MachinesError(f"{name} runs no job to wedge; start one, or name a pid")
        self._inside(name, SIGNAL, "STOP", chosen)
        return int(chosen)

    def unwedge(self, name: str, pid: int) -> None:
        self._inside(name, SIGNAL, "CONT", str(pid))

    def kill_docker(self, name: str) -> None:
        """Its Docker daemon is gone, and nothing starts it again; containers go on."""
        self._require_docker(name)
        self._inside(name, KILL_DOCKER)

    def start_docker(self, name: str) -> None:
        """Returns when it answers."""
        self._require_docker(name)
        self._inside(name, DOCKER_START)

    def _require_docker(self, name: str) -> None:
        container, _ = self._running(name)
        if not any(each["Destination"] == DOCKER_DATA for each in container.attrs["Mounts"]):
            raise MachinesError(
                f"{name} was made without Docker; `fab rehearsal up --docker` makes hosts with it"
            )

    def _running(self, name: str) -> tuple[Container, Standing]:
        container, standing = self._find(name)
        if standing.state != "running":
            raise MachinesError(f"{name} is {standing.state}, not running; start it first")
        return container, standing

    def _share_of(self, name: str) -> str:
        share = self._running(name)[1].share_mount
        if not share:
            raise MachinesError(f"{name} was made without a share")
        return share

    def _inside(self, name: str, script: str, *words: str, user: str = "root") -> str:
        """What a script says that runs in the machine, as its own processes may."""
        container, _ = self._running(name)
        with asking(f"in {name}"):
            done = container.exec_run(["sh", "-c", script, "sh", *words], user=user, demux=True)
        said, complained = (part.decode(errors="replace") if part else "" for part in done.output)
        if done.exit_code != 0:
            raise MachinesError(f"in {name}: exit code {done.exit_code}: {complained.strip()[-500:]}")
        return said

    def _mount(self, name: str, script: str, *words: str) -> None:
        enter = ["nsenter", "--target", "1", "--mount", "sh", "-c", script, "sh", *words]
        self._from_outside(name, "SYS_ADMIN", enter, f"mounts of {name}")

    def _from_outside(self, name: str, right: str, command: list[str], what: str) -> None:
        """Runs it in a container that for a moment shares the machine's network and processes and has a right that the
        machine itself must not have."""
        container, _ = self._running(name)
        with asking(what):
            self._client.containers.run(
                self._image, entrypoint=command[:1], command=command[1:], remove=True, user="root",
                labels=labels(container.labels[LABEL], role="hand"), cap_add=[right, "SYS_PTRACE"],
                security_opt=["apparmor=unconfined", "seccomp=unconfined", "label=disable"],
                network_mode=f"container:{container.id}", pid_mode=f"container:{container.id}",
            )  # fmt: skip

    def _reload(self, name: str, container: Container) -> None:
        """sshd reads its files anew; returns when that is done, for until then it greets with what it knew."""
        before = container.logs().count(LISTENS)
        self._inside(name, RELOAD)
        wait_for(
            lambda: container.logs().count(LISTENS) > before,
            RELOAD_LIMIT_S,
            container,
            f"the reloaded sshd of {name}",
        )
