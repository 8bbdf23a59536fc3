"""A command of the user's own as a run: its folder, its words, and what can be said of them before anything starts."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from contracts.errors import RequestError
from contracts.run_directory import FOLDER, OWN_COMMAND
from jobs.runtime.metric_definitions import UNDECLARED, Metrics
from launch.bundles import Bundle, Listing, listing
from launch.jobs import SECRET as CODE_SECRET
from launch.jobs import git, image_frameworks
from launch.plan import OwnCommand
from launch.runs import Run
from launch.targets import Target

LARGEST_BYTES = 64 * 2**20
"""Of a folder: it is sent to every host whenever it has changed."""
LARGEST_FILES = 3
LOG = "log"
GIT_LIMIT_S = 60
PYTHONS = ("python", "python3")
PIPS = ("pip", "pip3")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """An own command as run.json keeps it.

    words: the command. workdir: its folder on the launching machine. processes_per_host: a number, or "per-chip".
    progress: LOG, or a file of the folder or elsewhere on the hosts whose growth is progress; None: hangs are not
    looked for. python: the interpreter on the hosts that "python" means; None: the framework's. send: files of the
    folder that are sent although they may hold secrets, or git ignores them.
    """

    words: tuple[str, ...]
    workdir: str
    framework: str
    processes_per_host: str = "1"
    progress: str | None = None
    python: str | None = None
    send: tuple[str, ...] = ()


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
        return self.kept or bundle_folder(Path(self.config.workdir), self.config.send)

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
        if found := problems(self.config, folder, target, python, in_container=in_container):
            raise RequestError("\n".join(found))
        return OwnCommand(
            folder_sha256=folder.sha256,
            python=python,
            progress=self.config.progress,
            has_layer=self.config.python is None,
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
    lists = {name: tuple(config.get(name, ())) for name in ("words", "send")}
    return Command(config=Config(**{**config, **lists}), kept=kept)


def asked_for(
    words: Sequence[str],
    *,
    workdir: str,
    framework: str,
    processes_per_host: str,
    progress: str,
    python: str,
    send: Sequence[str] = (),
) -> Command:
    """Return the command that the options of `fab train` mean; an empty option was not given.

    Raises:
        RequestError: a word or a folder is missing, or there is no such framework.
    """
    known = image_frameworks()
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
        raise RequestError(
            f"--workdir {workdir}: is a file; name its folder, and the file after --"
            if folder.is_file()
            else f"--workdir {workdir}: there is no such folder"
        )
    return Command(
        config=Config(
            words=tuple(words),
            workdir=str(folder),
            framework=framework or "jax",
            processes_per_host=processes_per_host or "1",
            progress=progress or None,
            python=python or None,
            send=named_in(folder, send),
        )
    )


def bundle_folder(folder: Path, send: Sequence[str] = ()) -> Bundle:
    """Bundle a user's folder: all its files but those that git ignores there, and those that may hold secrets.

    send: the names of files in it that are sent all the same.

    Raises:
        RequestError: it cannot be read, it holds more than LARGEST_BYTES, or its .gitignore cannot be honoured; or a
            file of `send` is not there.
    """
    if not folder.is_dir():
        raise RequestError(f"{folder}: the command's folder is no longer there")
    git_there = _Git(folder)
    try:
        found = listing(folder, ignored=git_there.ignored)
    except OSError as error:
        raise RequestError(f"--workdir {folder}: cannot be read ({error.strerror})") from None
    found = found.with_files({name: _status(folder, name) for name in send})
    found = found.without(git_there.submodules_missing(found))
    if found.size_bytes > LARGEST_BYTES:
        largest = ", ".join(
            f"{name} ({found.files[name].st_size / 2**20:,.0f} MiB)" for name in found.largest(LARGEST_FILES)
        )
        raise RequestError(
            f"--workdir {folder}: holds {found.size_bytes / 2**20:,.0f} MiB, more than the "
            f"{LARGEST_BYTES / 2**20:.0f} MiB that are sent to hosts; the largest files are {largest}. Name them in "
            ".gitignore, and read data from a bucket or the share"
        )
    return found.bundle(SECRET, allowed=send, programs=found.programs)


SECRET = f"{CODE_SECRET}; `--send FILE` sends one"


def named_in(folder: Path, wanted: Sequence[str]) -> tuple[str, ...]:
    """Return the files that `--send` names, each once or several with a comma between, by their names in the folder.

    Raises:
        RequestError: one is not a file of the folder.
    """
    texts = [text for each in wanted for text in ([each] if (folder / each).is_file() else each.split(","))]
    names = []
    for text in filter(None, texts):
        places = (folder / text, Path(text).expanduser().absolute())
        name = os.path.relpath(next(filter(os.path.lexists, places), places[0]), folder)
        if name.startswith("../"):
            raise RequestError(f"--send {text}: is not in {folder}; name a file of that folder")
        _status(folder, name)
        names.append(name)
    return tuple(sorted({*names}))


def _status(folder: Path, name: str) -> os.stat_result:
    place = folder / name
    if place.is_dir():
        raise RequestError(f"--send {name}: is a folder; name the files that are in it")
    if not place.is_file():
        raise RequestError(f"--send {name}: there is no such file in {folder}")
    return place.stat()


class _Git:
    """What git knows of a user's folder, which need not be a git checkout, and of the checkouts in it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._submodules: list[str] = []

    def ignored(self, folder: Path, names: Set[str]) -> Set[str]:
        """Return what git ignores in a folder, as `launch.bundles.listing` takes it.

        A folder that the checkout around it ignores is looked at by itself.
        """
        inside = git(folder, "rev-parse", "--is-inside-work-tree")
        if inside is None:
            if ".gitignore" not in names:
                return frozenset()
            raise RequestError(
                f"--workdir {self._folder}: has a .gitignore, and there is no git to read it; install git"
            )
        is_checkout = inside.stdout.strip() == "true"
        around = git(folder, "check-ignore", "--quiet", "--no-index", ".") if is_checkout else None
        if around is not None and around.returncode != 0:
            self._submodules += [
                os.path.relpath(folder / line.partition("\t")[2], self._folder)
                for line in self._names(folder, "ls-files", "-z", "--stage")
                if line.startswith(OF_SUBMODULES)
            ]
            return self._ignored(folder)
        with tempfile.TemporaryDirectory() as empty:
            git(Path(empty), "init", "--quiet", ".")
            return self._ignored(folder, f"--git-dir={empty}/.git", f"--work-tree={folder}")

    def _ignored(self, folder: Path, *place: str) -> Set[str]:
        names = self._names(
            folder,
            *place,
            *("ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory"),
        )
        # A folder that is not ignored itself, but all that git sees in it, is listed with what is in it.
        pairs = itertools.pairwise([*sorted(names), ""])
        return {name for name, next_one in pairs if not (name[-1] == "/" and next_one.startswith(name))}

    def _names(self, folder: Path, *arguments: str) -> list[str]:
        done = git(folder, *arguments, limit_s=GIT_LIMIT_S)
        if done is None or done.returncode:
            raise RequestError(
                f"--workdir {self._folder}: git cannot list its files; `git -C {folder} ls-files` says why"
            )
        return [name for name in done.stdout.split("\0") if name]

    def submodules_missing(self, found: Listing) -> dict[str, str]:
        """Return the submodules of which no file is there, with the reason."""
        folders = {name[:end] for name in found.files for end, letter in enumerate(name) if letter == "/"}
        reason = "a submodule that is not checked out; `git submodule update --init` does that"
        return {name: reason for name in self._submodules if name not in folders}


