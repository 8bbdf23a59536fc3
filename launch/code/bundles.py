"""What is sent of a folder: its files as one archive, which of them may hold secrets, and why others are left out."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import glob
import gzip
import hashlib
import io
import itertools
import os
import re
import shlex
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from contracts.errors import RequestError
from contracts.files import Files

LEFT_OUT = frozenset({"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".git", ".venv"})
"""Files and folders that are never sent, without a word: they are made anew where they are needed."""
TITLES = ("our code", "your folder")
"""Of a run's bundles, in their order."""
MOST_COUNTED = 10_000
"""Files in a folder that git ignores."""
LARGE_BYTES = 64 * 2**20
UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
MOST_NAMED = 20
"""Names in a line about what is left out."""


type Size = tuple[int, int]
"""Of files: how many they are, and their bytes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bundle:
    """A tar.gz and the SHA-256 of its bytes. The same files give the same bytes, whenever and wherever made.

    names: of its files. left_out: files and folders that are not in it, each with the reason. ignored: what git ignores
    of them, fab_ignored: what .fabignore does, folders with a slash at the end, each with how many files it is and
    their bytes.
    """

    sha256: str
    archive: bytes
    names: frozenset[str] = frozenset()
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)
    ignored: Mapping[str, Size] = dataclasses.field(default_factory=dict, compare=False)
    fab_ignored: Mapping[str, Size] = dataclasses.field(default_factory=dict, compare=False)

    @classmethod
    def from_archive(cls, archive: bytes) -> Bundle:
        """Return the bundle whose archive was kept."""
        with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
            names = frozenset(packed.getnames())
        return cls(sha256=hashlib.sha256(archive).hexdigest(), archive=archive, names=names)

    @classmethod
    def from_text(cls, text: str | None, sha256: str) -> Bundle | None:
        """Return the bundle that `text` keeps; None if it is not the one of that hash."""
        try:
            archive = base64.b64decode(text or "", validate=True)
        except ValueError:
            return None
        return cls.from_archive(archive) if hashlib.sha256(archive).hexdigest() == sha256 else None

    def with_file(self, name: str, content: bytes) -> Bundle:
        """Return the bundle with one more file."""
        with tarfile.open(fileobj=io.BytesIO(self.archive)) as packed:
            members = [member for member in packed.getmembers() if member.isfile()]
            files = {member.name: packed.extractfile(member).read() for member in members}  # type: ignore[union-attr]
        programs = {member.name for member in members if member.mode & 0o100}
        bundle = archive({**files, name: content}, programs)
        return dataclasses.replace(bundle, left_out=self.left_out)

    @property
    def is_large(self) -> bool:
        """Whether it is stored once, by its hash, and not in the directory of every run."""
        return len(self.archive) > LARGE_BYTES

    @property
    def text(self) -> str:
        """Its archive as text keeps it."""
        return base64.b64encode(self.archive).decode()


def keep(bundle: Bundle, path: str, files: Files) -> None:
    """Store a bundle under a name that has its hash, unless it is there."""
    folder, _, name = path.rpartition("/")
    if name not in files.list(folder):
        files.write(path, bundle.text.encode())


def left_out_lines(bundles: Sequence[Bundle]) -> Iterator[str]:
    """Return what is to be said of the files that are not in a run's bundles: a line for each reason."""
    for title, bundle in zip(TITLES, bundles, strict=False):
        groups: dict[str, list[str]] = {}
        for name, reason in sorted(bundle.left_out.items()):
            groups.setdefault(reason, []).append(_shown(name))
        for reason, group in groups.items():
            more = f" and {len(group) - MOST_NAMED} more" if len(group) > MOST_NAMED else ""
            yield f"not sent of {title}: {', '.join(group[:MOST_NAMED])}{more} ({reason})"
        for ignored, reason in (
            (bundle.ignored, "git ignores it"),
            (bundle.fab_ignored, f"{FAB_IGNORE} names it"),
        ):
            if not ignored:
                continue
            largest = [name for name, _ in sorted(ignored.items(), key=lambda item: -item[1][1])]
            named = [f"{_shown(name)} ({_size(*ignored[name])})" for name in largest[:LARGEST_FILES]]
            more = f" and {len(largest) - LARGEST_FILES} more" if len(largest) > LARGEST_FILES else ""
            example = f"{largest[0]}**" if largest[0].endswith("/") else largest[0]
            way = f"{reason}; `--send {shlex.quote(example)}` sends it"
            yield f"not sent of {title}: {', '.join(named)}{more} ({way})"


