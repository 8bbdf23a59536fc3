"""Loads of pulumi_gcp what is used, class by class.

`pulumi_gcp.compute` as a whole is 280 files, and loading them is nearly half of the processor time of the program,
which each `pulumi up` runs twice, for the preview and for the update. Every resource is in a file of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import types
from typing import Any

SDK = "pulumi_gcp"


def load_by_class() -> None:
    """Let each package of the SDK that is not loaded yet load a class's own file when the class is asked for.

    The packages stand in `sys.modules` from the first `import pulumi_gcp` on, to be loaded when they are first used;
    one that has been used stays as it is, and with an SDK that is not built so nothing is changed."""
    for name, module in list(sys.modules.items()):
        # `type`, since any look into a module that is still to be loaded loads it.
        if name.startswith(f"{SDK}.") and type(module).__name__ == "_LazyModule":
            module.__class__ = _ByClass


class _ByClass(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        for file in (name, _file_of(name), "_inputs"):
            full_name = f"{self.__name__}.{file}"
            if full_name in sys.modules or importlib.util.find_spec(full_name) is not None:
                found = importlib.import_module(full_name)
                # A function is called like its file; what there is of the package itself, `outputs`, is a file alone.
                if hasattr(found, name) or file == name:
                    setattr(self, name, getattr(found, name, found))
                    return getattr(self, name)
        return self._load_whole(name)

    def _load_whole(self, name: str) -> Any:
        """For whatever stands in a file that is called otherwise."""
        self.__class__ = types.ModuleType  # type: ignore[assignment]
        assert self.__spec__ is not None
        # The loader that puts the loading off has the one that does it.
        loader: Any = getattr(self.__spec__.loader, "loader", self.__spec__.loader)
        loader.exec_module(self)
        return getattr(self, name)


def _file_of(class_name: str) -> str:
    """router_nat of RouterNat, bucket_iam_member of BucketIAMMember."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", class_name).lower()
