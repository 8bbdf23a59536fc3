"""What an image is made of, and what it is called by that."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docker.errors
import pytest

from contracts.errors import RequestError
from images import build, recipe
from images.recipe import BASE_VARIABLE, CPU_WHEELS, OUR_TAG, TORCH_BACKEND, Recipe
from launch.jobs import image_frameworks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {
        "one/Dockerfile": "FROM x\nCOPY smoke /opt/smoke\n",
        "one/requirements.txt": "a==1",
        "one/requirements-cpu.txt": "a==1\nb==2",
        "one/smoke.py": "one",
        "two/Dockerfile": "FROM x\n",
        "two/requirements.txt": "c==3",
        "two/smoke.py": "two",
        "smoke/__main__.py": "main",
        "one/build/make.py": "make",
        "one/build/notes.txt": "",
        "uv.txt": "uv==1",
        "README.md": "",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def read(
    folder: Path, framework: str = "one", platform: str = "cpu", base: str = "b@sha256:1", **environ: str
) -> Recipe:
    on = recipe.image_platform(platform)
    environ = {BASE_VARIABLE: base, **environ}
    return recipe.read(framework, on, environ, folder=folder, uv_lock=folder / "uv.txt")


def test_frameworks_are_folders_with_a_dockerfile_chosen_by_name_or_all_of_them(folder: Path) -> None:
    assert image_frameworks(folder) == recipe.chosen("--framework", "", folder) == ("one", "two")
    assert recipe.chosen("--framework", "two, one,two", folder) == ("two", "one")
    with pytest.raises(RequestError, match='--framework: "six" is not a framework; choose one of one, two'):
        recipe.chosen("--framework", "one,six", folder)
    with pytest.raises(RequestError, match='--platform: "gpu" is not a platform of images; choose one of'):
        recipe.image_platform("gpu")


def test_nothing_gets_into_an_image_but_its_files_and_the_programs_of_its_build(
    folder: Path,
) -> None:
    (folder / "one" / "secret.txt").touch()
    always = {"Dockerfile", "requirements.txt", "uv.txt", "smoke/__main__.py", "smoke/framework.py"}
    assert set(read(folder, "one").files) == always | {"build/make.py"}
    assert set(read(folder, "two").files) == always


def test_a_cpu_has_its_own_lock_where_there_is_one_and_else_the_tpus(folder: Path) -> None:
    locks = {
        (name, on): read(folder, name, on).files["requirements.txt"].decode()
        for name in ("one", "two")
        for on in ("cpu", "tpu")
    }
    assert locks == {
        ("one", "cpu"): "a==1\nb==2",
        ("one", "tpu"): "a==1",
        ("two", "cpu"): "c==3",
        ("two", "tpu"): "c==3",
    }


def test_the_tag_is_a_hash_of_everything_that_goes_in_and_of_nothing_else(folder: Path) -> None:
    before = read(folder)
    tags = {before.tag, read(folder, base="b@sha256:2").tag, read(folder, platform="tpu").tag}
    for name in (
        "one/Dockerfile",
        "one/requirements-cpu.txt",
        "one/smoke.py",
        "smoke/__main__.py",
        "one/build/make.py",
    ):
        path = folder / name
        kept = path.read_text()
        path.write_text(f"{kept}\n#")
        tags.add(read(folder).tag)
        path.write_text(kept)
    assert len(tags) == 8
    assert all(
        OUR_TAG.fullmatch(tag) for tag in (*tags, before.failed_tag, f"h:5000/p/r/one:{before.version}")
    )
    for somebodys in ("tpu-stack/one:keep", "tpu-stack-rehearsal-host:b072905a12b202d5", "a/one:cpu-123"):
        assert OUR_TAG.fullmatch(somebodys) is None
    (folder / "README.md").write_text("other")
    (folder / "one" / "requirements.txt").write_text("of the TPU only")
    assert read(folder).tag == before.tag
    # PyTorch's own wheels give another tag only to what has torch.
    (folder / "two" / "Dockerfile").write_text(f"FROM x\nARG {CPU_WHEELS}\n")
    for wheels in ({CPU_WHEELS: "https://i/cpu"}, {TORCH_BACKEND: "cpu"}):
        assert read(folder, "one", **wheels).tag == before.tag
        assert read(folder, "two", **wheels).tag != read(folder, "two").tag
        assert {*wheels.items()} <= {*read(folder, "two").arguments(wheels).items()}
    assert read(folder, "two", **{TORCH_BACKEND: "auto"}).tag == read(folder, "two").tag
    assert TORCH_BACKEND not in read(folder, "two").arguments({TORCH_BACKEND: "auto"})


# --- what Docker is given ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "index", ["https://user:word@index.example/simple", "https://word@i/simple", "https://i/simple?key=word"]
)
def test_an_index_with_a_password_is_refused_because_it_would_stay_in_the_image(
    folder: Path, index: str
) -> None:
    with pytest.raises(RequestError, match="UV_DEFAULT_INDEX holds a password") as caught:
        read(folder).arguments({"UV_DEFAULT_INDEX": index})
    assert "word@" not in str(caught.value)


def test_a_build_goes_the_way_this_machine_goes_and_is_told_nothing_else_of_it(folder: Path) -> None:
    environ = {
        "PIP_INDEX_URL": "https://i/simple",
        "HTTPS_PROXY": "http://p:1",
        "HOME": "/h",
        "HTTP_PROXY": "",
    }
    assert read(folder).arguments(environ) == {
        "PIP_INDEX_URL": "https://i/simple",
        "HTTPS_PROXY": "http://p:1",
        "BASE_IMAGE": "b@sha256:1",
    }


# --- the base -----------------------------------------------------------------------------------------------------

OLD, NEW = "sha256:" + "a" * 64, "sha256:" + "b" * 64


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "base.txt"
    path.write_text(f"python:3.12-slim-bookworm@{OLD}\n")
    return path


def registry(answer: Any) -> Any:
    """A Docker whose registry has that digest, or refuses."""

    def ask(tag: str) -> Any:
        assert tag == "python:3.12-slim-bookworm"
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(id=answer)

    return SimpleNamespace(images=SimpleNamespace(get_registry_data=ask))


def test_the_base_is_what_the_file_pins_unless_the_environment_names_another(file: Path) -> None:
    assert recipe.pinned_base(file)[0] == f"python:3.12-slim-bookworm@{OLD}"
    assert recipe.base_image({BASE_VARIABLE: "stand-in:1"}) == "stand-in:1"
    for text in ("python:3.12", "", f"python@{OLD}", f"python:3@{OLD}\nmore"):
        file.write_text(text)
        with pytest.raises(RequestError, match="is no base by tag and digest"):
            recipe.pinned_base(file)


def test_a_base_that_moved_is_written_down_and_old_and_new_are_shown(file: Path) -> None:
    said: list[str] = []
    assert build.renew_base(registry(NEW), said.append, file)
    assert file.read_text() == f"python:3.12-slim-bookworm@{NEW}\n"
    assert OLD in said[0]
    assert NEW in said[0]
    assert not build.renew_base(registry(NEW), said.append, file)
    assert [path.name for path in file.parent.iterdir()] == ["base.txt"]
    with pytest.raises(RequestError, match="asking the registry for python:3.12-slim-bookworm: no such host"):
        build.renew_base(registry(docker.errors.APIError("no such host")), print, file)
    assert NEW in file.read_text()
