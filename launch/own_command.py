"""A command of the user's own as a run: its folder, its words, and what can be said of them before anything starts."""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contracts.errors import RequestError
from contracts.run_directory import FOLDER, OWN_COMMAND
from jobs.runtime.metric_definitions import UNDECLARED, Metrics
from launch.jobs import LEFT_OUT, Bundle, archive, git
from launch.plan import OwnCommand
from launch.runs import Run
from launch.targets import Target

LARGEST_BYTES = 64 * 2**20
"""Of a folder: it is sent to every host whenever it has changed."""
LARGEST_FILES = 3
LOG = "log"
GIT_LIMIT_S = 60
PYTHONS = ("python", "python3")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """An own command as run.json keeps it.

    words: the command. workdir: its folder on the launching machine. processes_per_host: a number, or "per-chip".
    progress: LOG, or a file of the folder or elsewhere on the hosts whose growth is progress; None: hangs are not
    looked for. python: the interpreter on the hosts that "python" means; None: the framework's.
    """

    words: tuple[str, ...]
    workdir: str
    framework: str
    processes_per_host: str = "1"
    progress: str | None = None
    python: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """In the place of a `launch.jobs.Job` where a run is an own command."""

    config: Config
    name: str = OWN_COMMAND
    metrics: Metrics = UNDECLARED
    kept: Bundle | None = None
    """Its folder as it was submitted, whatever it holds by now."""

    @property
    def framework(self) -> str:
        return self.config.framework

    def folder(self) -> Bundle:
        """Return the command's folder as it is sent.

        Raises:
            RequestError: there is no such folder, or it is too large.
        """
        return self.kept or bundle_folder(Path(self.config.workdir))

    def folder_again(self, run: Run) -> tuple[Bundle, str | None]:
        """Return the folder that a resumed run is sent, and what to say of it.

        As it is now, so that what failed can be mended. Where this machine does not have it: as it was last sent.

        Raises:
            RequestError: as of `folder`; or the run directory does not have it either.
        """
        if self.kept is not None:
            return self.kept, None
        before, workdir = run.described["code"]["folder"], self.config.workdir
        if Path(workdir).is_dir():
            now = self.folder()
            changed = f"{workdir} has changed: its files replace those of the copies on the hosts"
            return now, None if now.sha256 == before else changed
        kept = Bundle.of_text(run.directory.read_text(FOLDER), before)
        if kept is None:
            raise RequestError(
                f"--resume {run.run_id}: {workdir} is not there, and {run.directory.path(FOLDER)} does not have it; "
                "make the folder again, or start a new run"
            )
        said = f"{workdir} is not there: the command goes on with the folder as it was last sent"
        return kept, said

    def planned(self, target: Target, folder: Bundle, python: str, *, in_container: bool) -> OwnCommand:
        """Return what the plan says of it. python: the framework's interpreter on the hosts.

        Raises:
            RequestError: the folder lacks what the words name.
        """
        if found := problems(self.config, folder, target, in_container=in_container):
            raise RequestError("\n".join(found))
        return OwnCommand(
            folder_sha256=folder.sha256,
            python=python,
            progress=self.config.progress,
        )

    def config_of(self, _run_id: str, _stored: Mapping[str, Any]) -> Config:
        """Return what run.json holds, which this was read from."""
        return self.config

    def parse(self, words: Sequence[str], *, base: Config | None) -> Config:
        """Return the command; a resumed one goes on with the words that it began with.

        Raises:
            RequestError: a resumed run is given other words.
        """
        if base is not None and words and tuple(words) != base.words:
            raise RequestError(
                f"-- {shlex.join(words)}: the run goes on as it began, with {shlex.join(base.words)}; leave the words "
                "out, or start a new run"
            )
        return self.config

    def words(self, config: Config) -> tuple[str, ...]:
        return config.words

    def problems(self, _config: Config, *, devices: int) -> list[str]:  # noqa: ARG002 - a job's has them
        """Nothing that its options alone could say."""
        return []

    def changes_on_resume(self, _before: Mapping[str, Any], _config: Config) -> list[str]:
        """None: `parse` has refused them."""
        return []


def of_run(config: Mapping[str, Any], kept: Bundle | None = None) -> Command:
    """Return the command of a run whose run.json has this `config`."""
    return Command(config=Config(**{**config, "words": tuple(config["words"])}), kept=kept)


