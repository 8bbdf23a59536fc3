"""What an image is made of: the files of images/, and the name that follows from them. Pure but for reading files."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

from contracts.errors import RequestError
from launch.jobs import CHECKOUT

Platform = Literal["tpu", "cpu"]
PLATFORMS: tuple[Platform, ...] = get_args(Platform)
FOLDER = CHECKOUT / "images"
UV_LOCK = CHECKOUT / "requirements" / "uv.txt"
REPOSITORY = "tpu-stack"
HASH_LENGTH = 12
OUR_TAG = re.compile(
    r"(?:.*/)?(?P<stack>[a-z][a-z0-9_]*):(?P<platform>tpu|cpu)-(?P<hash>[0-9a-f]{12})(?P<failed>-failed)?"
)
"""How images of ours are called, here and in every registry."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """One image: base by digest, and the files of its build by their name in the build context."""

    stack: str
    platform: Platform
    base: str
    files: Mapping[str, bytes]

    @property
    def hash(self) -> str:
        """Changes when the image would, and only then: the code of jobs is in no image."""
        what = (self.stack, self.platform, self.base, sorted(self.files.items()))
        return hashlib.sha256(repr(what).encode()).hexdigest()[:HASH_LENGTH]

    @property
    def version(self) -> str:
        """The tag without the repository, the same here and in a registry."""
        return f"{self.platform}-{self.hash}"

    @property
    def tag(self) -> str:
        """Its name on this machine."""
        return f"{REPOSITORY}/{self.stack}:{self.version}"

    @property
    def failed_tag(self) -> str:
        """Of one whose smoke test failed, kept to look into."""
        return f"{self.tag}-failed"

    @property
    def lock_sha256(self) -> str:
        return hashlib.sha256(self.files["requirements.txt"]).hexdigest()


def stacks(folder: Path = FOLDER) -> tuple[str, ...]:
    """The folders that have a Dockerfile, by name."""
    return tuple(sorted(path.parent.name for path in folder.glob("*/Dockerfile")))


def chosen(option: str, text: str, folder: Path = FOLDER) -> tuple[str, ...]:
    """The stacks that "jax,pytorch" means; all of them without a choice.

    Raises:
        RequestError: there is no such stack.
    """
    known = stacks(folder)
    wanted = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in wanted:
        if name not in known:
            raise RequestError(
                f'{option}: "{name}" is not a framework stack; choose one of {", ".join(known)}'
            )
    return wanted or known


def platform_of(text: str) -> Platform:
    """Raises RequestError where images are made for no such platform."""
    for platform in PLATFORMS:
        if text == platform:
            return platform
    raise RequestError(
        f'--platform: "{text}" is not a platform of images; choose one of {", ".join(PLATFORMS)}'
    )


def read(
    stack: str, platform: Platform, base: str, *, folder: Path = FOLDER, uv_lock: Path = UV_LOCK
) -> Recipe:
    """The recipe of a stack as it lies in `folder`. Where there is no lock for CPUs, one serves both platforms.

    Programs that only its build runs lie in the stack's own folder `build`.

    Raises:
        RequestError: a file is missing, or there are two of a name.
    """
    own = folder / stack
    for_cpu = own / "requirements-cpu.txt"
    lock = for_cpu if platform == "cpu" and for_cpu.is_file() else own / "requirements.txt"
    places = {
        "Dockerfile": own / "Dockerfile",
        "requirements.txt": lock,
        "uv.txt": uv_lock,
        **_programs(folder / "smoke", "smoke"),
        "smoke/stack.py": own / "smoke.py",
        **_programs(own / "build", "build"),
    }
    if (folder / "smoke" / "stack.py").exists():
        raise RequestError(
            f"{folder / 'smoke' / 'stack.py'}: in the image each stack's own smoke.py has this name; give it another"
        )
    try:
        files = {name: path.read_bytes() for name, path in places.items()}
        return Recipe(stack=stack, platform=platform, base=base, files=files)
    except FileNotFoundError as error:
        raise RequestError(
            f"{error.filename} is not there, and the image of {stack} needs it; `make lock` makes locks, "
            "git has the rest"
        ) from None


def _programs(folder: Path, name: str) -> dict[str, Path]:
    return {f"{name}/{path.name}": path for path in sorted(folder.glob("*.py"))}
