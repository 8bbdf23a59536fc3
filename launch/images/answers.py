"""What Docker says while it builds, read line by line: the step it is at, what it made, why it failed. Pure."""

from __future__ import annotations

import collections
import re
from collections.abc import Mapping
from typing import Any

LINES_OF_ERROR = 20
STEP = re.compile(r"Step (\d+)/(\d+) : (.*)")
MADE = re.compile(r" ---> ([0-9a-f]{12,64})")
RUNNING = re.compile(r" ---> Running in ([0-9a-f]{12,64})")
# Colours and whatever else would move a terminal's cursor.
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
NO_SPACE = "no space left on device"


class Answers:
    """step, steps, doing: where the build is. image: what was built, None before. error: why it was not.

    last_image, container: of the latest step, for who cleans up.
    """

    def __init__(self) -> None:
        self.step, self.steps, self.doing = 0, 0, "begins"
        self.image: str | None = None
        self.error: str | None = None
        self.last_image: str | None = None
        self.container: str | None = None
        self.lines: collections.deque[str] = collections.deque(maxlen=LINES_OF_ERROR)

    def take(self, answer: Mapping[str, Any]) -> bool:
        """Read one; whether a step has begun that is worth a word: setting a label is not."""
        if "error" in answer:
            self.error = clean(str(answer["error"])).strip()
        if isinstance(answer.get("aux"), Mapping) and "ID" in answer["aux"]:
            self.image = str(answer["aux"]["ID"])
        began = False
        if (
            "status" in answer and "id" not in answer
        ):  # of the base, which is pulled; with an id: of each layer
            self.doing, began = f"pulls the base: {answer['status']}", True
        for line in str(answer.get("stream") or "").splitlines():
            began |= self._line(clean(line).rstrip())
        return began

    def _line(self, line: str) -> bool:
        if not line:
            return False
        self.lines.append(line)
        if match := STEP.fullmatch(line):
            self.step, self.steps, self.doing = int(match[1]), int(match[2]), " ".join(match[3].split())
            self.container = None
            return not self.doing.startswith("LABEL ")
        if match := RUNNING.fullmatch(line):
            self.container = match[1]
        elif match := MADE.fullmatch(line):
            self.last_image = match[1]
        return False


def clean(text: str) -> str:
    """Without what would move a terminal's cursor; of a progress bar that rewrites its line, the last state."""
    return CONTROL.sub("", text.rstrip("\r").rpartition("\r")[2] if "\n" not in text else text)


def failure(tag: str, answers: Answers, docker_root: str) -> str:
    """Why `tag` was not built, with the build's last lines and what to do."""
    said = "\n".join(f"  {line}" for line in answers.lines)
    error = answers.error or "Docker ended the build without an image"
    if NO_SPACE in f"{error}\n{said}".lower():
        return (
            f"{tag} was not built: the disk that Docker keeps images on ({docker_root}) is full; `fab images --prune` "
            f"removes old images of ours, `docker system df` shows what else there is\n{said}"
        )
    where = f" at step {answers.step}/{answers.steps}, {answers.doing[:120]}" if answers.step else ""
    return f"{tag} was not built{where}: {error}\n{said}\n{_remedy(error, said)}"


def _remedy(error: str, said: str) -> str:
    words = f"{error}\n{said}".lower()
    if "manifest unknown" in words or "pull access denied" in words or "registry" in words:
        return (
            "The base image comes from a registry; where that cannot be reached, name another base with Python 3.12 in"
            " TPU_STACK_BASE_IMAGE (`python -m tools.stand_in_base` makes one for tests)"
        )
    if "hash" in words and "mismatch" in words:
        return (
            "What the index holds is not what was locked: `make lock` renews the locks; look at what it shows"
        )
    if "no solution found" in words or "not found in the package registry" in words:
        return "A pin of the lock cannot be had: `make lock` renews the locks"
    return (
        "The build fetches Debian packages and Python wheels; behind a proxy or with a mirror set HTTPS_PROXY,"
        " PIP_INDEX_URL and UV_DEFAULT_INDEX"
    )