def _shown(name: str) -> str:
    return name if name.isprintable() else repr(name)


def _size(files: int, size_bytes: int) -> str:
    count = (
        f"more than {MOST_COUNTED:,} files" if files > MOST_COUNTED else f"{files:,} file{'s' * (files != 1)}"
    )
    unit, scale = next((unit, scale) for unit, scale in UNITS if size_bytes >= scale or scale == 1)
    return f"{count}, {size_bytes / scale:,.{1 if scale > 1 else 0}f} {unit}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listing:
    """The files of a folder that can be sent, by their names in it, and what cannot be, with the reasons.

    ignored: files and folders that were left out without a word, these with a slash at the end.
    """

    folder: Path
    files: Mapping[str, os.stat_result]
    left_out: Mapping[str, str]
    ignored: Sequence[str] = ()

    @property
    def size_bytes(self) -> int:
        return sum(status.st_size for status in self.files.values())

    def largest(self, count: int) -> list[str]:
        """Return the names of the largest files."""
        return sorted(self.files, key=lambda name: -self.files[name].st_size)[:count]

    def with_files(self, files: Mapping[str, os.stat_result]) -> Listing:
        """Return the listing with more files, which were left out or not."""
        left_out = {name: reason for name, reason in self.left_out.items() if name not in files}
        return dataclasses.replace(self, files={**self.files, **files}, left_out=left_out)

    def without(self, left_out: Mapping[str, str]) -> Listing:
        """Return the listing with more that is left out."""
        return dataclasses.replace(self, left_out={**self.left_out, **left_out})

    @property
    def programs(self) -> frozenset[str]:
        """The names of the files that their owner may execute."""
        return frozenset(name for name, status in self.files.items() if status.st_mode & 0o100)

    def bundle(self, secret: str, allowed: Collection[str] = (), programs: Set[str] = frozenset()) -> Bundle:
        """Return the files as a bundle, without those that cannot be read or may hold a secret.

        secret: the reason that is given for the latter. allowed: the names of files that may. programs: those that may
        be executed.
        """
        contents, left_out = dict[str, bytes](), dict[str, str]()
        for name in sorted(self.files, key=lambda name: name.split("/")):
            try:
                content = (self.folder / name).read_bytes()
                place = os.path.realpath(self.folder / name) if (self.folder / name).is_symlink() else name
            except OSError as error:
                left_out[name] = unreadable(error)
                continue
            if name not in allowed and (is_secret(name, content) or is_secret(place, content)):
                left_out[name] = secret
            else:
                contents[name] = content
        packed = archive(contents, programs)
        return dataclasses.replace(packed, left_out={**self.left_out, **left_out})


