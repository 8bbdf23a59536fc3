"""What is mounted here, and whether it answers."""

from __future__ import annotations

import os
import re

from .checks import check
from .waiting import in_time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .protocol import Json

ANSWER_LIMIT_S = 5.0
REMEDY = "`fab deploy` mounts it; why it is not: `journalctl --unit tpu-stack-share` on that host"


def parse_mounts(text: str) -> dict[str, str]:
    """Mount points and their sources of a /proc/mounts, which writes blanks and the like as octal numbers."""

    def plain(word: str) -> str:
        return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found.group(1), 8)), word)

    rows = (line.split(" ") for line in text.splitlines())
    return {plain(row[1]): plain(row[0]) for row in rows if len(row) > 2}


def check_mount(path: str, timeout_s: float = ANSWER_LIMIT_S) -> Json:
    """Whether something is mounted there and answers; a file system whose server is gone does not."""
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as file:
        source = parse_mounts(file.read()).get(os.path.normpath(path))
    if source is None:
        return check("mount", f"{path} is not mounted", REMEDY)
    found = in_time(lambda: answer_of(path), timeout_s)
    if found is None:
        message = f"{path} ({source}) does not answer within {timeout_s:g} s"
        return check("mount", message, f"see that its server is up; {REMEDY}")
    if found["error"] is not None:
        return check("mount", f"{path} ({source}): {found['error']}", REMEDY)
    return check("mount", f"{path} is mounted from {source}")


def answer_of(path: str) -> Json:
    """Asks its server: the names in a directory are not kept here as its own entry is."""
    try:
        os.statvfs(path)
        os.listdir(path)
    except OSError as error:
        return {"error": error.strerror}
    return {"error": None}
