"""A machine under QEMU, from its start to its end: commands in it through the guest agent, disks, reboots.

With KVM where this machine has it, else in software. Every wait has a limit, and the process never outlives `Guest`.
"""

import base64
import dataclasses
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.machine import debian

ANSWER_S = 60
BOOT_S = 240
KVM_BOOT_S = 60
POLL_S = 0.1
KVM = ("-accel", "kvm", "-cpu", "host")
# Wide vector instructions, which a newer processor has, are slow to emulate.
SOFTWARE = ("-accel", "tcg,thread=multi", "-cpu", "qemu64")


class GuestError(RuntimeError):
    """The machine did not do what it was told within the time, with the end of its console."""


class Channel:
    """One JSON object a line, an answer to each command: the guest agent's protocol and that of QEMU itself."""

    def __init__(self, path: Path, limit_s: float) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(limit_s)
        try:
            self._socket.connect(str(path))
        except OSError:
            self._socket.close()
            raise
        self._lines = self._socket.makefile("rb")

    def ask(self, command: str, **arguments: object) -> Any:
        request = {"execute": command, "arguments": arguments}
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        while True:
            line = self._lines.readline()
            if not line:
                raise ConnectionError(f"{command}: QEMU has ended")
            answer = json.loads(line)
            if "error" in answer:
                raise GuestError(f"{command}: {answer['error']}")
            if "return" in answer:
                return answer["return"]

    def find_agent(self) -> None:
        """What an earlier channel left unread is skipped: the answer to look for carries our own number."""
        number = int.from_bytes(os.urandom(4))
        # 0xFF ends whatever the agent has half read; it is documented to begin its next answer with one too.
        self._socket.sendall(
            b"\xff" + json.dumps({"execute": "guest-sync-delimited", "arguments": {"id": number}}).encode()
        )
        while True:
            line = self._lines.readline()
            if not line:
                raise ConnectionError("QEMU has ended")
            if line.lstrip(b"\xff").strip() == json.dumps({"return": number}).encode():
                # Found at once or not at all; but on a busy machine an answer to a command may take its time.
                self._socket.settimeout(ANSWER_S)
                return

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
    """What a command in the machine left behind."""

    status: int
    output: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Disk:
    """A second disk, a file of this machine; in the guest /dev/disk/by-id/google-NAME."""

    name: str
    file: Path


class Guest:
    """One running machine. Made by `started`."""

    def __init__(self, *, process: subprocess.Popen[bytes], folder: Path) -> None:
        self._process = process
        self._folder = folder

    def run(self, *command: str, limit_s: float = 120, **environment: str) -> Ended:
        """The command's exit status, and its standard output and error together."""
        shell = 'exec 2>&1; exec "$@"'
        variables = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C", **environment}
        with self._agent() as agent:
            started = agent.ask(
                "guest-exec",
                **{
                    "path": "/bin/sh",
                    "arg": ["-c", shell, "sh", *command],
                    "env": [f"{name}={value}" for name, value in variables.items()],
                    "capture-output": True,
                },
            )
            until = time.monotonic() + limit_s
            while time.monotonic() < until:
                state = agent.ask("guest-exec-status", pid=started["pid"])
                if state["exited"]:
                    output = base64.b64decode(state.get("out-data", "")).decode(errors="replace")
                    return Ended(status=state.get("exitcode", 128 + state.get("signal", 0)), output=output)
                time.sleep(POLL_S)
        raise self._error(f"{' '.join(command)} has not ended after {limit_s} s")

    def read(self, *command: str, limit_s: float = 120) -> str:
        """What the command prints, without the last line's end. GuestError: it failed."""
        ended = self.run(*command, limit_s=limit_s)
        if ended.status != 0:
            raise self._error(f"{' '.join(command)} ended with {ended.status}: {ended.output}")
        return ended.output.rstrip("\n")

    def put(self, path: str, text: str) -> None:
        """An executable file with `text` in it."""
        with self._agent() as agent:
            handle = agent.ask("guest-file-open", path=path, mode="w")
            raw = base64.b64encode(text.encode()).decode()
            agent.ask("guest-file-write", **{"handle": handle, "buf-b64": raw})
            agent.ask("guest-file-close", handle=handle)
        self.read("chmod", "0755", path)

    def until(self, *command: str, limit_s: float) -> None:
        """Waits for the command to succeed. GuestError: it did not in time."""
        until = time.monotonic() + limit_s
        while (ended := self.run(*command)).status != 0:
            if time.monotonic() > until:
                raise self._error(f"{' '.join(command)} still fails after {limit_s} s: {ended.output}")
            time.sleep(POLL_S)

    def reboot(self) -> None:
        """An orderly shutdown, and the next boot to the end of its start-up scripts."""
        before = self.read("cat", "/proc/sys/kernel/random/boot_id")
        self.read("systemctl", "--no-block", "reboot")
        until = time.monotonic() + BOOT_S
        while True:
            if time.monotonic() > until:
                raise self._error(f"the machine has not come back from its reboot after {BOOT_S} s")
            try:
                if self.read("cat", "/proc/sys/kernel/random/boot_id") != before:
                    break
            except (OSError, GuestError):
                time.sleep(POLL_S)
        self.wait_for_boot()

    def wait_for_boot(self, limit_s: float = BOOT_S) -> None:
        """Until systemd has nothing left to start; also when a unit failed."""
        with self._agent(limit_s):
            pass
        ended = self.run("systemctl", "is-system-running", "--wait", limit_s=limit_s)
        if ended.output.strip() not in ("running", "degraded"):
            raise self._error(f"the machine did not boot: {ended.output}")

    def kill(self) -> None:
        """As if its plug were pulled."""
        self._process.kill()
        self._process.wait(timeout=30)

    @contextmanager
    def _agent(self, limit_s: float = BOOT_S) -> Iterator[Channel]:
        """Tries until the agent answers: before and during a boot there is none."""
        until = time.monotonic() + limit_s
        while True:
            if self._process.poll() is not None:
                raise self._error(f"QEMU ended with {self._process.returncode}")
            channel = None
            try:
                channel = Channel(self._folder / "agent", limit_s=5)
                channel.find_agent()
                break
            except OSError as error:
                if channel is not None:
                    channel.close()
                if time.monotonic() > until:
                    raise self._error(f"the guest agent has not answered for {limit_s} s") from error
                time.sleep(POLL_S)
        try:
            yield channel
        finally:
            channel.close()

    def _error(self, what: str) -> GuestError:
        console = (self._folder / "console.log").read_text(errors="replace")
        said = (self._folder / "qemu.log").read_text(errors="replace")
        return GuestError(f"{what}\n--- qemu\n{said[-2000:]}\n--- console\n{console[-3000:]}")


