"""tf_images in TensorFlow: a resumed run goes on with the losses of one that was never stopped, what is read is a
function of seed and step, and what a run leaves behind answers elsewhere."""

from __future__ import annotations

import base64
import dataclasses
import io
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from contracts.errors import RequestError
from jobs.runtime.prediction import answer
from jobs.runtime.process import Run
from jobs.tf_images import data, shards
from jobs.tf_images.config import Config
from jobs.tf_images.input_pipeline import Pictures
from jobs.tf_images.predict import load
from jobs.tf_images.train import train
from tests.jobs.resumed import go_back, lines_of

pytestmark = pytest.mark.usefixtures("group")
MakeRun = Callable[..., Run]
STEPS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 pictures of 12 × 12 with a bright square, to the left or to the right, in colour and grey, in two formats."""
    folder = tmp_path_factory.mktemp("pictures")
    drawn = np.random.default_rng(0)
    for number in range(300):
        label = ("left", "right")[number % 2]
        pixels = drawn.integers(0, 90, (12, 12, 3), np.uint8)
        row, column = drawn.integers(0, 8), drawn.integers(0, 3) + (6 if label == "right" else 0)
        pixels[row : row + 4, column : column + 4] += 120
        (folder / label).mkdir(exist_ok=True)
        kind = ("png", "jpg")[number % 3 == 0]
        image = Image.fromarray(pixels if number % 5 else pixels[..., 0])
        image.save(folder / label / f"{number}.{kind}", quality=95)
    return folder


@pytest.fixture(scope="module")
def place(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("shards") / "made"
    options = shards.Options(shard_mb=0.03, eval_fraction=0.2, processes=1)
    shards.write(shards.read_source(str(folder)), str(place), options, lambda _: None)
    return place


@pytest.fixture
def config(place: Path) -> Config:
    return Config(
        data=str(place),
        steps=STEPS,
        batch_per_core=16,
        width=8,
        dtype="float32",
        learning_rate=0.03,
        log_every=2,
        eval_every=8,
        checkpoint_every=4,
        keep_checkpoints=STEPS,
        steps_per_execution=2,
        shuffle=64,
        class_weights="balanced",
        tflite=True,
    )


def test_a_run_learns_goes_on_exactly_from_any_checkpoint_and_its_export_answers(
    make_run: MakeRun, config: Config, folder: Path
) -> None:
    whole = make_run("whole")
    final = train(whole, config)
    assert final["accuracy"] > 0.9
    undisturbed = lines_of(whole)
    assert len([line for line in undisturbed if "loss" in line]) == STEPS // 2
    run = make_run("resumed")
    go_back(whole, run, 4)
    assert train(run, config)["eval_loss"] == final["eval_loss"]
    assert lines_of(run) == undisturbed

    export = Path(whole.directory.path("export"))
    assert {path.name for path in export.iterdir()} == {
        "model.keras",
        "saved_model",
        "model.tflite",
        "pictures.json",
    }
    pictures = sorted(folder.glob("*/*"))[::30]
    predictor = load(export, Path())
    found = answer(predictor, [*map(str, pictures)])
    right = [each.best[0].text == path.parent.name for each, path in zip(found, pictures, strict=True)]
    assert sum(right) >= len(right) - 1
    with pytest.raises(RequestError, match="nothing.png: cannot be read as a picture"):
        answer(predictor, ["nothing.png"])

    samples = whole.directory.read_json("samples.json")
    assert samples is not None
    counts = np.array(samples["confusion"]["counts"])
    index = data.read_index(config.data)
    assert tuple(counts.sum(axis=1)) == index.counts("eval")
    assert np.trace(counts) / counts.sum() == pytest.approx(final["accuracy"])
    for each in samples["pictures"]:
        assert each["truth"] != each["prediction"]
        assert Image.open(io.BytesIO(base64.b64decode(each["png"]))).size == (12, 12)


def _pictures(place: Path, **changed: Any) -> Pictures:
    index = data.read_index(str(place))
    whole = {shard.name: shard.records for shard in index.shards}
    return dataclasses.replace(Pictures(index=index, counts=whole, size=12, seed=3, shuffle=50), **changed)


def _batches(pictures: Pictures, count: int, **said: int) -> list[tuple[np.ndarray, ...]]:
    wait_s = tf.Variable(0.0, dtype=tf.float64)
    found = pictures.train(
        **{"host": 0, "hosts": 1, "batch": 7, "done": 0, "steps": 1, **said}, wait_s=wait_s
    )
    return [tuple(part.numpy() for part in batch) for batch in found.take(count)]


@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_what_a_step_reads_is_a_function_of_seed_and_step_whatever_is_kept_in_memory(
    place: Path, hosts: int
) -> None:
    pictures = _pictures(place, shift=0.2, zoom=0.2, flip=True)
    through = _batches(pictures, 80, hosts=hosts)  # more than two epochs, read from the shards
    for steps in (1, 1000):  # the pictures of the second are kept
        for done in (1, 33, 34, 70):
            batches = _batches(pictures, 5, hosts=hosts, done=done, steps=steps)
            for batch, expected in zip(batches, through[done:], strict=False):
                for part, expected_part in zip(batch, expected, strict=True):
                    np.testing.assert_array_equal(part, expected_part)
    other = _batches(dataclasses.replace(pictures, seed=4), 1, hosts=hosts)
    assert not np.array_equal(other[0][0], through[0][0])


@pytest.mark.parametrize("steps", [1, 1000], ids=["streamed", "in memory"])
@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_every_record_is_read_once_an_epoch_by_one_host_whatever_their_number(
    place: Path, hosts: int, steps: int
) -> None:
    pictures = _pictures(place)
    index = pictures.index
    assert len(index.split_shards("train")) % 2 == 0  # so two hosts read whole shards, and three take turns
    assert len(index.split_shards("train")) % 3
    seen = []
    for host in range(hosts):
        part = data.choose_part(index.split_shards("train"), host=host, hosts=hosts)
        records = pictures.records(part)
        batches = _batches(pictures, records, host=host, hosts=hosts, batch=1, steps=steps)
        seen += [batch[0].tobytes() for batch in batches]
    assert len(seen) == len({*seen}) == sum(index.counts("train"))


def test_a_damaged_shard_is_named_with_its_record_and_refused_or_left_out(
    place: Path, config: Config, make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(place, broken)
    shard = sorted(broken.glob("train-*"))[1]
    content = bytearray(shard.read_bytes())
    first = struct.unpack("<Q", content[:8])[0] + 16
    content[first + 40] ^= 1
    shard.write_bytes(content)
    damaged = dataclasses.replace(config, data=str(broken), steps=8, tflite=False)
    where = rf"{shard.name}: record 1 \(byte {first}\) is damaged: its data fails its checksum"
    with pytest.raises(RequestError, match=where):
        train(make_run("refused"), damaged)
    train(make_run("skipped"), dataclasses.replace(damaged, damaged="skip"))
    assert "left out from there on" in capsys.readouterr().out

    os.truncate(shard, first + 5)
    with pytest.raises(
        RequestError, match=rf"{shard.name}: has {first + 5:,} bytes .* record 1 .* is cut off"
    ):
        data.read_index(str(broken))
