"""Stands in for NVIDIA's libraries where no NVIDIA device can ever be: torch loads and finds no CUDA.

    python stubs.py SITE_PACKAGES/torch

torch from the Python registry is linked against a dozen CUDA libraries, gigabytes that a host with TPUs has no use for
and that torch cannot be loaded without. For each this makes a small library of the same name beside torch's own,
with just those functions that torch asks for, under the versions it asks for. They answer as NVIDIA's do on a machine
without a device: a function that needs one returns an error code, which torch raises where it matters. They print
nothing, because libraries ask for a device where nobody wants CUDA (transformers: whether a graph is captured now).
Needs objdump, nm and gcc; standard library alone, because it runs in the build of an image."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 120
# What Python loads of torch. What cannot be reached from here is loaded when CUDA is used, or never.
ROOTS = ("_C.*.so", "lib/libtorch_global_deps.so", "lib/libtorch_python.so")
# The libraries that are stood in for, and functions that are asked for without a version, so that only their names say
# whose they are. Anything else that is missing is a mistake of the image.
NVIDIA = re.compile(r"lib(cu[a-zA-Z]+|nccl|nvrtc|nvshmem_host|nvToolsExt|nvJitLink)\.so\.\d+")
OF_NVIDIA = re.compile(r"(cu|nccl|nv)[a-zA-Z]")

HEAD = 'static const char why[] = "this image has no CUDA: its NVIDIA libraries are stand-ins";\n'
# cudaErrorNoDevice; to all the other libraries it is some error, because only 0 is none.
REFUSES = "int {name}(void) {{ return 100; }}"
# Called while torch's libraries are loaded and unloaded, device or none: tables of GPU code are made known.
REGISTERS = "void *{name}(void) {{ return 0; }}"
TEXT = "const char *{name}(void) {{ return why; }}"
# What is asked before there is a device, and answered so that torch says "no CUDA" by itself.
ANSWERS = {
    "cudaGetDeviceCount": "int {name}(int *count) {{ *count = 0; return 0; }}",
    "cudaDriverGetVersion": "int {name}(int *version) {{ *version = 0; return 0; }}",
    "cuptiGetResultString": "int {name}(int code, const char **text) {{ *text = why; return 0; }}",
    "ncclGetLastError": TEXT,
}


class StubsError(Exception):
    """torch is not as expected; the message says what was found and what to look at."""


@dataclass(frozen=True, kw_only=True)
class Library:
    """What a shared library asks others for."""

    needs: frozenset[str]
    """Names of libraries."""
    owners: Mapping[str, str]
    """Version → the library that has to define it."""
    asks: frozenset[tuple[str, str]]
    """Functions with their versions; "" where it asks for none."""


@dataclass(frozen=True, kw_only=True)
class Stub:
    name: str
    functions: Mapping[str, str]
    """Function → its version, "" for none."""


def parse(headers: str, symbols: str) -> Library:
    """From what `objdump --private-headers` and `nm --dynamic --undefined-only --with-symbol-versions` print."""
    owners: dict[str, str] = {}
    library = ""
    for line in headers.splitlines():
        if found := re.fullmatch(r"\s+required from (\S+):", line):
            library = found[1]
        elif library and (found := re.fullmatch(r"\s+0x[0-9a-f]+ 0x[0-9a-f]+ \d+ (\S+)", line)):
            # A version such as GLIBC_2.2.5 has several owners, none of them NVIDIA's.
            owners[found[1]] = library
    asked = (line.split()[-1].partition("@") for line in symbols.splitlines() if " U " in f" {line} ")
    return Library(
        needs=frozenset(re.findall(r"^\s+NEEDED\s+(\S+)$", headers, re.MULTILINE)),
        owners=owners,
        asks=frozenset((name, version.lstrip("@")) for name, _, version in asked),
    )


def plan(libraries: Mapping[str, Library], roots: Iterable[str]) -> list[Stub]:
    """The stubs that loading these roots takes. `libraries`: by file name, those that are there.

    Raises StubsError on a function that belongs to no library, because without it torch would not load."""
    reached = reachable(libraries, roots)
    missing = sorted(
        {need for name in reached for need in libraries[name].needs if NVIDIA.fullmatch(need)} - reached
    )
    stubs: dict[str, dict[str, str]] = {name: {} for name in missing}
    lost = []
    for library in (libraries[name] for name in sorted(reached)):
        for function, version in sorted(library.asks):
            if version and library.owners.get(version) in stubs:
                stubs[library.owners[version]][function] = version
            elif not version and OF_NVIDIA.match(function):
                owner = _by_name(function, missing)
                if owner is None:
                    lost.append(function)
                else:
                    stubs[owner].setdefault(function, "")
    if lost:
        raise StubsError(
            f"torch asks for {', '.join(lost)}, which none of {', '.join(missing) or 'no library'} is known to have:"
            " see which of NVIDIA's libraries has it, and teach `plan` its name"
        )
    return [Stub(name=name, functions=functions) for name, functions in stubs.items()]


def reachable(libraries: Mapping[str, Library], roots: Iterable[str]) -> frozenset[str]:
    """What is loaded with these, as far as it is there."""
    reached: set[str] = set()
    ahead = list(roots)
    while ahead:
        name = ahead.pop()
        if name in libraries and name not in reached:
            reached.add(name)
            ahead += libraries[name].needs
    return frozenset(reached)


def _by_name(function: str, libraries: Iterable[str]) -> str | None:
    """libcusparseLt.so.0 has cusparseLtInit, libcufile.so.0 cuFileRead: the longest name that fits."""
    fitting = [
        (len(stem), name)
        for name in libraries
        if function.lower().startswith(stem := name.removeprefix("lib").partition(".")[0].lower())
    ]
    return max(fitting)[1] if fitting else None


def source(stub: Stub) -> str:
    """Its C."""
    return HEAD + "".join(f"{_template(name).format(name=name)}\n" for name in sorted(stub.functions))


def _template(function: str) -> str:
    if function in ANSWERS:
        return ANSWERS[function]
    if function.startswith("__cuda"):
        return REGISTERS
    return TEXT if re.search(r"Get(Error|Status)(String|Name)$", function) else REFUSES


def version_script(stub: Stub) -> str:
    """For the linker. What is not in it is exported without a version."""
    versions: dict[str, list[str]] = {}
    for name, version in sorted(stub.functions.items()):
        if version:
            versions.setdefault(version, []).append(f"{name};")
    return "".join(f"{version} {{ global: {' '.join(names)} }};\n" for version, names in versions.items())


def make(torch: Path) -> list[Stub]:
    """Raises StubsError."""
    folder = torch / "lib"
    roots = [path for pattern in ROOTS for path in sorted(torch.glob(pattern))]
    if len(roots) < len(ROOTS):
        raise StubsError(f"{torch} is not where torch is: {', '.join(ROOTS)} are not all there")
    if (torch.parent / "nvidia").exists():
        raise StubsError(
            f"{torch.parent / 'nvidia'} is there: NVIDIA's own libraries are installed; see which package asks for them"
            " (`make lock` says what is new), and name it in overrides.in"
        )
    files = {path.name: path for path in (*roots, *folder.glob("*.so*"))}
    libraries = {
        name: parse(
            _run(["objdump", "--private-headers", str(path)]),
            _run(["nm", "--dynamic", "--undefined-only", "--with-symbol-versions", str(path)]),
        )
        for name, path in files.items()
    }
    stubs = plan(libraries, [path.name for path in roots])
    for stub in stubs:
        compile_stub(stub, folder / stub.name)
    return stubs


def compile_stub(stub: Stub, path: Path) -> None:
    """Raises StubsError."""
    with tempfile.TemporaryDirectory() as scratch:
        code, versions = Path(scratch, "stub.c"), Path(scratch, "stub.map")
        code.write_text(source(stub))
        link = [f"-Wl,-soname,{stub.name}"]
        if script := version_script(stub):
            versions.write_text(script)
            link.append(f"-Wl,--version-script={versions}")
        _run(["gcc", "-shared", "-fPIC", "-O1", "-fno-builtin", "-s", *link, "-o", str(path), str(code)])


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except FileNotFoundError:
        raise StubsError(f"{command[0]} is not there; apt-get install binutils gcc libc6-dev") from None
    if done.returncode != 0:
        raise StubsError(f"{command[0]} ended with {done.returncode}: {done.stderr.strip()[-1000:]}")
    return done.stdout


def main() -> int:
    try:
        stubs = make(Path(sys.argv[1]))
    except (StubsError, IndexError) as problem:
        print(f"stubs: {problem if isinstance(problem, StubsError) else __doc__}", file=sys.stderr)
        return 1
    for stub in stubs:
        print(f"{stub.name}: {len(stub.functions)} functions that answer that there is no CUDA")
    return 0


if __name__ == "__main__":
    sys.exit(main())
