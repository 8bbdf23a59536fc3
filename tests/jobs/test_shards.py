"""Shards of pictures: the same whoever is interrupted, and what cannot be read is named."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

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
    return shards.write(shards.source_of(str(folder)), str(place), OPTIONS, lambda _: None)


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


def test_the_shards_of_a_plan_are_as_many_as_the_hosts_divide(folder: Path) -> None:
    source = shards.source_of(str(folder))
    for multiple in (1, 2, 3, 7):
        tasks = shards.plan(source, "out", shards.Options(shard_mb=0.004, multiple_of=multiple))
        of_train = [task for task in tasks if task.split == "train"]
        assert len(of_train) % multiple == 0
        assert sum(len(task.pictures) for task in tasks) == len(source.pictures)
        assert all(task.pictures for task in tasks)


def test_a_folder_without_classes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="is no folder"):
        shards.source_of(str(tmp_path / "none"))
    with pytest.raises(RequestError, match="has pictures of 0 classes"):
        shards.source_of(str(tmp_path))
