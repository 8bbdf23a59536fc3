"""The code of this checkout: the jobs under jobs/ with their options, and all of it as one archive for the hosts."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from types import ModuleType
from typing import Any

from contracts.errors import RequestError
from contracts.run_directory import OWN_COMMAND
from contracts.suggestions import copied_character, did_you_mean
from jobs.runtime import option_rules
from jobs.runtime.monitoring.metric_definitions import UNDECLARED, Metrics
from launch.code.bundles import SECRET, Bundle, git, listing

CHECKOUT = Path(__file__).resolve().parent.parent
IMAGES = CHECKOUT / "images"
SERVER = "serve"
"""The package under jobs/ that `fab serve` starts; nobody trains it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One job: its name, its docstring's first line, the framework (image) that it runs on here, all that it can run
    on, and what it says of its metrics.

    predicts_from: the files and folders of an export that its predict.py reads; none are named: all. hub: the library
    that loads its export and the task that it is for, as the Hugging Face Hub calls them.
    """

    name: str
    summary: str
    framework: str
    frameworks: tuple[str, ...]
    metrics: Metrics = UNDECLARED
    predicts_from: tuple[str, ...] = ()
    hub: tuple[str, str] | None = None

    @property
    def can_predict(self) -> bool:
        return (CHECKOUT / "jobs" / self.name / "predict.py").exists()

    def config_module(self) -> ModuleType:
        """Return jobs/NAME/config.py. Raises RequestError where an option of its Config has no default."""
        module = importlib.import_module(f"jobs.{self.name}.config")
        for field in dataclasses.fields(module.Config):
            if field.default is field.default_factory is dataclasses.MISSING:
                raise RequestError(
                    f"jobs/{self.name}/config.py: the option {field.name} has no default; every option has one, and "
                    "`problems` asks for one that must be given"
                )
        return module

    def parse(self, arguments: Sequence[str], *, base: Any = None) -> Any:
        """Return the job's Config for command-line words; other options are as in `base`, else the default.

        Raises:
            RequestError: with every option that does not exist, and every value that is of another type or out of its
                range.
        """
        module = self.config_module()
        values, problems = option_rules.parse(module.Config, arguments)
        config = dataclasses.replace(base or module.Config(), **values)
        if problems:
            problems += option_rules.outside(config, getattr(module, "RANGES", {}))
            raise RequestError("\n".join([*problems, f"all options: fab jobs --job {self.name}"]))
        return config

    def stored_config(self, run_id: str, stored: Mapping[str, Any]) -> Any:
        """Return the Config that run.json holds. An option that was added since has its default.

        Raises:
            RequestError: the run has options that this code no longer knows.
        """
        kind = self.config_module().Config
        unknown = sorted(stored.keys() - {field.name for field in dataclasses.fields(kind)})
        if unknown:
            raise RequestError(
                f"--resume {run_id}: the run has options that {self.name} no longer knows: {', '.join(unknown)}; "
                "resume it with the code that started it (run.json has the commit)"
            )
        return kind(**stored)

    def arguments(self, config: Any) -> list[str]:
        """Return command-line words that make this Config."""
        defaults = self.config_module().Config()
        return [
            word
            for field in dataclasses.fields(config)
            if (value := getattr(config, field.name)) != getattr(defaults, field.name)
            for word in _option_arguments(field.name.replace("_", "-"), value)
        ]

    def options(self) -> list[str]:
        """Return the options as they are typed, a switch both ways."""
        fields = dataclasses.fields(self.config_module().Config)
        names = [field.name.replace("_", "-") for field in fields]
        switches = [
            name for name, field in zip(names, fields, strict=True) if isinstance(field.default, bool)
        ]
        return [*(f"--{name}" for name in names), *(f"--no-{name}" for name in switches)]

    def help(self) -> str:
        """Return all options with their defaults, as the job's --help prints them, under the headings of its GROUPS."""
        import tyro

        output = io.StringIO()
        typed = "fab serve RUN --" if self.name == SERVER else f"fab train --job {self.name} --"
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(output):
            tyro.cli(self.config_module().Config, args=["--help"], prog=typed)
        text = output.getvalue()
        for field, heading in getattr(self.config_module(), "GROUPS", {}).items():
            option = f"\n  --{field.replace('_', '-')} "
            text = text.replace(option, f"\n\n {heading}{option}", 1)
        return text

    def problems(self, config: Any, *, devices: int) -> list[str]:
        """Return what is wrong with the options on so many devices in all."""
        return list(self.config_module().problems(config, devices=devices))

    def data_problems(self, config: Any, cache_dir: Path) -> list[str]:
        """Return what is wrong with the data, where this machine sees what the hosts will see.

        A job that makes its data itself has nothing to look for.

        Raises:
            Unreachable: a place does not answer now.
        """
        find = getattr(importlib.import_module(f"jobs.{self.name}.data"), "problems", None)
        return [] if find is None else list(find(config, cache_dir))

    def changes_on_resume(self, before: Mapping[str, Any], config: Any) -> list[str]:
        """Return the options that differ from the run's own and that a resumed run must not change."""
        free: Set[str] = getattr(self.config_module(), "FREE_ON_RESUME", frozenset())
        now = dataclasses.asdict(config)
        return [
            f"--{name.replace('_', '-')}: the run has {before[name]!r}, asked for is {value!r}"
            for name, value in now.items()
            if name not in free and name in before and before[name] != value
        ]


