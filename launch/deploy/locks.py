"""The locks that an environment on a host is made from: read here, and put there where they are missing."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contracts.errors import RequestError
from launch.agents import Agent, ask_all
from launch.deploy import python_environment
from launch.deploy.python_environment import INSTALLER_LOCK, LOCK_OF_PLATFORM, Lock
from launch.errors import HostError
from launch.target import Target


class Locks:
    """The files that our environment is made from, with what they are called on a host."""

    def __init__(self, files: dict[str, str], name: str, agent_root: str) -> None:
        self.files = files
        sha256 = hashlib.sha256("\0".join(files[key] for key in sorted(files)).encode()).hexdigest()
        self.lock = Lock(sha256=sha256, folder=f"{agent_root}/locks/{sha256}", name=name)


def needed(target: Target, checkout: Path) -> Locks | None:
    """The locks that the target's interpreter is made from; None where it is not ours to make.

    Raises:
        RequestError: the checkout has no lock for the platform.
    """
    if target.is_local or not python_environment.is_ours(target.python):
        return None
    name = LOCK_OF_PLATFORM[target.platform]
    files = {}
    for each in (name, INSTALLER_LOCK):
        path = checkout / "requirements" / f"{each}.txt"
        try:
            files[f"{each}.txt"] = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise RequestError(
                f"requirements/{each}.txt is not there, and jobs on {target.platform} are installed from it; "
                "`make lock` makes it"
            ) from None
    return Locks(files, name, target.agent_root)


def install(
    agents: Sequence[Agent], locks: Locks | None, errors: Sequence[HostError | None]
) -> list[HostError | None]:
    """Put on each host that has no error what is not there yet: the agent, which any question brings along, and the
    locks. The errors after that.
    """
    found = list(errors)

    def ask(indexes: Sequence[int], verb: str, request: dict[str, str]) -> dict[int, dict[str, Any]]:
        answers = ask_all([agents[index] for index in indexes], verb, [request] * len(indexes))
        told = dict(zip(indexes, answers, strict=True))
        for index, answer in told.items():
            found[index] = answer if isinstance(answer, HostError) else None
        return {index: answer for index, answer in told.items() if not isinstance(answer, HostError)}

    folder = locks.lock.folder if locks else "~"
    there = ask([index for index, error in enumerate(errors) if error is None], "list", {"path": folder})
    for name, text in (locks.files if locks else {}).items():
        lacking = [
            index for index, answer in there.items() if name not in answer["names"] and found[index] is None
        ]
        ask(lacking, "write", {"path": f"{folder}/{name}", "text": text})
    return found
