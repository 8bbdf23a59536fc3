"""Shards of pictures: the same whoever is interrupted, and what cannot be read is named."""

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms

from contracts.errors import RequestError
from jobs.tf_images import data, shards

OPTIONS = shards.Options(shard_mb=0.004, processes=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """60 pictures in two classes, and two files that are none."""
    for number in range(60):
        (tmp_path / "in" / f"class-{number % 2}").mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 255, (9, 9, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / "in" / f"class-{number % 2}" / f"{number}.png")
    (tmp_path / "in" / "class-0" / "notes.txt").write_text("no picture")
    torn = (tmp_path / "in" / "class-1" / "1.png").read_bytes()[:90]
    (tmp_path / "in" / "class-1" / "torn.png").write_bytes(torn)
    return tmp_path / "in"


def made(folder: Path, place: Path) -> dict[str, Any]:
    return shards.write(shards.read_source(str(folder)), str(place), OPTIONS, lambda _: None)


def test_what_was_interrupted_goes_on_to_the_same_shards(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = made(folder, tmp_path / "whole")
    assert len(whole["shards"]) > 3
    write = shards._write_shard
    written: list[str] = []

    def interrupted(task: Any) -> dict[str, Any]:
        if len(written) == 2:
            (tmp_path / "parts" / f".{task.name}.0123.part").write_bytes(b"half")
            raise KeyboardInterrupt
        written.append(task.name)
        return write(task)

    monkeypatch.setattr(shards, "_write_shard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made(folder, tmp_path / "parts")
    with pytest.raises(RequestError, match="has no index.json"):
        data.read_index(str(tmp_path / "parts"))

    monkeypatch.setattr(shards, "_write_shard", write)
    assert made(folder, tmp_path / "parts") == whole
    when = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "parts").iterdir()}
    later = [when[shard["name"]] for shard in whole["shards"] if shard["name"] not in written]
    assert max(when[name] for name in written) < min(later)  # those were not made again
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "parts" / path.name).read_bytes() == path.read_bytes()
    assert len([*(tmp_path / "parts").iterdir()]) == len(whole["shards"]) + 1

    with pytest.raises(RequestError, match="has shards of other pictures or options already"):
        (folder / "class-0" / "0.png").unlink()
        made(folder, tmp_path / "parts")


def test_what_is_no_picture_is_left_out_and_named(folder: Path, tmp_path: Path) -> None:
    made(folder, tmp_path / "out")
    left_out = json.loads((tmp_path / "out" / "index.json").read_text())["left_out"]
    assert sorted(Path(path).name for path, _ in left_out) == ["notes.txt", "torn.png"]
    index = data.read_index(str(tmp_path / "out"))
    assert (sum(index.counts("train")) + sum(index.counts("eval")), index.size, index.channels) == (60, 9, 3)
    assert set(data.verified(index, "refuse").values()) == {shard.records for shard in index.shards}


@pytest.mark.parametrize(
    ("mode", "kind", "becomes"),
    [
        ("RGB", "JPEG", "JPEG"),
        ("L", "PNG", "PNG"),
        ("CMYK", "JPEG", "JPEG"),
        ("P", "GIF", "PNG"),
        ("RGBA", "PNG", "PNG"),
    ],
)
def test_a_picture_of_any_kind_becomes_one_that_tensorflow_decodes(
    mode: str, kind: str, becomes: str
) -> None:
    file = io.BytesIO()
    Image.new("RGB", (20, 10), (200, 30, 30)).convert(mode).save(file, kind)
    data, side, channels = shards.encoded(file.getvalue(), 5)
    with Image.open(io.BytesIO(data)) as found:
        assert (found.format, found.size, side) == (becomes, (10, 5), None)
        assert found.mode == ("L" if mode == "L" else "RGB")
        assert channels == len(found.getbands())
    if mode in ("RGB", "L"):
        assert shards.encoded(file.getvalue())[0] == file.getvalue()  # as it is


def test_values_of_no_known_depth_are_left_out_with_what_they_are() -> None:
    floats = [[-1.0, 5.0]], [[0.0, 1.02]], [[0.0, 256.5]]
    for values in (*(np.array(values, np.float32) for values in floats), np.array([[0, 70_000]], np.int32)):
        file = io.BytesIO()
        Image.fromarray(values).save(file, "TIFF")
        with pytest.raises(
            ValueError, match=r"its values, -?\d to [\w.]+, are of no depth that is known; bring them"
        ):
            shards.encoded(file.getvalue())


def test_hidden_folders_and_those_without_a_picture_are_no_classes(folder: Path, tmp_path: Path) -> None:
    for name in (".ipynb_checkpoints", "empty", "notes"):
        (folder / name).mkdir()
    (folder / ".ipynb_checkpoints" / "0.png").write_bytes((folder / "class-0" / "0.png").read_bytes())
    (folder / "notes" / "a.txt").write_text("no picture")
    (folder / "list.csv").write_text("no picture")
    source = shards.read_source(str(folder))
    assert source.labels == ("class-0", "class-1")
    assert source.skipped == (
        ".ipynb_checkpoints: hidden",
        "empty: no picture is in it",
        "list.csv: in no class's folder",
        "notes: no picture is in it",
    )
    for name in ("train", "val", "test"):
        shutil.copytree(folder / "class-0", tmp_path / "split" / name / "a")
        shutil.copytree(folder / "class-1", tmp_path / "split" / name / "b")
    assert shards.read_source(str(tmp_path / "split")).skipped == ("val: beside train and test",)


