"""Stand-ins for NVIDIA's libraries: which there are, what is in each, and what they answer."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from images.cuda_free import stubs
from images.cuda_free.stubs import Library, Stub, StubsError

TRY = """
import ctypes
library = ctypes.CDLL({path!r})
count = ctypes.c_int(7)
print(library.cudaGetDeviceCount(ctypes.byref(count)), count.value)
print(library.__cudaRegisterFatBinary(None), library.cudaMalloc(None, 1), library.cudaMalloc(None, 1))
library.cudaGetErrorString.restype = ctypes.c_char_p
print(library.cudaGetErrorString(100).decode())
"""
CUDART = Stub(
    name="libcudart.so.12",
    functions=dict.fromkeys(
        ("cudaGetDeviceCount", "cudaMalloc", "cudaGetErrorString", "__cudaRegisterFatBinary"),
        "libcudart.so.12",
    ),
)
needs_a_compiler = pytest.mark.skipif(
    shutil.which("gcc") is None or shutil.which("nm") is None,
    reason="makes a library: needs gcc and binutils",
)


def library(needs: str = "", asks: str = "", owner: str = "") -> Library:
    """asks: words, function@version or function."""
    pairs = [word.partition("@") for word in asks.split()]
    return Library(
        needs=frozenset(needs.split()),
        owners={version: owner for _, _, version in pairs if version},
        asks=frozenset((name, version) for name, _, version in pairs),
    )


VERSIONED = library("libcupti.so.12 libcudart.so.12", "cudaFree@V1", owner="libcudart.so.12")
BARE = library("libcusparse.so.12 libcusparseLt.so.0 libcufile.so.0", "cusparseLtInit cuFileRead")
SPARSE = {
    "libcusparse.so.12": {},
    "libcusparseLt.so.0": {"cusparseLtInit": ""},
    "libcufile.so.0": {"cuFileRead": ""},
}
CUBLAS, CUSOLVER = library("libcublas.so.12"), library("libcusolver.so.11")
OTHERS = library("libm.so.6 libgfortran.so.5 libcudnn.so.9")


@pytest.mark.parametrize(
    ("files", "made"),
    [
        # A function is made under its version in the library that owns the version.
        ({"torch.so": VERSIONED}, {"libcudart.so.12": {"cudaFree": "V1"}, "libcupti.so.12": {}}),
        # Without a version it goes to the library whose name fits best.
        ({"torch.so": BARE}, SPARSE),
        # Only what loading torch reaches gets stand-ins.
        ({"torch.so": library("lib.so"), "lib.so": CUBLAS, "linalg.so": CUSOLVER}, {"libcublas.so.12": {}}),
        # No library of the system and none that is there is stood in for.
        ({"torch.so": OTHERS, "libcudnn.so.9": library()}, {}),
    ],
)
def test_stand_ins_have_what_loading_torch_asks_for(
    files: dict[str, Library], made: dict[str, dict[str, str]]
) -> None:
    assert {stub.name: stub.functions for stub in stubs.plan(files, ["torch.so"])} == made


def test_a_torch_that_is_not_as_expected_is_an_error_and_no_broken_image(tmp_path: Path) -> None:
    torch = library("libcudart.so.12", "ncclSend")
    with pytest.raises(StubsError, match=r"ncclSend, which none of libcudart\.so\.12"):
        stubs.plan({"torch.so": torch}, ["torch.so"])
    with pytest.raises(StubsError, match="is not where torch is"):
        stubs.make(tmp_path)
    for name in ("torch/_C.x.so", "torch/lib/libtorch_global_deps.so", "torch/lib/libtorch_python.so"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "nvidia").mkdir()
    with pytest.raises(StubsError, match="overrides.in"):
        stubs.make(tmp_path / "torch")


@needs_a_compiler
def test_stand_ins_answer_that_there_is_no_device_and_print_nothing(tmp_path: Path) -> None:
    made = tmp_path / CUDART.name
    stubs.compile_stub(CUDART, made)
    done = subprocess.run(
        [sys.executable, "-c", TRY.format(path=str(made))],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[:2] == ["0 0", "0 100 100"]
    assert "this image has no CUDA" in done.stdout.splitlines()[2]
    assert done.stderr == ""
    listed = subprocess.run(
        ["nm", "--dynamic", "--defined-only", "--with-symbol-versions", str(made)],
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    assert {f"{name}@@libcudart.so.12" for name in CUDART.functions} <= set(listed.split())
