"""Injects faults into a machine, and undoes them. Each method may be called twice."""

from __future__ import annotations

import re

from rehearsal.machines.containers import Containers
from rehearsal.machines.docker_engine import MachinesError, asking, labels, wait_for
from rehearsal.machines.host_image import (
    AUTHORIZED_KEYS,
    DEVICE,
    DOCKER_DATA,
    DOCKER_START,
    FAKETIME,
    HOME,
    HOME_MIB,
    HOST_KEY,
    PYTHON,
    SETTINGS,
    SHARE,
    SPARE_SHARE,
    USER,
)
from rehearsal.machines.servers import SHARE_MIB

RELOAD_LIMIT_S = 15
LISTENS = b"Server listening on"

# The monotonic clock stays as it is: a computer that is set wrong measures durations all the same.
_CLOCK = f'"LD_PRELOAD={FAKETIME}" "FAKETIME_DONT_FAKE_MONOTONIC=1" "FAKETIME=%+.3f"'
_SHIFT = re.compile(re.escape(_CLOCK).replace(re.escape("%+.3f"), r"[+-][\d.]+"))

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


def shifted(settings: str, seconds: float) -> str:
    """The machine's lines of sshd's configuration with the clock of what ssh starts so much ahead; 0.0: as it is.

    libfaketime does it, which variables of every session preload.
    """
    setting = _SHIFT.sub("", settings).removeprefix("SetEnv").strip()
    variables = [setting, *([_CLOCK % seconds] if seconds != 0.0 else [])]
    return f"SetEnv {' '.join(variables)}\n"


class Faults:
    """Faults of one rehearsal's machines. Every method takes a running machine's name and raises MachinesError."""

    def __init__(self, containers: Containers) -> None:
        self._containers = containers

    def cut(self, name: str) -> None:
        """Drops all packets to and from it, and tells nobody; what it does within itself goes on."""
        self._from_outside(name, "NET_ADMIN", ["sh", "-c", CUT], f"cutting {name} off")

    def heal(self, name: str) -> None:
        self._from_outside(name, "NET_ADMIN", ["sh", "-c", HEAL], f"healing {name}'s network")

    def fill_disk(self, name: str) -> None:
        """Fill the user's home to the last byte."""
        self._mount(name, FILL, HOME)

    def empty_disk(self, name: str) -> None:
        self._mount(name, EMPTY, HOME, str(HOME_MIB))

    def fill_share(self, name: str) -> None:
        """The share has no byte left, for all machines."""
        self._mount(name, FILL, SPARE_SHARE)

    def empty_share(self, name: str) -> None:
        self._mount(name, EMPTY, SPARE_SHARE, str(SHARE_MIB))

    def unmount_share(self, name: str) -> None:
        """Unmount the share: its mount point is an empty folder; open files stay usable."""
        self._mount(name, UNMOUNT, SHARE)

    def mount_share(self, name: str) -> None:
        self._mount(name, MOUNT, SHARE, SPARE_SHARE)

    def set_clock(self, name: str, seconds: float) -> None:
        """ssh connections made from now on see a clock that is so much ahead (negative: behind); 0.0 undoes it."""
        settings = self._inside(name, READ, SETTINGS)
        self._inside(name, WRITE, SETTINGS, shifted(settings, seconds))
        self._reload(name)

    def hold_device(self, name: str) -> int:
        """A process of the machine's user has DEVICE open; → its pid there."""
        return int(self._inside(name, HOLD, DEVICE, user=USER))

    def release_device(self, name: str) -> None:
        self._inside(name, RELEASE, DEVICE, user=USER)  # root here may not look into processes of others

    def break_python(self, name: str) -> None:
        """The interpreter is not there for what is started from now on."""
        self._inside(name, TAKE_AWAY, PYTHON)

    def mend_python(self, name: str) -> None:
        self._inside(name, BRING_BACK, PYTHON)

    def refuse_keys(self, name: str) -> None:
        """New connections of its user are refused, whatever their key."""
        self._inside(name, TAKE_AWAY, AUTHORIZED_KEYS)

    def accept_keys(self, name: str) -> None:
        self._inside(name, BRING_BACK, AUTHORIZED_KEYS)

    def change_host_key(self, name: str) -> str:
        """New connections are shown another key; → its public line, "ssh-ed25519 AAAA…"."""
        line = self._inside(name, NEW_HOST_KEY, HOST_KEY)
        self._reload(name)
        return " ".join(line.split()[:2])

    def restore_host_key(self, name: str) -> None:
        self._inside(name, OWN_HOST_KEY, HOST_KEY)
        self._reload(name)

    def wedge(self, name: str) -> int:
        """SIGSTOP to the newest process that runs a job (python -m jobs.…); → its pid there."""
        chosen = self._inside(name, NEWEST_JOB).strip()
        if not chosen:
            raise MachinesError(f"{name} runs no job to wedge; start one")
        self._inside(name, SIGNAL, "STOP", chosen)
        return int(chosen)

    def unwedge(self, name: str, pid: int) -> None:
        self._inside(name, SIGNAL, "CONT", str(pid))

    def kill_docker(self, name: str) -> None:
        """Kill the machine's Docker daemon, which nothing starts again; its containers keep running."""
        self._require_docker(name)
        self._inside(name, KILL_DOCKER)

    def start_docker(self, name: str) -> None:
        """Returns when it answers."""
        self._require_docker(name)
        self._inside(name, DOCKER_START)

    def _require_docker(self, name: str) -> None:
        mounts = self._containers.running(name).attrs["Mounts"]
        if not any(mount["Destination"] == DOCKER_DATA for mount in mounts):
            raise MachinesError(
                f"{name} was made without Docker; `fab rehearsal up --docker` makes hosts with it"
            )

    def _inside(self, name: str, script: str, *arguments: str, user: str = "root") -> str:
        """Run a script in the machine with the rights of its own processes, and return its output."""
        return self._containers.run_in(name, ["sh", "-c", script, "sh", *arguments], user=user)

    def _mount(self, name: str, script: str, *arguments: str) -> None:
        enter = ["nsenter", "--target", "1", "--mount", "sh", "-c", script, "sh", *arguments]
        self._from_outside(name, "SYS_ADMIN", enter, f"mounts of {name}")

    def _from_outside(self, name: str, right: str, command: list[str], action: str) -> None:
        """Run a command in a short-lived container that shares the machine's network and processes and has a capability
        that the machine itself must not have."""
        container = self._containers.running(name)
        with asking(action):
            self._containers.client.containers.run(
                self._containers.image, entrypoint=command[:1], command=command[1:], remove=True, user="root",
                labels=labels(self._containers.rehearsal, role="hand"), cap_add=[right, "SYS_PTRACE"],
                security_opt=["apparmor=unconfined", "seccomp=unconfined", "label=disable"],
                network_mode=f"container:{container.id}", pid_mode=f"container:{container.id}",
            )  # fmt: skip

    def _reload(self, name: str) -> None:
        """sshd reads its files anew; returns when that is done, for until then it greets with what it knew."""
        container = self._containers.running(name)
        before = container.logs().count(LISTENS)
        self._inside(name, RELOAD)
        wait_for(
            lambda: container.logs().count(LISTENS) > before,
            RELOAD_LIMIT_S,
            container,
            f"the reloaded sshd of {name}",
        )
