"""A Debian 12 machine's disk, kernel and initial RAM disk, built once and kept in the user's cache.

What the start-up scripts install is not in it but in a repository of its own (/srv/packages), so that `apt-get update`
and `apt-get install` run for real and without a network.
"""

import dataclasses
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from pathlib import Path

import filelock

SIZE_MIB = 2048
UNUSED_S = 14 * 24 * 3600
# A machine is looked at and spoken to through QEMU's guest agent: no sshd, so that nothing but NFS may listen.
PACKAGES = (
    "systemd-sysv",
    "udev",
    "dbus",
    "linux-image-cloud-amd64",
    "qemu-guest-agent",
    "iproute2",
    "e2fsprogs",
    "curl",
    "apt-utils",
    # What Google's image has too, and software emulation takes a minute to install.
    "python3-apt",
    "python3-dbus",
    "python3-distro-info",
    "lsb-release",
    "ucf",
)
IN_REPOSITORY = ("nfs-kernel-server", "nfs-common", "curl", "unattended-upgrades")

FILES = {
    # Stand-in for the rule of Google's images, which makes this link for a disk's device name.
    "etc/udev/rules.d/65-gce-disk-naming.rules": (
        'SUBSYSTEM=="block", KERNEL=="vd*", ENV{ID_SERIAL}=="?*", SYMLINK+="disk/by-id/google-$env{ID_SERIAL}"\n'
    ),
    # Stand-in for Google's guest agent, which runs the metadata `startup-script` at every boot.
    "etc/systemd/system/google-startup-scripts.service": (
        "[Unit]\nDescription=Start-up scripts\nWants=network-online.target\nAfter=network-online.target\n"
        "ConditionDirectoryNotEmpty=/opt/startup\n"
        "[Service]\nType=oneshot\nEnvironmentFile=-/etc/startup-environment\nExecStart=/bin/run-parts /opt/startup\n"
        "StandardOutput=journal+console\nStandardError=journal+console\n"
        "[Install]\nWantedBy=multi-user.target\n"
    ),
    # No gateway and no name server: QEMU's user network reaches this machine's loopback as 10.0.2.2 and nothing else.
    "etc/systemd/network/10-qemu.network": "[Match]\nName=en* eth*\n[Network]\nAddress=10.0.2.15/24\n",
    "etc/apt/sources.list": "deb [trusted=yes] file:/srv/packages ./\n",
    "etc/hostname": "gateway\n",
    "etc/hosts": "127.0.0.1 localhost gateway\n",
    # Only here a gateway mounts its own share, and at shutdown has to leave it before it stops serving it.
    "etc/systemd/system/nfs-server.service.d/own-client.conf": "[Unit]\nBefore=remote-fs-pre.target\n",
    # In software emulation a new initial RAM disk, which no test needs, takes a minute.
    "etc/initramfs-tools/update-initramfs.conf": "update_initramfs=no\n",
    "etc/dpkg/dpkg.cfg.d/unsafe-io": "force-unsafe-io\n",
    "etc/fstab": "# the image's own line\n/dev/vda / ext4 defaults 0 1\n",
}
FETCH = f'chroot "$1" apt-get --quiet --yes --no-install-recommends --download-only install {" ".join(IN_REPOSITORY)}'
HOOKS = (
    FETCH,
    'mkdir -p "$1/srv/packages" "$1/opt/startup"',
    'cp "$1"/var/cache/apt/archives/*.deb "$1/srv/packages"',
    'chroot "$1" sh -c "cd /srv/packages && apt-ftparchive packages . >Packages"',
    'chroot "$1" systemctl --quiet enable systemd-networkd systemd-networkd-wait-online google-startup-scripts',
    # What comes by a timer would come in the middle of some test or other.
    'chroot "$1" systemctl --quiet mask apt-daily.timer apt-daily-upgrade.timer e2scrub_reap.service',
)


class MissingTool(RuntimeError):
    """A program that builds or runs the machine is not installed; the message names its package."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Image:
    """Three files that QEMU starts a machine from; read only, as others start from them too."""

    disk: Path
    kernel: Path
    initial: Path


def need(program: str, package: str) -> str:
    """Where `program` is. MissingTool: nowhere."""
    found = shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if found is None:
        raise MissingTool(f"{program} is not on PATH; install it: apt-get install {package}")
    return found


def image(*, installed: bool = False) -> Image:
    """The image of this recipe: from the cache, or built there in about a minute (from Debian's servers).

    installed: with what the start-up scripts would install, which takes three minutes under software emulation.
    """
    install = (FETCH.replace("--download-only ", ""),) if installed else ()
    hooks = (*HOOKS[:4], *install, *HOOKS[4:])
    recipe = repr((SIZE_MIB, PACKAGES, IN_REPOSITORY, sorted(FILES.items()), hooks))
    key = hashlib.sha256(recipe.encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tpu-stack" / "machine"
    folder = cache / key
    cache.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(cache / f"{key}.lock", timeout=600):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=cache, prefix="building-") as scratch:
                _build(Path(scratch), hooks)
                os.rename(scratch, folder)
                Path(scratch).mkdir()  # for TemporaryDirectory to remove
        os.utime(folder)
    _forget_unused(cache)
    return Image(disk=folder / "disk.img", kernel=folder / "vmlinuz", initial=folder / "initrd.img")


def _forget_unused(cache: Path) -> None:
    """Half a gigabyte each: images that no test has started from for two weeks."""
    for each in cache.iterdir():
        if each.is_dir() and each.stat().st_mtime < time.time() - UNUSED_S:
            shutil.rmtree(each)


def _build(folder: Path, hooks: tuple[str, ...]) -> None:
    mmdebstrap = need("mmdebstrap", "mmdebstrap")
    make_ext4 = need("mkfs.ext4", "e2fsprogs")
    if os.geteuid() != 0:
        raise MissingTool(
            "only root can build the machine's disk with its owners and device nodes; run as root"
        )
    with tarfile.open(folder / "files.tar", "w") as archive:
        for name, text in FILES.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            entry.mode = 0o644
            archive.addfile(entry, io.BytesIO(text.encode()))
    last_two = len(hooks) - 2  # they need the files
    hooks = (*hooks[:last_two], f"tar-in {folder}/files.tar /", *hooks[last_two:], f"copy-out /boot {folder}")
    root = folder / "root"
    command = [
        mmdebstrap,
        "--quiet",
        "--variant=apt",
        f"--include={','.join(PACKAGES)}",
        '--aptopt=APT::Install-Recommends "false"',
        *(f"--customize-hook={each}" for each in hooks),
        "bookworm",
        str(root),
    ]
    _run(command)
    _run([make_ext4, "-q", "-d", str(root), str(folder / "disk.img"), f"{SIZE_MIB}M"])
    for name, start in (("vmlinuz", "vmlinuz-"), ("initrd.img", "initrd.img-")):
        (found,) = (folder / "boot").glob(f"{start}*")
        found.rename(folder / name)
    shutil.rmtree(root)
    shutil.rmtree(folder / "boot")
    (folder / "files.tar").unlink()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=900)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}:\n{done.stderr[-4000:]}")