def asked_for(
    words: Sequence[str], *, workdir: str, framework: str, processes_per_host: str, progress: str, python: str
) -> Command:
    """Return the command that the options of `fab train` mean; an empty option was not given.

    Raises:
        RequestError: a word or a folder is missing, or there is no such framework.
    """
    from launch.images.recipe import frameworks  # few launches need it

    known = frameworks()
    if framework and framework not in known:
        raise RequestError(f'--framework: "{framework}" is not a framework; choose one of {", ".join(known)}')
    if not words:
        raise RequestError(
            f"--workdir {workdir}: say what to run there, as in: fab train --workdir {workdir} -- python …"
        )
    if not workdir:
        raise RequestError(
            f"-- {shlex.join(words)}: say in which folder it runs with --workdir, or name a --job"
        )
    folder = Path(workdir).expanduser().absolute()
    if not folder.is_dir():
        raise RequestError(f"--workdir {workdir}: there is no such folder")
    return Command(
        config=Config(
            words=tuple(words),
            workdir=str(folder),
            framework=framework or "jax",
            processes_per_host=processes_per_host or "1",
            progress=progress or None,
            python=python or None,
        )
    )


def bundle_folder(folder: Path) -> Bundle:
    """Bundle a user's folder: all its files but those that git ignores there.

    Raises:
        RequestError: it cannot be read, it holds more than LARGEST_BYTES, or its .gitignore cannot be honoured.
    """
    if not folder.is_dir():
        raise RequestError(f"{folder}: the command's folder is no longer there")
    files = sorted(path for path in _listed(folder) if path.is_file())
    try:
        found = {path: path.stat() for path in files}
        sizes = {path: stat.st_size for path, stat in found.items()}
        if sum(sizes.values()) <= LARGEST_BYTES:
            return archive(folder, files, {path for path, stat in found.items() if stat.st_mode & 0o100})
    except OSError as error:
        raise RequestError(
            f"--workdir {folder}: {error.filename} cannot be read ({error.strerror}); name it in .gitignore, or mend it"
        ) from None
    largest = sorted(files, key=lambda path: -sizes[path])[:LARGEST_FILES]
    named = ", ".join(f"{path.relative_to(folder)} ({sizes[path] / 2**20:,.0f} MiB)" for path in largest)
    raise RequestError(
        f"--workdir {folder}: holds {sum(sizes.values()) / 2**20:,.0f} MiB, more than the "
        f"{LARGEST_BYTES / 2**20:.0f} MiB that are sent to hosts; the largest files are {named}. Name them in "
        ".gitignore, and read data from a bucket or the share"
    )


def _listed(folder: Path) -> list[Path]:
    """The files of a folder that git does not ignore; in a folder that is no git checkout too."""
    inside = git(folder, "rev-parse", "--is-inside-work-tree")
    if inside is None:
        if next(folder.rglob(".gitignore"), None) is not None:
            raise RequestError(
                f"--workdir {folder}: has a .gitignore, and there is no git to read it; install git"
            )
        return _walked(folder)
    if inside.stdout.strip() != "true":
        if next(folder.rglob(".gitignore"), None) is None:
            return _walked(folder)
        import tempfile

        with tempfile.TemporaryDirectory() as empty:
            git(Path(empty), "init", "--quiet", ".")
            own = (f"--git-dir={empty}/.git", f"--work-tree={folder}")
            found = git(folder, *own, *_ALL, "--others", limit_s=GIT_LIMIT_S)
    else:
        found = git(folder, *_ALL, "--cached", "--others", limit_s=GIT_LIMIT_S)
    if found is None or found.returncode:
        raise RequestError(
            f"--workdir {folder}: git cannot list its files; `git -C {folder} ls-files` says why"
        )
    names = {name for name in found.stdout.split("\0") if name}
    return [folder / name for name in names if not LEFT_OUT.intersection(Path(name).parts)]


_ALL = ("ls-files", "-z", "--exclude-standard")


def _walked(folder: Path) -> list[Path]:
    return [
        path
        for path in folder.rglob("*")
        if not {*LEFT_OUT, ".git", ".venv"}.intersection(path.relative_to(folder).parts)
    ]


def problems(config: Config, folder: Bundle, target: Target, *, in_container: bool) -> list[str]:
    """Return what is wrong with the command, as far as this machine can know."""
    program = config.words[0]
    found = []
    if program in PYTHONS:
        script = next((word for word in config.words[1:] if not word.startswith("-")), None)
        if script is not None and script.endswith(".py") and not script.startswith("/"):
            found += _missing(script, config, folder)
    elif "/" in program and not program.startswith("/"):
        found += _missing(program, config, folder)
        there = Path(config.workdir) / program
        if not found and there.exists() and not os.access(there, os.X_OK):
            found.append(
                f"-- {program}: may not be executed; `chmod +x` it, or name its interpreter before it"
            )
    elif target.is_local and not in_container:
        path = None if config.python is None else str(Path(config.python).parent)
        if shutil.which(program) is None and (path is None or shutil.which(program, path=path) is None):
            found.append(f"-- {program}: there is no such program on this machine")
    return found


def _missing(name: str, config: Config, folder: Bundle) -> list[str]:
    if str(Path(name)) in folder.names:
        return []
    if (Path(config.workdir) / name).exists():
        return [
            f"-- {name}: is in {config.workdir}, but git ignores it there, so it is not sent; change .gitignore"
        ]
    return [f"-- {name}: there is no such file in {config.workdir}"]