def test_what_a_system_leaves_is_neither_a_class_nor_a_picture(folder: Path) -> None:
    picture = folder / "class-0" / "0.png"
    whole = shards.read_source(str(folder))
    for name in ("__MACOSX", "@eaDir", "class-0/@eaDir/0.png", "$RECYCLE.BIN"):
        (folder / name).mkdir(parents=True)
        (folder / name / "small.png").write_bytes(picture.read_bytes())
    (folder / "class-0" / "up").symlink_to("..")
    (folder / "class-0" / "itself").symlink_to(".")
    source = shards.read_source(str(folder))
    assert (source.labels, len(source.pictures)) == (whole.labels, len(whole.pictures))
    assert source.skipped == tuple(
        f"{name}: left by a system" for name in ("$RECYCLE.BIN", "@eaDir", "__MACOSX")
    )


def test_a_broken_link_and_a_pipe_are_left_out_and_named(folder: Path, tmp_path: Path) -> None:
    (folder / "class-0" / "gone.png").symlink_to("nothing.png")
    (folder / "class-0" / "x").symlink_to("x")
    os.mkfifo(folder / "class-0" / ".." / "class-1" / "pipe")
    left_out = made(folder, tmp_path / "out")["left_out"]
    names = sorted(Path(path).name for path, reason in left_out if "no regular file" in reason)
    assert names == ["gone.png", "pipe", "x"]


@pytest.mark.parametrize("names", [("Train", "Test"), ("training", "testing"), ("TRAIN", "dev")])
def test_folders_of_splits_are_no_classes_however_they_are_written(
    folder: Path, tmp_path: Path, names: tuple[str, str]
) -> None:
    for name in names:
        shutil.copytree(folder, tmp_path / "split" / name)
    source = shards.read_source(str(tmp_path / "split"))
    assert source.labels == ("class-0", "class-1")
    assert {picture.split for picture in source.pictures} == {"train", "eval"}
    (tmp_path / "split" / names[0] / "class-1").rename(tmp_path / "split" / names[0] / "class-2")
    with pytest.raises(RequestError, match="class-1: only among the pictures that are held out"):
        shards.read_source(str(tmp_path / "split"))


def test_the_shards_of_a_plan_are_as_many_as_the_hosts_divide(folder: Path) -> None:
    source = shards.read_source(str(folder))
    for multiple in (1, 2, 3, 7):
        tasks = shards.plan(source, "out", shards.Options(shard_mb=0.004, multiple_of=multiple))
        of_train = [task for task in tasks if task.split == "train"]
        assert len(of_train) % multiple == 0
        assert sum(len(task.pictures) for task in tasks) == len(source.pictures)
        assert all(task.pictures for task in tasks)


def test_a_folder_without_classes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="is no folder"):
        shards.read_source(str(tmp_path / "none"))
    with pytest.raises(RequestError, match="has pictures of 0 classes"):
        shards.read_source(str(tmp_path))


SHADES = np.arange(256, dtype=np.uint8).reshape(16, 16)
KINDS = (
    "PNG",
    "TIFF",
    "JPEG",
    "JPEG2000",
    "PPM",
    "PFM",
    "BMP",
    "TGA",
    "GIF",
    "WEBP",
    "ICO",
    "PCX",
    "SGI",
    "DDS",
)
WRITTEN_IN_8_BITS = ("GIF", "WEBP", "ICO")
TOLERANCES = {"JPEG": 6, "JPEG2000": 6, "WEBP": 12, "GIF": 8}


def of_mode(mode: str) -> list[Any]:
    """The shades in a mode, in each of the depths that it may stand for."""
    grey = Image.fromarray(SHADES)
    match mode:
        case "I;16" | "I;16B" | "I;16L" | "I;16N":
            order = ">u2" if mode == "I;16B" else "<u2"
            return [Image.frombytes(mode, (16, 16), (SHADES.astype(order) * 257).tobytes())]
        case "I":
            return [Image.fromarray(SHADES.astype(np.int32) * 257)]
        case "F":
            return [Image.fromarray(SHADES.astype(np.float32) * scale) for scale in (1 / 255, 1.0, 257.0)]
        case "1":
            return [grey.point(lambda shade: 255 * (shade > 127), "1")]
        case "P" | "PA":
            return [grey.convert("RGB").quantize(256, dither=Image.Dither.NONE).convert(mode)]
        case "LAB":
            profiles = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
            return [ImageCms.profileToProfile(grey.convert("RGB"), *profiles, outputMode="LAB")]
        case "La" | "RGBa":
            return [grey.convert(mode.upper()).convert(mode)]
        case _:
            return [grey.convert("RGB").convert(mode)]


def pictures() -> list[tuple[str, bytes]]:
    found = []
    for mode in Image.MODES:
        for image in of_mode(mode):
            for kind in KINDS:
                if mode[0] in "IF" and kind in WRITTEN_IN_8_BITS:
                    continue
                file = io.BytesIO()
                try:
                    image.save(file, kind, **({"lossless": True} if kind == "WEBP" else {}))
                    Image.open(io.BytesIO(file.getvalue())).load()
                except Exception:  # Pillow has no such pictures
                    continue
                found.append((f"{mode} in {kind}", file.getvalue()))
    return found


def test_of_every_mode_and_depth_that_pillow_has_all_shades_are_kept() -> None:
    several = pictures()
    assert len(several) >= 50
    wrong = []
    for name, content in several:
        mode, kind = name.split(" in ")
        with Image.open(io.BytesIO(shards.encoded(content)[0])) as found:
            shades = np.asarray(found.convert("L")).astype(int)
            expected = np.where(SHADES > 127, 255, 0) if mode == "1" else SHADES.astype(int)
            error = np.abs(shades - expected).max() if shades.shape == expected.shape else None
            if found.mode not in ("L", "RGB") or error is None or error > TOLERANCES.get(kind, 2):
                wrong.append((name, found.mode, error))
    assert not wrong, f"{len(wrong)} of {len(several)}"