def listing(
    folder: Path,
    *,
    inside: Sequence[str] = ("",),
    ignored: Callable[[Path, Set[str]], Set[str]] = lambda _folder, _names: frozenset(),
) -> Listing:
    """List the files of a folder: those that are there and can be sent as what they are.

    A link to a file is sent as that file. Links to folders are not followed: they may lead in a circle, or anywhere.

    inside: the folders in it that are listed, each "" or with a slash at its end. ignored: called with the folder and
    with each git checkout in it, and the names there; returns what is left out there without a word, by names relative
    to that folder, those of folders with a slash at the end.

    Raises:
        OSError: the folder itself cannot be read.
    """
    files, left_out, skipped = dict[str, os.stat_result](), dict[str, str](), set[str]()
    ignored_names = list[str]()
    left = [*inside]
    while left:
        place = left.pop()
        try:
            with os.scandir(folder / place) as scanned:
                entries = list(scanned)
        except OSError as error:
            if not place:
                raise
            left_out[place.rstrip("/")] = unreadable(error)
            continue
        names = {entry.name for entry in entries}
        if not place or ".git" in names:
            skipped |= {place + name for name in ignored(folder / place, names)}
        for entry in entries:
            name = place + entry.name
            if entry.name in LEFT_OUT:
                continue
            is_folder = entry.is_dir(follow_symlinks=False)
            name_in_git = f"{name}/" if is_folder else name
            if name_in_git in skipped or name in skipped:
                ignored_names.append(name_in_git)
                continue
            if is_folder:
                left.append(f"{name}/")
                continue
            status = _regular(entry)
            if isinstance(status, str):
                left_out[name] = status
            else:
                files[name] = status
    return Listing(folder=folder, files=files, left_out=left_out, ignored=tuple(ignored_names))


