"""The program: read the configuration, say what it costs and what is wrong with it, declare everything, export.

`infra/__main__.py` calls `declare` under Pulumi's language host; tests and the offline preview hand the same function
to the engine themselves.
"""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import re
import sys
import types
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import pulumi
import pulumi.runtime

from contracts import inventory
from infra import policy
from infra.config import Config, ConfigError, reader, settings_file
from infra.gke import node_pools
from infra.policy import offered
from infra.stack import declare_stack

LOGS = {"warning": pulumi.log.warn, "note": pulumi.log.info}
SDK = "pulumi_gcp"
OUR_KEYS = f"{reader.NAMESPACE}:"
ENGINES_OWN = "pulumi:"


def declare() -> None:
    """Declare the stack of the current configuration.

    Raises:
        Refused: the configuration is wrong or a policy refuses it; nothing was declared.
    """
    try:
        config = configuration()
    except ConfigError as error:
        count = len(error.problems)
        many = "a mistake" if count == 1 else f"{count} mistakes"
        raise _refused(f"the configuration has {many}", error.problems) from None
    observed = node_pools.observe(config, _setting)
    reviewed = review(config, observed)
    load_by_class()
    stack = declare_stack(
        config,
        reviewed.covered_chips,
        observed=observed,
        hooks=node_pools.hooks(config, _setting),
    )
    pulumi.export("inventory", stack.inventory.apply(inventory.to_json))
    pulumi.export("image_repository", stack.image_repository)


def configuration() -> Config:
    """The configuration of the stack that runs: the one place that takes something of Pulumi's configuration.

    Raises:
        ConfigError: with every mistake in it.
    """
    # pulumi.Config answers for a key that one names; only the map below it knows which keys there are.
    everything = {**pulumi.runtime.get_config_env(), **pulumi.runtime.config.CONFIG.get()}
    secrets = [key for key in everything if pulumi.runtime.is_config_secret(key)]
    unread = _unread_of_the_file()
    try:
        config = read_configuration(
            everything, secrets, project=pulumi.Config("gcp").get("project"), stack=pulumi.get_stack()
        )
    except ConfigError as error:
        raise ConfigError((*unread, *error.problems)) from None
    if unread:
        raise ConfigError(unread)
    for key in _other_keys(everything):
        pulumi.log.warn(f"{key}: nothing reads it here; the keys are {OUR_KEYS}… and {reader.PROVIDER}…")
    return config


def read_configuration(
    everything: Mapping[str, Any], secrets: Collection[str], *, project: str | None, stack: str
) -> Config:
    """Read all keys of a stack, with their namespaces; of secrets only that they are. Raises ConfigError. Pure."""
    ours = {
        key.removeprefix(OUR_KEYS): value for key, value in everything.items() if key.startswith(OUR_KEYS)
    }
    return reader.read(
        ours,
        project=project,
        stack=stack,
        secrets=[key.removeprefix(OUR_KEYS) for key in secrets if key.startswith(OUR_KEYS)],
        provider={
            key: None if key in secrets else value
            for key, value in everything.items()
            if key.startswith(reader.PROVIDER)
        },
        other_keys=_other_keys(everything),
    )


def _other_keys(everything: Iterable[str]) -> list[str]:
    return [key for key in everything if not key.startswith((OUR_KEYS, reader.PROVIDER, ENGINES_OWN))]


def _unread_of_the_file() -> tuple[str, ...]:
    """Return what the engine has not read of the stack's settings file, where it has one."""
    root = pulumi.runtime.settings.SETTINGS.root_directory
    path = Path(root or "", f"Pulumi.{pulumi.get_stack()}.yaml")
    if not root or not path.is_file():
        return ()  # an inline program, or a stack whose file is elsewhere
    text = path.read_text(encoding="utf-8", errors="replace")
    return tuple(f"{path.name}: {problem}" for problem in settings_file.unread(text))


def review(config: Config, observed: node_pools.Observed) -> policy.Review:
    """Log what the policies find, what the zones do not offer (only a preview asks), what is wrong with node pools, and
    what the stack costs.

    Raises:
        Refused: a finding is an error.
    """
    reviewed = policy.review(config, today=datetime.datetime.now(datetime.UTC).date())
    google_offer = offered.ask(config, _setting) if pulumi.runtime.is_dry_run() else offered.Offered()
    more = (*offered.findings(config, google_offer), *node_pools.findings(observed))
    for finding in (*reviewed.findings, *more):
        if finding not in reviewed.errors:
            LOGS[finding.severity](str(finding))
    pulumi.log.info(reviewed.table)
    if reviewed.errors:
        raise _refused("the configuration is refused", map(str, reviewed.errors))
    return reviewed


class ConfigurationRefused(pulumi.RunError):
    """The configuration is refused: nothing is made, and the reasons have been logged."""


def _refused(title: str, reasons: Iterable[str]) -> ConfigurationRefused:
    """Log the reasons as one message, and return what to raise.

    The engine prints the first line of a message when it comes, and all of it below "Diagnostics": a reason with a
    message of its own would be shown twice. What is raised an inline program shows twice too, so it is short.
    """
    pulumi.log.error("\n".join([f"{title}:", *reasons]))
    return ConfigurationRefused("nothing was made")


def _setting(key: str) -> str | None:
    """A key of the provider, in the clear where it is a secret."""
    return pulumi.Config("gcp").get(key.removeprefix("gcp:"))


def load_by_class() -> None:
    """Load of pulumi_gcp only the classes that are used.

    `pulumi_gcp.compute` as a whole is 280 files, and loading them is nearly half of the processor time of the program,
    which each `pulumi up` runs twice, for the preview and for the update. Every resource is in a file of its own, so
    each package of the SDK that is not loaded yet is made to load a class's own file when the class is asked for.

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
        for file in (name, _module_name(name), "_inputs"):
            full_name = f"{self.__name__}.{file}"
            if full_name in sys.modules or importlib.util.find_spec(full_name) is not None:
                module = importlib.import_module(full_name)
                # A function is called like its file; what there is of the package itself, `outputs`, is only a file.
                if hasattr(module, name) or file == name:
                    setattr(self, name, getattr(module, name, module))
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


def _module_name(class_name: str) -> str:
    """router_nat of RouterNat, bucket_iam_member of BucketIAMMember."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", class_name).lower()
