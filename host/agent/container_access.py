"""Who a container's process is, and which devices of the host it has: those of its platform and nothing more, unless
the run was started with `--container-access privileged`."""

from __future__ import annotations

import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NamedTuple

    class Node(NamedTuple):
        path: str
        mode: int
        uid: int
        gid: int

    class Access(NamedTuple):
        """become: what runs in the container before the job's init, as root, to become its user."""

        arguments: list[str]
        as_root: bool
        note: str | None
        become: list[str]
else:
    from collections import namedtuple

    Node = namedtuple("Node", "path mode uid gid")
    Access = namedtuple("Access", "arguments as_root note become")

LARGEST_ID = 2**31 - 1
"""What Docker takes for a user or a group. OS Login gives ids up to 2**32 (3721906406 was seen)."""
NODE_GLOBS = {"tpu": ("/dev/accel*", "/dev/vfio/[0-9]*", "/dev/vfio/vfio"), "gpu": (), "cpu": ()}


def nodes(patterns: Sequence[str]) -> list[Node]:
    """The device nodes of this host, sorted; what else has such a name is none."""
    import glob

    found = []
    for path in sorted({path for pattern in patterns for path in glob.glob(pattern)}):
        status = os.stat(path)
        if stat.S_ISCHR(status.st_mode):
            found.append(Node(path, status.st_mode, status.st_uid, status.st_gid))
    return found


def access(platform: str, devices: Sequence[Node], uid: int, gid: int, groups: Sequence[int]) -> Access:
    """User, groups, capabilities and devices of a container, as arguments of `docker create`. Pure.

    The user is the agent's own. A node that this user may not open is opened by its group; one that its owner alone
    may open, by root, who then needs to get past the owners of files as well: the run directory is the user's.
    """
    may = {node: _may_open(node, uid, {gid, *groups}) for node in devices}
    by_group = {node.gid for node in devices if not may[node] and node.mode & 0o060 == 0o060}
    closed = [node.path for node in devices if not may[node] and node.mode & 0o060 != 0o060]
    others = sorted({*groups, *by_group} - {gid})
    become: list[str] = []
    if closed:
        # Root gets past the groups of files too, so that those that Docker does not take are not missed.
        fit = [group for group in others if group <= LARGEST_ID]
        arguments = [*_user("0:0", fit), "--cap-add", "DAC_OVERRIDE"]
    else:
        arguments, become = as_user(uid, gid, others)
    for node in devices:
        arguments += ["--device", node.path]
    if platform == "gpu":
        arguments += ["--gpus", "all"]
    note = None
    if closed:
        note = (
            f"only their owner may open {', '.join(closed)}, so the container runs as root, whose its files are;"
            " a udev rule that gives them a group, or mode 0666, mends it"
        )
    return Access(arguments, bool(closed), note, become)


def as_user(uid: int, gid: int, groups: Sequence[int] = ()) -> tuple[list[str], list[str]]:
    """Arguments by which a container's process is a user, and the words in front of its program. Pure.

    Docker refuses an id above 2147483647, the kernel takes it. Then the container begins as root with the two
    capabilities that it takes to change ids, and the first program, `setpriv` of the image's util-linux, becomes the
    user and is replaced by the job's init: of root nothing is left, the process and its files are the user's.
    """
    if max(uid, gid, *groups) <= LARGEST_ID:
        return _user(f"{uid}:{gid}", groups), []
    words = ["--groups", ",".join(map(str, groups))] if groups else ["--clear-groups"]
    capabilities = ["--cap-add", "SETUID", "--cap-add", "SETGID"]
    return [*_user("0:0", []), *capabilities], [
        "setpriv",
        "--reuid",
        str(uid),
        "--regid",
        str(gid),
        *words,
        "--",
    ]


def _user(user: str, groups: Sequence[int]) -> list[str]:
    added = [word for group in groups for word in ("--group-add", str(group))]
    return ["--user", user, *added, "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]


def privileged(platform: str) -> Access:
    """The same for `--container-access privileged`, where the devices alone do not do: all that the host's root may."""
    gpus = ["--gpus", "all"] if platform == "gpu" else []
    note = "the container is privileged and runs as the host's root, whose the files are that it makes"
    return Access(["--user", "0:0", "--privileged", *gpus], True, note, [])


def _may_open(node: Node, uid: int, groups: set[int]) -> bool:
    if node.uid == uid:
        return node.mode & 0o600 == 0o600
    if node.gid in groups:
        return node.mode & 0o060 == 0o060
    return node.mode & 0o006 == 0o006