OF_SUBMODULES = "160000 "
"""How git begins what it says of one."""


def problems(config: Config, folder: Bundle, target: Target, python: str, *, in_container: bool) -> list[str]:
    """Return what is wrong with the command, as far as this machine can know. python: the interpreter on the hosts."""
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
    elif target.capabilities.shares_files and not in_container:
        path = os.pathsep.join([os.path.dirname(python), os.environ.get("PATH", os.defpath)])
        is_made = os.path.exists(python)  # a framework's environment is made later
        if is_made and program not in PIPS and shutil.which(program, path=path) is None:
            found.append(_no_program(config))
    return found


OF_A_SHELL = ("cd", "export", "source", "set", "ulimit")


def _no_program(config: Config) -> str:
    """Return why the first word starts nothing: a script without its interpreter, or a whole line in quotes."""
    program, *words = config.words
    if program.startswith("-"):
        example = f"python train.py {program}"
        return f"-- {program}: is an option, and no program; write the program before it, as in: -- {example}"
    if (Path(config.workdir) / program).is_file():
        interpreter = "python " if program.endswith(".py") else "./"
        return f"-- {program}: is a file of the folder, and no program; write {interpreter}{shlex.join(config.words)}"
    if "=" in program or program in OF_A_SHELL:
        return f"-- {program}: is for a shell; write -- sh -c {shlex.quote(shlex.join(config.words))}"
    if not words and " " in program.strip():
        return f"-- {program}: is one word; write it without the quotes: -- {program.strip()}"
    return f"-- {program}: there is no such program on this machine"


def _missing(name: str, config: Config, folder: Bundle) -> list[str]:
    if str(Path(name)) in folder.names:
        return []
    place = Path(name)
    for each in (place, *place.parents):
        if reason := folder.left_out.get(str(each)):
            return [f"-- {name}: {each} is not sent ({reason})"]
    if (Path(config.workdir) / name).exists():
        return [
            f"-- {name}: is in {config.workdir}, but git ignores it there, so it is not sent; change .gitignore"
        ]
    return [f"-- {name}: there is no such file in {config.workdir}"]
