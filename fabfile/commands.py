"""The commands of `fab`, under the headings of `fab --list`. A command's module is imported when somebody names it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping

from fabfile.command import Command

HEADINGS = (
    ("Begin with these five", "train_tasks", ("jobs", "train", "status", "logs", "stop")),
    ("Go on after a loss", "recovery_tasks", ("recover", "keep", "unkeep", "keeper")),
    ("Look at runs, and tidy up", "run_tasks",
     ("runs", "compare", "costs", "stacks", "profile", "dashboard", "track", "notify", "rm", "prune")),
    ("Use a trained model", "model_tasks", ("predict", "serve", "export")),
    ("Queue and sweeps", "queue_tasks", ("submit", "sweep", "queue")),
    ("Hosts", "host_tasks",
     ("deploy", "verify", "doctor", "trust", "run", "put", "get", "ssh", "ssh-config", "jupyter")),
    ("Images", "image_tasks", ("build", "push", "images")),
    ("TPUs: types, prices, what the project holds", "slice_tasks", ("accelerators", "fit", "capacity", "zombies")),
    ("Without a cloud", "rehearsal_tasks", ("rehearsal",)),
)  # fmt: skip
"""A heading, the module of its commands, and their names."""


class Commands(Mapping[str, Command]):
    """Every command by its name, in the order of `fab --list`."""

    def __init__(self) -> None:
        self._modules = {name: module for _, module, names in HEADINGS for name in names}

    def __getitem__(self, name: str) -> Command:
        module = importlib.import_module(f"fabfile.{self._modules[name]}")
        return getattr(module, name.replace("-", "_"))  # type: ignore[no-any-return]

    def __contains__(self, name: object) -> bool:
        return name in self._modules

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


COMMANDS = Commands()