def _regular(entry: os.DirEntry[str]) -> os.stat_result | str:
    """Return the status of a file that can be sent, or the reason why it cannot be."""
    try:
        status = entry.stat()
    except FileNotFoundError:
        return "a link to nothing" if entry.is_symlink() else "it has just vanished"
    except OSError as error:
        return unreadable(error)
    if stat.S_ISREG(status.st_mode):
        return status
    kinds = {stat.S_IFDIR: "a link to a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(status.st_mode), "a device")


def unreadable(error: OSError) -> str:
    """Return the reason for leaving out what cannot be read."""
    return f"cannot be read: {error.strerror}"


def archive(contents: Mapping[str, bytes], programs: Set[str] = frozenset()) -> Bundle:
    """Bundle files by their names, in this order; `programs` among them may be executed."""
    compressed = _compressed(tar(contents, programs))
    return Bundle(
        sha256=hashlib.sha256(compressed).hexdigest(), archive=compressed, names=frozenset(contents)
    )


def _compressed(packed: bytes) -> bytes:
    """Compress with gzip: what is large in pieces, on all processors. A gzip file may have several members."""
    level = 1 if len(packed) > LARGE_BYTES else 6
    pieces = (memoryview(packed)[start : start + LARGE_BYTES] for start in range(0, len(packed), LARGE_BYTES))
    with ThreadPoolExecutor() as pool:
        return b"".join(pool.map(lambda piece: gzip.compress(piece, compresslevel=level, mtime=0), pieces))


def tar(files: Mapping[str, bytes], programs: Set[str] = frozenset()) -> bytes:
    """Return a tar of the files by their names; the same files in the same order give the same bytes.

    programs: those that may be executed.
    """
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o755 if name in programs else 0o644
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


# --- a folder of the user's own ------------------------------------------------------------------------------------

LARGEST_BYTES = 2**30
"""Of a folder: it is sent to every host whenever it has changed."""
LARGEST_FILES = 3
GIT_LIMIT_S = 60
SECRET = "may hold a secret"
FOLDER_SECRET = f"{SECRET}; `--send FILE` sends one"
SUBMODULE_MODE = "160000 "
"""How git begins what it says of one."""
FAB_IGNORE = ".fabignore"
"""Names what is not sent, as .gitignore names what git ignores, but of tracked files too."""
EMPTY_BLOB = "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
"""Git's name for an empty file, which it knows without having it."""


def bundle_folder(folder: Path, send: Sequence[str] = ()) -> Bundle:
    """Bundle a user's folder: all its files but those that git ignores there, and those that may hold secrets.

    send: names and patterns of files in it that are sent all the same, as `named_in` returns them.

    Raises:
        RequestError: it cannot be read, it holds more than LARGEST_BYTES, or its .gitignore cannot be honoured; or a
            file of `send` is not there.
    """
    if not folder.is_dir():
        raise RequestError(f"{folder}: the command's folder is no longer there")
    git_there = _Git(folder)
    try:
        files = listing(folder, ignored=git_there.ignored)
    except OSError as error:
        raise RequestError(f"--workdir {folder}: cannot be read ({error.strerror})") from None
    files = files.without(git_there.submodules_missing(files))
    files, fab_ignored = git_there.without_fab_ignored(files)
    sent = {name: _status(folder, name) for pattern in send for name in _matching(folder, pattern)}
    files = files.with_files(sent)
    if files.size_bytes > LARGEST_BYTES:
        largest = ", ".join(
            f"{name} ({files.files[name].st_size / 2**20:,.0f} MiB)" for name in files.largest(LARGEST_FILES)
        )
        raise RequestError(
            f"--workdir {folder}: holds {files.size_bytes / 2**20:,.0f} MiB, more than the "
            f"{LARGEST_BYTES / 2**20:.0f} MiB that are sent to hosts; the largest files are {largest}. Name them in "
            f".gitignore or {FAB_IGNORE}, and read data from a bucket or the share"
        )
    ignored = {name: _contents(folder / name, name, sent) for name in files.ignored}
    bundle = files.bundle(FOLDER_SECRET, allowed=send, programs=files.programs)  # a pattern names no secret
    return dataclasses.replace(
        bundle,
        ignored={name: size for name, size in ignored.items() if size[0]},
        fab_ignored=_sizes(
            {name: size for name, size in fab_ignored.items() if name not in sent}, files.files
        ),
    )


def _sizes(ignored: Mapping[str, int], sent_names: Collection[str]) -> dict[str, Size]:
    """Return what is ignored as few names with their sizes: folders of which nothing is kept stand for their files."""
    kept_folders = {folder for name in sent_names for folder in _folders(name)}
    sizes = dict[str, Size]()
    for name, size_bytes in ignored.items():
        title = next((folder for folder in _folders(name) if folder not in kept_folders), name)
        count, total = sizes.get(title, (0, 0))
        sizes[title] = count + 1, total + size_bytes
    return sizes


def _folders(name: str) -> list[str]:
    """Return the folders that a file is in, each with a slash at the end, from the outermost on."""
    return [name[: end + 1] for end, letter in enumerate(name) if letter == "/"]


def _contents(place: Path, name: str, sent: Collection[str]) -> tuple[int, int]:
    """Return how many files that git ignores are in a place and are not `sent`, and how large they are together."""
    if not name.endswith("/"):
        return (0, 0) if name in sent else (1, place.lstat().st_size)
    count = size_bytes = 0
    for folder, inner, files in os.walk(place):
        inner[:] = [name for name in inner if name not in LEFT_OUT]
        for file in files:
            if f"{name}{os.path.relpath(os.path.join(folder, file), place)}" in sent:
                continue
            count += 1
            with contextlib.suppress(OSError):  # it has just vanished
                size_bytes += os.lstat(os.path.join(folder, file)).st_size
            if count > MOST_COUNTED:
                return count, size_bytes
    return count, size_bytes


def named_in(folder: Path, send: Sequence[str]) -> tuple[str, ...]:
    """Return what `--send` names, each once or several with a comma between, by its name in the folder: files, or
    patterns of files (data/**), as which folders are taken too.

    Raises:
        RequestError: one is no file of the folder, or matches none.
    """
    texts = [text for value in send for text in ([value] if (folder / value).is_file() else value.split(","))]
    names = []
    for text in filter(None, texts):
        places = (folder / text, Path(text).expanduser().absolute())
        name = os.path.relpath(next(filter(os.path.lexists, places), places[0]), folder)
        if name.startswith("../"):
            raise RequestError(f"--send {text}: is not in {folder}; name a file of that folder")
        name = f"{name}/**" if (folder / name).is_dir() else name
        if not _matching(folder, name):
            raise RequestError(f"--send {text}: matches no file in {folder}")
        names.append(name)
    return tuple(sorted({*names}))


def _matching(folder: Path, pattern: str) -> list[str]:
    """Return the names of the files in a folder that a name or a pattern means."""
    if (folder / pattern).is_file() or not glob.has_magic(pattern):
        _status(folder, pattern)
        return [pattern]
    names = glob.iglob(pattern, root_dir=folder, recursive=True, include_hidden=True)
    return [name for name in names if (folder / name).is_file() and not LEFT_OUT & {*Path(name).parts}]


def _status(folder: Path, name: str) -> os.stat_result:
    place = folder / name
    if not place.is_file():
        raise RequestError(f"--send {name}: there is no such file in {folder}")
    return place.stat()


class _Git:
    """What git knows of a user's folder, which need not be a git checkout, and of the checkouts in it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._submodules: list[str] = []

    def ignored(self, folder: Path, names: Set[str]) -> Set[str]:
        """Return what git ignores in a folder, as `launch.code.bundles.listing` takes it.

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
                if line.startswith(SUBMODULE_MODE)
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

    def _names(self, folder: Path, *arguments: str, stdin: str | None = None) -> list[str]:
        done = git(folder, *arguments, limit_s=GIT_LIMIT_S, stdin=stdin)
        if done is None or done.returncode:
            raise RequestError(
                f"--workdir {self._folder}: git cannot list its files; `git -C {folder} ls-files` says why"
            )
        return [name for name in done.stdout.split("\0") if name]

    def without_fab_ignored(self, files: Listing) -> tuple[Listing, dict[str, int]]:
        """Return the listing without what the files .fabignore in it name, and those files with their bytes.

        Git reads them, in a repository of nothing but the names: what the folder's own has in its index counts, and so
        do the files of submodules and of repositories in it.
        """
        if not any(name.rpartition("/")[2] == FAB_IGNORE for name in files.files):
            return files, {}
        folders = {
            name for name in files.left_out if os.path.isdir(self._folder / name)
        }  # one of them is not listed
        folders -= {name for name in folders if os.path.islink(self._folder / name)}
        paths = {
            f"{name}/file" if name in folders else name: name for name in (*files.files, *files.left_out)
        }
        ignored = {paths[path] for path in self._named_by_fab_ignore(paths)}
        sent_names = {name: status for name, status in files.files.items() if name not in ignored}
        left_out = {name: reason for name, reason in files.left_out.items() if name not in ignored}
        sizes = {name: status.st_size for name, status in files.files.items() if name in ignored}
        return dataclasses.replace(files, files=sent_names, left_out=left_out), sizes

    def _named_by_fab_ignore(self, names: Iterable[str]) -> list[str]:
        with tempfile.TemporaryDirectory() as empty:
            if git(Path(empty), "init", "--quiet", ".") is None:
                raise RequestError(
                    f"--workdir {self._folder}: has a {FAB_IGNORE}, and there is no git to read it; install git"
                )
            place = (f"--git-dir={empty}/.git", f"--work-tree={self._folder}")
            index = "".join(f"100644 {EMPTY_BLOB} 0\t{name}\0" for name in names)
            self._names(self._folder, *place, "update-index", "-z", "--index-info", stdin=index)
            matching = ("--cached", "--ignored", f"--exclude-per-directory={FAB_IGNORE}")
            return self._names(self._folder, *place, "ls-files", "-z", *matching)

    def submodules_missing(self, files: Listing) -> dict[str, str]:
        """Return the submodules of which no file is there, with the reason."""
        folders = {name[:end] for name in files.files for end, letter in enumerate(name) if letter == "/"}
        reason = "a submodule that is not checked out; `git submodule update --init` does that"
        return {name: reason for name in self._submodules if name not in folders}


def git(
    folder: Path, *arguments: str, limit_s: float = 10, stdin: str | None = None
) -> subprocess.CompletedProcess[str] | None:
    """Return what git did in a folder; None if it is not installed, or took longer than the limit. stdin: its input."""
    try:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments],
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",  # as Python itself has names that are no UTF-8
            timeout=limit_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