def _option_arguments(option: str, value: Any) -> tuple[str, ...]:
    """Return an option as words; a switch has a word for each of its two ways."""
    if isinstance(value, bool):
        return (f"--{option}" if value else f"--no-{option}",)
    if isinstance(value, str) and (value.startswith("-") or copied_character(value)):
        return (f"--{option}={value}",)  # by itself it would be taken for an option
    return f"--{option}", str(value)


def image_frameworks(folder: Path = IMAGES) -> tuple[str, ...]:
    """Return the frameworks that have an image: the folders with a Dockerfile, by name."""
    return tuple(sorted(path.parent.name for path in folder.glob("*/Dockerfile")))


def names() -> list[str]:
    """Return the jobs of this checkout: packages under jobs/ that have a __main__, but the server."""
    return sorted({path.parent.name for path in (CHECKOUT / "jobs").glob("*/__main__.py")} - {SERVER})


def find(name: str, framework: str | None = None) -> Job:
    """Return the job called `name`, on that framework; None: on the first of its own.

    Raises:
        RequestError: there is none, or it does not run on the framework; the message lists those there are.
    """
    known_names = names()
    if name not in (*known_names, SERVER):
        raise RequestError(
            f'--job: "{name}" is not a job; choose one of {", ".join(known_names)}{did_you_mean(name, known_names)}'
        )
    package = importlib.import_module(f"jobs.{name}")
    first = getattr(package, "FRAMEWORK", None) or package.STACK  # what it was called in older jobs
    frameworks: tuple[str, ...] = getattr(package, "FRAMEWORKS", (first,))
    if framework not in (None, *frameworks):
        raise RequestError(
            f"--framework {framework}: the job {name} does not run on it; choose one of {', '.join(frameworks)}"
        )
    return Job(
        name=name,
        summary=(package.__doc__ or "").strip().splitlines()[0],
        framework=framework or first,
        frameworks=frameworks,
        metrics=getattr(package, "METRICS", UNDECLARED),
        predicts_from=getattr(package, "PREDICTS_FROM", ()),
        hub=getattr(package, "HUB", None),
    )


FOLDERS = ("contracts", "host", "jobs")
"""Of the checkout, in the code bundle: what a job imports, and for a pod its agent."""
POLICY = tuple(
    f"launch/{name}.py"
    for name in ("__init__", "attempts", "control/__init__", "control/control_documents", "policy")
)
"""Besides these: what the first pod of a run decides by."""
LARGEST_BYTES = 16 * 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Commit:
    """The git commit of a checkout, for the record; `is_dirty`: files differ from it."""

    hash: str
    is_dirty: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Submitted:
    """What a run is as it was submitted, in the place of a `Job`: this checkout may hold other code by now.

    name: the job's, or OWN_COMMAND. options: those of its Config or of an own command, which `arguments` make. code:
    git's part of run.json. bundles: our code, then the folder of an own command.
    """

    name: str
    framework: str
    options: Mapping[str, Any]
    arguments: tuple[str, ...]
    metric_definitions: Any
    code: Mapping[str, Any]
    cwd: str
    bundles: tuple[Bundle, ...]

    @property
    def is_own_command(self) -> bool:
        return self.name == OWN_COMMAND

    @property
    def config(self) -> Any:
        """The options as they were parsed: a dataclass with the fields that the job's Config had."""
        return dataclasses.make_dataclass("Config", list(self.options), frozen=True)(**self.options)


def bundle(checkout: Path, folders: Sequence[str] = FOLDERS) -> Bundle:
    """Bundle these folders of `checkout`, and the policy.

    Raises:
        RequestError: they hold more than LARGEST_BYTES, so most likely something that is not code.
    """
    files = listing(checkout, inside=[f"{folder}/" for folder in folders if (checkout / folder).is_dir()])
    files = files.with_files(
        {name: (checkout / name).stat() for name in POLICY if (checkout / name).is_file()}
    )
    if files.size_bytes > LARGEST_BYTES:
        raise RequestError(
            f"{checkout}: {', '.join(folders)} hold {files.size_bytes / 2**20:,.0f} MiB, more than the "
            f"{LARGEST_BYTES / 2**20:.0f} MiB that are sent to hosts as code; the largest file is "
            f"{files.largest(1)[0]}: keep data elsewhere"
        )
    return files.bundle(SECRET)


def git_commit(checkout: Path) -> Commit | None:
    """Return the checkout's commit; None if it is no git checkout, has no commit yet, or git is not installed."""
    commit, changes = git(checkout, "rev-parse", "HEAD"), git(checkout, "status", "--porcelain")
    if commit is None or changes is None or commit.returncode or changes.returncode:
        return None
    return Commit(hash=commit.stdout.strip(), is_dirty=bool(changes.stdout.strip()))