@contextmanager
def started(image: debian.Image, disks: tuple[Disk, ...], folder: Path) -> Iterator[Guest]:
    """A machine that has booted from `image`, whose changes are forgotten at the end; those of `disks` stay."""
    program = debian.need("qemu-system-x86_64", "qemu-system-x86")
    # KVM inside another virtual machine may be there and not work: then software does, which is slow and always right.
    if os.access("/dev/kvm", os.R_OK | os.W_OK):
        fast = _start(program, [*KVM, *_arguments(image, disks, folder)], folder)
        try:
            fast.wait_for_boot(limit_s=KVM_BOOT_S)
        except GuestError:
            fast.kill()
        else:
            try:
                yield fast
            finally:
                fast.kill()
            return
    slow = _start(program, [*SOFTWARE, *_arguments(image, disks, folder)], folder)
    try:
        slow.wait_for_boot()
        yield slow
    finally:
        slow.kill()


def _start(program: str, arguments: list[str], folder: Path) -> Guest:
    with (folder / "qemu.log").open("wb") as log:
        process = subprocess.Popen([program, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    return Guest(process=process, folder=folder)


def _arguments(image: debian.Image, disks: tuple[Disk, ...], folder: Path) -> list[str]:
    arguments = [
        *("-nodefaults", "-no-user-config", "-display", "none", "-smp", "2", "-m", "1024"),
        *("-kernel", str(image.kernel), "-initrd", str(image.initial)),
        *("-append", "root=/dev/vda rw console=ttyS0 mitigations=off systemd.show_status=no"),
        *("-chardev", f"file,id=console,path={folder}/console.log", "-serial", "chardev:console"),
        *("-netdev", "user,id=net,ipv6=off", "-device", "virtio-net-pci,netdev=net"),
        *("-device", "virtio-rng-pci", "-device", "virtio-serial-pci"),
        *("-chardev", f"socket,id=agent,path={folder}/agent,server=on,wait=off"),
        *("-device", "virtserialport,chardev=agent,name=org.qemu.guest_agent.0"),
        *("-drive", f"if=none,id=root,format=raw,snapshot=on,cache=unsafe,file={image.disk}"),
        *("-device", "virtio-blk-pci,drive=root"),
    ]
    for disk in disks:
        arguments += ["-drive", f"if=none,id={disk.name},format=raw,cache=writethrough,file={disk.file}"]
        arguments += ["-device", f"virtio-blk-pci,drive={disk.name},serial={disk.name}"]
    return arguments