# --- secrets --------------------------------------------------------------------------------------------------------

SECRET_NAMES = re.compile(
    r"""(?: .*/ )? (?:
      \.env (?: rc | [._~-].* )? | [^/]+\.env
    | id_(?: rsa | dsa | ecdsa | ed25519 )(?: _sk )?(?: [._~-].* )?
    | [^/]+\.(?: key | ppk | p12 | pfx | jks | keystore | kdbx | tfstate )
    | [._]netrc | \.pypirc | \.git-credentials | \.npmrc | \.pgpass | \.my\.cnf | \.boto | \.s3cfg | \.vault-token
    | \.databrickscfg | \.dockercfg | \.comet\.config | kaggle\.json | client_secret[^/]*\.json
    | \.aws/credentials | \.docker/config\.json | \.cargo/credentials\.toml | \.?credentials(?: \.json )?
    | \.kube/config | (?: [^/]+[.-] )?kubeconfig(?: \.ya?ml )?
    | (?: \.config/ | \.)gcloud/.* | application_default_credentials\.json
    | \.?(?: (?: hf | huggingface | wandb | github | gitlab | api | access | auth )[._-] )?token(?: \.txt )?
    | \.?huggingface/stored_tokens | \.?secrets?\.(?: toml | ya?ml | json | ini )
    )""",
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)
"""Where programs keep passwords, tokens and private keys."""
HARMLESS_NAMES = re.compile(
    r"(.*[/._-])?(examples?|samples?|templates?|tmpl|tpl|dist|defaults?|schema)"
    r"([._-](env|toml|ya?ml|json|ini|txt))?|.*\.pub",
    re.IGNORECASE | re.DOTALL,
)
"""Files that show how those are written, and public keys."""
PUBLIC = re.compile(rb"\s*-----BEGIN (?:[A-Z0-9]+ )?(?:CERTIFICATE|PUBLIC KEY)")
PRIVATE_KEY = re.compile(
    rb"^[ \t]*-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----[ \t\r]*$"
    rb"|-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY-----(?:\\r)?\\n[A-Za-z0-9+/=]{16}",
    re.MULTILINE,
)
"""In lines of its own, or in a string with escaped ends of lines."""
JSON_OF_ACCOUNT = re.compile(
    rb'[\xef\xbb\xbf\s]*\{.*"type"\s*:\s*"(?:service_account|authorized_user)"', re.DOTALL
)
KEY_OF_ACCOUNT = re.compile(rb'"(?:private_key|refresh_token)"\s*:\s*"[^"]')
IN_CONFIGURATION = re.compile(rb"(?:aws_secret_access_key[ \t]*=|client-key-data:)[ \t]*[A-Za-z0-9+/]{20}")
"""In files of the AWS command line and of kubectl, whatever their names."""
TOKEN = re.compile(
    rb"\s*(?:hf_[A-Za-z0-9]{20,}|gh[opsu]_[A-Za-z0-9]{30,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[\w-]{20,}"
    rb"|xox[abp]-[\w-]{20,}|pypi-[\w-]{40,}|ya29\.[\w-]{20,}|AIza[\w-]{35})\s*"
)
"""A file that is a token and nothing else."""
LONGEST_CREDENTIAL = 64 * 1024


def is_secret(name: str, content: bytes) -> bool:
    """Whether a file's name or content says that it holds a password, a token or a private key."""
    if b"PRIVATE KEY" in content and PRIVATE_KEY.search(content):
        return True
    if SECRET_NAMES.fullmatch(name) and not HARMLESS_NAMES.fullmatch(name) and not PUBLIC.match(content):
        return True
    if len(content) > LONGEST_CREDENTIAL:
        return False
    is_account = JSON_OF_ACCOUNT.match(content) and KEY_OF_ACCOUNT.search(content)
    return bool(is_account or IN_CONFIGURATION.search(content) or TOKEN.fullmatch(content))
