"""An image's contents and name: the files of images/, the base, and a hash of both. Pure but for reading files."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

from contracts.errors import RequestError
from launch.code.bundles import tar
from launch.jobs import CHECKOUT, image_frameworks
from launch.jobs import IMAGES as FOLDER

ImagePlatform = Literal["tpu", "cpu"]
PLATFORMS: tuple[ImagePlatform, ...] = get_args(ImagePlatform)
UV_LOCK = CHECKOUT / "requirements" / "uv.txt"
REPOSITORY = "tpu-stack"
HASH_LENGTH = 12
OUR_TAG = re.compile(
    r"(?:.*/)?(?P<framework>[a-z][a-z0-9_]*):(?P<platform>tpu|cpu)-(?P<hash>[0-9a-f]{12})(?P<failed>-failed)?"
)
"""The name of our images, here and in every registry."""

BASE_FILE = FOLDER / "base.txt"
BASE_VARIABLE = "TPU_STACK_BASE_IMAGE"
"""Names another base, such as the stand-in that tests use where no registry can be reached (tools/stand_in_base.py)."""
PINNED = re.compile(r"(?P<tag>[a-z0-9][a-z0-9._:/-]*:[\w.-]+)@(?P<digest>sha256:[0-9a-f]{64})")

TORCH_BACKEND, CPU_WHEELS = "UV_TORCH_BACKEND", "TORCH_CPU_INDEX"
"""`cpu`: the images on PyTorch take PyTorch's own wheels for CPUs (torch==…+cpu) from PyTorch's index, which uv knows;
the other names another index that has them."""
INDEXES = ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL", CPU_WHEELS)
# Docker knows these without an ARG, and keeps them out of the image's history.
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
LICENSE = "Apache-2.0"

FRAMEWORK_LABEL = "tpu-stack.framework"
PLATFORM_LABEL = "tpu-stack.platform"
RECIPE_LABEL = "tpu-stack.recipe"
LOCK_LABEL = "tpu-stack.lock"
SMOKE_LABEL = "tpu-stack.smoke"
"""The label of the container that tests an image; its value is the recipe's hash."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """One image: base by digest, and the files of its build by their name in the build context.

    cpu_wheels: whether PyTorch's own wheel for CPUs is taken, where its index can be reached.
    """

    framework: str
    platform: ImagePlatform
    base: str
    files: Mapping[str, bytes]
    cpu_wheels: bool = False

    @property
    def hash(self) -> str:
        """Changes when the image would, and only then: the code of jobs is in no image."""
        torch = (CPU_WHEELS,) if self.cpu_wheels else ()
        identity = (self.framework, self.platform, self.base, sorted(self.files.items()), *torch)
        return hashlib.sha256(repr(identity).encode()).hexdigest()[:HASH_LENGTH]

    @property
    def version(self) -> str:
        """The tag without the repository, the same here and in a registry."""
        return f"{self.platform}-{self.hash}"

    @property
    def tag(self) -> str:
        """The image's name on this machine."""
        return f"{REPOSITORY}/{self.framework}:{self.version}"

    @property
    def failed_tag(self) -> str:
        """The name of an image whose smoke test failed, kept for inspection."""
        return f"{self.tag}-failed"

    @property
    def lock_sha256(self) -> str:
        return hashlib.sha256(self.files["requirements.txt"]).hexdigest()

    def context(self) -> bytes:
        """Return what Docker is given to build from, a tar; the same recipe gives the same bytes.

        It is made from the recipe only: nothing else of the checkout can get into an image.
        """
        return tar(dict(sorted(self.files.items())))

    def labels(self, commit: str | None) -> dict[str, str]:
        """Return the image's labels. commit: of the checkout, with "-dirty" behind it if files differ."""
        labels = {
            FRAMEWORK_LABEL: self.framework,
            PLATFORM_LABEL: self.platform,
            RECIPE_LABEL: self.hash,
            LOCK_LABEL: self.lock_sha256,
            "org.opencontainers.image.title": f"tpu-stack {self.framework} for {self.platform}",
            "org.opencontainers.image.base.name": self.base,
            "org.opencontainers.image.licenses": LICENSE,
        }
        return labels | ({"org.opencontainers.image.revision": commit} if commit else {})

    def arguments(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the build arguments: the base, and how this machine reaches packages.

        Raises:
            RequestError: a package index is named with a password: an argument stays in the image's history.
        """
        arguments = {name: environ[name] for name in (*INDEXES, *PROXIES) if environ.get(name)}
        if environ.get(TORCH_BACKEND) == "cpu":  # its other values are for machines with GPUs
            arguments[TORCH_BACKEND] = "cpu"
        for name in INDEXES:
            parts = urllib.parse.urlsplit(arguments.get(name, ""))
            if "@" in parts.netloc or parts.query:
                raise RequestError(
                    f"{name} holds a password, which the image would keep in its history; name an index that needs "
                    "none, or a mirror of it on this machine"
                )
        return arguments | {"BASE_IMAGE": self.base}


def chosen(option: str, text: str, folder: Path = FOLDER) -> tuple[str, ...]:
    """Return the frameworks of a list such as "jax,pytorch"; all of them if it is empty.

    Raises:
        RequestError: there is no such framework.
    """
    frameworks = image_frameworks(folder)
    chosen_names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in chosen_names:
        if name not in frameworks:
            raise RequestError(
                f'{option}: "{name}" is not a framework; choose one of {", ".join(frameworks)}'
            )
    return chosen_names or frameworks


def image_platform(text: str) -> ImagePlatform:
    """Return the platform. Raises RequestError if there are no images for it."""
    for platform in PLATFORMS:
        if text == platform:
            return platform
    raise RequestError(
        f'--platform: "{text}" is not a platform of images; choose one of {", ".join(PLATFORMS)}'
    )


def read(
    framework: str,
    platform: ImagePlatform,
    environ: Mapping[str, str],
    *,
    folder: Path = FOLDER,
    uv_lock: Path = UV_LOCK,
) -> Recipe:
    """Return the recipe of a framework's image, read in `folder`. Without a lock for CPUs, one serves both platforms.

    Programs that only its build runs lie in the framework's own folder `build`.

    Raises:
        RequestError: a file is missing, or there are two of a name.
    """
    own = folder / framework
    for_cpu = own / "requirements-cpu.txt"
    lock = for_cpu if platform == "cpu" and for_cpu.is_file() else own / "requirements.txt"
    places = {
        "Dockerfile": own / "Dockerfile",
        "requirements.txt": lock,
        "uv.txt": uv_lock,
        **_programs(folder / "smoke", "smoke"),
        "smoke/framework.py": own / "smoke.py",
        **_programs(own / "build", "build"),
    }
    if (taken := folder / "smoke" / "framework.py").exists():
        raise RequestError(
            f"{taken}: in the image each framework's own smoke.py has this name; give it another"
        )
    try:
        files = {name: path.read_bytes() for name, path in places.items()}
    except FileNotFoundError as error:
        raise RequestError(
            f"{error.filename} is not there, and the image of {framework} needs it; `make lock` makes locks, "
            "git has the rest"
        ) from None
    wants_wheels = bool(environ.get(CPU_WHEELS)) or environ.get(TORCH_BACKEND) == "cpu"
    cpu_wheels = wants_wheels and CPU_WHEELS.encode() in files["Dockerfile"]
    return Recipe(
        framework=framework, platform=platform, base=base_image(environ), files=files, cpu_wheels=cpu_wheels
    )


def _programs(folder: Path, name: str) -> dict[str, Path]:
    return {f"{name}/{path.name}": path for path in sorted(folder.glob("*.py"))}


def current_tags(environ: Mapping[str, str]) -> set[str]:
    """Return what the images of this checkout's recipes are called, built or not."""
    return {
        read(framework, platform, environ).tag for framework in image_frameworks() for platform in PLATFORMS
    }


def base_image(environ: Mapping[str, str]) -> str:
    """Return the base as a Dockerfile names it.

    Raises:
        RequestError: images/base.txt names none by its digest.
    """
    return environ.get(BASE_VARIABLE) or pinned_base()[0]


def pinned_base(file: Path = BASE_FILE) -> re.Match[str]:
    """Return the one line of images/base.txt, a tag and the digest that it had. Raises RequestError."""
    try:
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{file}: {getattr(error, 'strerror', None) or error}; git has it") from None
    match = PINNED.fullmatch(text)
    if match is None:
        raise RequestError(
            f'{file}: "{text}" is no base by tag and digest; write NAME:TAG@sha256:… in one line'
        )
    return match
