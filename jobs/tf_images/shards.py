"""Makes shards of pictures: `python -m jobs.tf_images.shards FOLDER DESTINATION`, a folder or gs://….

FOLDER has a folder of pictures for each class, or such folders under train/ and under test/ (or val/, validation/,
eval/), or MNIST's four idx files. Written are TFRecord files, and index.json at the end. A shard is whole once a .json
lies beside it, so a second call goes on where the first one was ended. Of each process one picture is in memory at a
time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import io
import itertools
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from contracts.aliases import Say
from contracts.atomic import SUFFIX, atomic_path, remove
from contracts.errors import WRONG_REQUEST, RequestError
from contracts.files import is_url, unwritable
from jobs.runtime.storage.bucket_files import files_of, open_url, retry
from jobs.runtime.storage.cache import build_once
from jobs.runtime.storage.data_files import listing
from jobs.tf_images.config import Config
from jobs.tf_images.data import DIGITS, FOOTER, HEADER, INDEX, INDEX_VERSION, SPLITS, masked

TRAIN_NAMES = ("train", "training")
EVAL_NAMES = ("test", "testing", "val", "valid", "validation", "eval", "dev")
"""Of folders with a split, in upper and lower case; of several the first one is taken."""
NO_CLASSES = (
    "__macosx",
    "@eadir",
    "@recycle",
    "#recycle",
    "$recycle.bin",
    "system volume information",
    "lost+found",
)
"""Folders that systems leave in others, some of them with small or deleted pictures."""
IDX = {"train": "train", "t10k": "eval"}
JPEG_QUALITY = 95
MOST_TEXT_BYTES = 1 << 28
"""Of what else stands in a PNG."""
MOST_SHOWN = 10
PNG_DEPTH, TIFF_BITS = 24, 258
"""The byte of a PNG, and the tag of a TIFF, that hold the bits of each colour."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How shards are made."""

    shard_mb: float = 200.0
    """Size of a shard, about."""
    multiple_of: int = 1
    """Make a number of shards that this divides: of hosts, which then read whole shards each."""
    eval_fraction: float = 0.1
    """Share of the pictures that is held out, where FOLDER does not say which."""
    size: int = 0
    """Shrink pictures so that their shorter side is this long; 0: they stay as they are."""
    processes: int | None = None
    """How many work at once (default: all processors)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Picture:
    """One picture of a source. content: the path of a file, or the picture itself, (height, width) of grey values."""

    key: str
    content: str | np.ndarray[Any, Any]
    label: int
    split: str | None
    size_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """Where pictures come from. labels: of the classes, by index. skipped: folders that are not classes, and why."""

    labels: tuple[str, ...]
    pictures: Sequence[Picture]
    skipped: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Task:
    """One shard to write; plan: what all shards are made from and how."""

    name: str
    split: str
    destination: str
    plan: str
    classes: int
    size: int
    pictures: tuple[Picture, ...]


def read_source(folder: str) -> Source:
    """What a folder has.

    Raises:
        RequestError: it is none, or has no pictures in two classes at least.
    """
    root = Path(folder)
    if not root.is_dir():
        raise RequestError(
            f"FOLDER {folder}: is no folder; name one that has a folder of pictures for each class"
        )
    if any(root.glob("train-images*idx3-ubyte*")):
        return _idx(root)
    folders = {path.name.lower(): path for path in sorted(root.iterdir()) if path.is_dir()}
    train = next((folders[name] for name in TRAIN_NAMES if name in folders), None)
    held_out = next((folders[name] for name in EVAL_NAMES if name in folders), None)
    roots: dict[str | None, Path] = {None: root}
    labels: list[str] = []
    skipped: list[str] = []
    if held_out is not None and train is not None:
        roots = {"train": train, "eval": held_out}
        other_folders = {path.name for path in root.iterdir()} - {train.name, held_out.name}
        skipped += [f"{name}: beside {train.name} and {held_out.name}" for name in sorted(other_folders)]
    is_folder = {path.name: path.is_dir() for folder_path in roots.values() for path in folder_path.iterdir()}
    for name in sorted(is_folder):
        if reason := _reason_to_skip(name):
            skipped.append(f"{name}: {reason}")
        elif any(
            _is_picture(entry.path) for folder_path in roots.values() for entry in _files(folder_path / name)
        ):
            labels.append(name)
        else:
            skipped.append(
                f"{name}: no picture is in it" if is_folder[name] else f"{name}: in no class's folder"
            )
    pictures = [
        Picture(
            key=entry.path, content=entry.path, label=label, split=split, size_bytes=_size_bytes(entry.path)
        )
        for split, folder_path in roots.items()
        for label, name in enumerate(labels)
        for entry in _files(folder_path / name)
    ]
    classes = {picture.label for picture in pictures}
    if len(classes) < 2:
        raise RequestError(
            f"FOLDER {folder}: has pictures of {len(classes)} classes; put those of each class "
            "into a folder of its own" + "".join(f"; {reason}" for reason in skipped[:MOST_SHOWN])
        )
    learned = {picture.label for picture in pictures if picture.split != "eval"}
    unknown = [name for label, name in enumerate(labels) if label not in learned]
    if unknown:
        raise RequestError(
            f"FOLDER {folder}: {', '.join(unknown)}: only among the pictures that are held out; bring some to learn "
            "from, or remove the folder"
        )
    return Source(labels=tuple(labels), pictures=pictures, skipped=tuple(skipped))


def _reason_to_skip(name: str) -> str | None:
    if name.startswith("."):
        return "hidden"
    return "left by a system" if name.lower() in NO_CLASSES else None


def _files(folder: Path, above: frozenset[Path] = frozenset()) -> Iterator[os.DirEntry[str]]:
    """All files under a class's folder, but for what is skipped. above: folders that a link does not lead back to."""
    if not folder.is_dir():
        return
    real = Path(os.path.realpath(folder))
    above |= {real, *real.parents}
    with os.scandir(folder) as entries:
        for entry in entries:
            if _reason_to_skip(entry.name):
                continue
            if not os.path.isdir(entry.path):
                yield entry
            elif Path(os.path.realpath(entry.path)) not in above:
                yield from _files(Path(entry.path), above)


def _size_bytes(path: str) -> int:
    return os.path.getsize(path) if os.path.isfile(path) else 0


def _is_picture(path: str) -> bool:
    from PIL import Image, UnidentifiedImageError

    if not os.path.isfile(path):
        return False
    try:
        Image.open(path).close()
    except (UnidentifiedImageError, OSError):
        return False
    except Image.DecompressionBombError:
        return True
    return True


def _idx(root: Path) -> Source:
    """MNIST's files, and of those who followed it: yann.lecun.com/exdb/mnist."""
    pictures, classes = [], 0
    for prefix, split in IDX.items():
        arrays = []
        for kind in ("images*idx3", "labels*idx1"):
            path = next(iter(sorted(root.glob(f"{prefix}-{kind}-ubyte*"))), None)
            if path is None:
                raise RequestError(f"FOLDER {root}: has no {prefix}-{kind}-ubyte; bring all four idx files")
            try:
                data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
                shape = np.frombuffer(data, ">i4", data[3], 4)
                arrays.append(np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape))
            except (OSError, ValueError, IndexError, EOFError) as error:
                raise RequestError(f"{path}: is no idx file, or damaged ({error}); bring it again") from None
        classes = max(classes, int(arrays[1].max()) + 1)
        pictures += [
            Picture(
                key=f"{prefix}-{number}", content=image, label=int(label), split=split, size_bytes=image.size
            )
            for number, (image, label) in enumerate(zip(*arrays, strict=True))
        ]
    return Source(labels=tuple(map(str, range(classes))), pictures=pictures)


def shards_folder(config: Config, cache_dir: Path) -> str:
    """The folder of the shards; those of digits are made where they are missing."""
    if config.data != DIGITS:
        return config.data.rstrip("/")
    place = cache_dir / "tf_images" / f"digits-{INDEX_VERSION}"

    def build(fresh: Path) -> None:
        write(digits(), str(fresh), Options(eval_fraction=0.2, multiple_of=4, processes=1), print)

    build_once(place, build)
    return str(place)


def digits() -> Source:
    """scikit-learn's handwritten digits: 1,797 of 8 × 8, in 17 shades of grey."""
    from sklearn.datasets import load_digits

    dataset = load_digits()
    images = np.round(dataset.images * (255 / 16)).astype(np.uint8)
    return Source(
        labels=tuple(map(str, dataset.target_names)),
        pictures=[
            Picture(key=f"digit-{number}", content=image, label=int(label), split=None, size_bytes=image.size)
            for number, (image, label) in enumerate(zip(images, dataset.target, strict=True))
        ],
    )


def write(source: Source, destination: str, options: Options, say: Say) -> dict[str, Any]:
    """Write all shards that are missing, then the index, which is returned.

    Raises:
        RequestError: the destination has other shards already, or no picture can be read.
    """
    if problem := unwritable(destination):
        raise RequestError(f"DESTINATION {destination}: {problem}")
    tasks = plan(source, destination, options)
    plan_digest = tasks[0].plan
    file_system, folder = open_url(destination, option="DESTINATION")
    existing: dict[str, Any] = _json(file_system, f"{folder}/{INDEX}") or {}
    if existing and existing.get("plan") != plan_digest:
        raise RequestError(
            f"DESTINATION {destination}: has shards of other pictures or options already; name another folder"
        )
    if existing:
        say(f"{destination}: all {len(tasks)} shards are there")
        return existing
    file_system.makedirs(folder, exist_ok=True)
    for left_behind in () if is_url(destination) else Path(destination).glob(f".*.tfrecord.*{SUFFIX}"):
        remove(left_behind)  # by a call that was killed
    parts = {task.name: _json(file_system, f"{folder}/{task.name}.json") for task in tasks}
    left = [task for task in tasks if (parts[task.name] or {}).get("plan") != plan_digest]
    if len(left) < len(tasks):
        say(f"{len(tasks) - len(left)} of {len(tasks)} shards are there already")
    processes = min(options.processes or len(os.sched_getaffinity(0)), len(left) or 1)
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        # One at a time: a pool is a thread of its own, and small sets need none.
        done = map(_write_shard, left) if processes == 1 else pool.map(_write_shard, left)
        for number, (task, part) in enumerate(zip(left, done, strict=True), len(tasks) - len(left) + 1):
            parts[task.name] = part
            say(f"{task.name}: {sum(part['shard']['counts']):,} pictures ({number} of {len(tasks)} shards)")
    finished = [part for part in parts.values() if part is not None]
    sides = {part["side"] for part in finished if sum(part["shard"]["counts"])}
    left_out = [entry for part in finished for entry in part["left_out"]]
    index = {
        "version": INDEX_VERSION,
        "plan": plan_digest,
        "labels": source.labels,
        "size": sides.pop() if len(sides) == 1 else None,
        "channels": max(part["channels"] for part in finished),
        "shards": [part["shard"] for part in finished],
        "left_out": left_out,
    }
    for path, reason in left_out[:MOST_SHOWN]:
        say(f"left out: {path}: {reason}")
    if left_out:
        say(f"{len(left_out):,} of {len(source.pictures):,} files were left out; {INDEX} names them all")
    if len(left_out) == len(source.pictures):
        raise RequestError(f"FOLDER: none of its {len(left_out):,} files is a picture that Pillow can read")
    file_system.pipe_file(f"{folder}/{INDEX}", json.dumps(index, indent=1).encode())
    for task in tasks:
        file_system.rm_file(f"{folder}/{task.name}.json")
    return index


def plan(source: Source, destination: str, options: Options) -> list[_Task]:
    """Which picture goes into which shard: mixed, by a hash of their names, as shards are read from front to back."""

    def mixed(picture: Picture) -> bytes:
        return hashlib.sha256(
            os.path.basename(picture.key).encode(errors="replace") + b"%d" % picture.label
        ).digest()

    bound = options.eval_fraction * 2**32
    by_split: dict[str, list[Picture]] = {split: [] for split in SPLITS}
    digest = hashlib.sha256(json.dumps([source.labels, dataclasses.asdict(options)]).encode())
    for picture in sorted(source.pictures, key=lambda picture: (mixed(picture), picture.key)):
        is_held_out = int.from_bytes(mixed(picture)[-4:]) < bound
        by_split[picture.split or ("eval" if is_held_out else "train")].append(picture)
        digest.update(f"{picture.key}\0{picture.label}\0{picture.size_bytes}\n".encode(errors="replace"))
    tasks = []
    for split, pictures in by_split.items():
        size_limit = options.size**2 // 2 or math.inf
        total = sum(min(picture.size_bytes, size_limit) for picture in pictures)
        count = max(1, round(total / (options.shard_mb * 1e6))) if pictures else 0
        count = min(-(-count // options.multiple_of) * options.multiple_of, len(pictures))
        ends = [len(pictures) * number // count for number in range(count + 1)] if count else []
        tasks += [
            _Task(
                name=f"{split}-{number:05}.tfrecord",
                split=split,
                destination=destination.rstrip("/"),
                plan=digest.hexdigest(),
                classes=len(source.labels),
                size=options.size,
                pictures=tuple(pictures[begin:end]),
            )
            for number, (begin, end) in enumerate(itertools.pairwise(ends))
        ]
    return tasks


def _write_shard(task: _Task) -> dict[str, Any]:
    """Write one shard, and its entry of the index beside it."""
    from google_crc32c import value
    from PIL import Image, PngImagePlugin

    # Pillow's limits are for pictures of strangers.
    Image.MAX_IMAGE_PIXELS, PngImagePlugin.MAX_TEXT_CHUNK = None, MOST_TEXT_BYTES
    counts, sides, channels = [0] * task.classes, set(), 1
    left_out: list[list[str]] = []
    sha256 = hashlib.sha256()
    to = f"{task.destination}/{task.name}"
    with _replacing(to) as path, open(path, "wb") as file:
        for picture in task.pictures:
            try:
                data, side, own_channels = encoded(picture.content, task.size)
            except Exception as error:  # Pillow raises many kinds for what is no picture; all are reported
                reason = str(error).partition(" <_io.")[0][:200]  # what follows is a place in memory
                left_out.append([picture.key, f"{type(error).__name__}: {reason}"])
                continue
            record = example(data, picture.label)
            head = HEADER.pack(len(record), 0)[:8]
            header = (
                HEADER.pack(len(record), masked(value(head))) + record + FOOTER.pack(masked(value(record)))
            )
            file.write(header)
            sha256.update(header)
            counts[picture.label] += 1
            sides.add(side)
            channels = max(channels, own_channels)
        part = {
            "plan": task.plan,
            "shard": {
                "name": task.name,
                "split": task.split,
                "size_bytes": file.tell(),
                "sha256": sha256.hexdigest(),
                "counts": counts,
            },
            "side": sides.pop() if len(sides) == 1 else None,
            "channels": channels,
            "left_out": left_out,
        }
    retry(lambda: files_of(to).write(f"{to}.json", json.dumps(part).encode()), what=task.name)
    return part


@contextlib.contextmanager
def _replacing(to: str) -> Iterator[str]:
    """A path for what becomes the file `to` once it is whole."""
    if not is_url(to):
        with atomic_path(to) as path:
            yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "shard")
        yield path
        retry(lambda: files_of(to).put_file(path, to), what=to)


def encoded(source: str | bytes | np.ndarray[Any, Any], size: int = 0) -> tuple[bytes, int | None, int]:
    """A picture as TensorFlow decodes it, JPEG or PNG, grey or RGB; its side where it is a square; its channels.

    What is so already stays as it is. size: as in Options.

    Raises:
        Exception: Pillow cannot read it.
    """
    from PIL import Image, ImageOps

    if isinstance(source, np.ndarray):
        content, opened = None, Image.fromarray(source)
    else:
        if isinstance(source, str) and not os.path.isfile(source):
            raise ValueError("a link to nothing, or no regular file")
        content = Path(source).read_bytes() if isinstance(source, str) else source
        opened = Image.open(io.BytesIO(content))
    with opened as image:
        image.load()
        kind, upright = image.format, ImageOps.exif_transpose(image)
        is_turned = upright.size != image.size or image.getexif().get(0x0112, 1) != 1
        fitting = _to_8_bits(upright, _whites(image))
        if size and min(fitting.size) > size:
            share = size / min(fitting.size)
            width, height = (max(1, round(side * share)) for side in fitting.size)
            fitting = fitting.resize((width, height), Image.Resampling.BICUBIC)
        has_8_bits = kind == "JPEG" or (kind == "PNG" and content is not None and content[PNG_DEPTH] == 8)
        if content is None or not has_8_bits or fitting is not upright or is_turned:
            file = io.BytesIO()
            if kind == "JPEG":
                fitting.save(file, "JPEG", quality=JPEG_QUALITY)
            else:
                fitting.save(file, "PNG")
            content = file.getvalue()
        side = fitting.size[0] if fitting.size[0] == fitting.size[1] else None
        return content, side, 1 if fitting.mode == "L" else 3


def _whites(image: Any) -> Sequence[float]:
    """The values of which one may stand for white in a grey picture of more than 8 bits: the file or its format says
    which, or the least that all its values fit in is taken."""
    if image.mode.startswith("I;") and image.format == "TIFF":
        return (2 ** int(image.tag_v2.get(TIFF_BITS, (16,))[0]) - 1,)
    if image.mode.startswith("I;") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return (65535,)
    return (1, 255, 65535) if image.mode == "F" else (255, 65535)


def _to_8_bits(image: Any, whites: Sequence[float]) -> Any:
    """A picture in 8 bits of grey ("L") or of each colour ("RGB"); of more bits, or of floats, all shades count.

    Raises:
        ValueError: its values are of no depth that is known.
    """
    from PIL import Image, ImageCms

    if image.mode in ("L", "RGB"):
        return image
    if image.mode == "LAB":
        profiles = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        return ImageCms.profileToProfile(image, *profiles, outputMode="RGB")
    if image.mode in ("La", "RGBa"):  # a colour times its opacity
        return _to_8_bits(image.convert(image.mode.upper()), whites)
    if image.mode[0] not in "IF":
        return image.convert("L" if image.mode in ("1", "LA") else "RGB")
    values_HW = np.asarray(image)
    lowest, highest = float(values_HW.min()), float(values_HW.max())
    white = next((white for white in whites if lowest >= 0 and highest <= white), None)
    # Values just above a depth are of that depth, such as 1.02 where pictures were resized, and not all but black.
    if white is None or (highest < white / 100 and any(lower < highest for lower in whites)):
        raise ValueError(
            f"its values, {lowest:g} to {highest:g}, are of no depth that is known; bring them to 0 to 1, 255 or 65535"
        )
    return Image.fromarray(np.round(values_HW * (255 / white)).astype(np.uint8))


def example(data: bytes, label: int) -> bytes:
    """A tf.train.Example, in protocol buffers' wire format (tensorflow/core/example/{example,feature}.proto)."""
    features = b"".join(
        _field(1, _field(1, name) + _field(2, feature))
        for name, feature in (
            (b"image/encoded", _field(1, _field(1, data))),
            (b"image/class/label", _field(3, _field(1, _varint(label)))),
        )
    )
    return _field(1, features)


def _field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*data, number])


def _json(file_system: Any, path: str) -> dict[str, Any] | None:
    try:
        content = json.loads(file_system.cat_file(path))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def main(
    folder: tyro.conf.Positional[str],
    destination: tyro.conf.Positional[str],
    options: Options = Options(),
) -> None:
    """Make shards of the pictures in FOLDER in DESTINATION, a folder or gs://…; a second call goes on with the first.

    Args:
        folder: pictures, in a folder for each class.
        destination: a folder, or gs://….
    """
    try:
        source = read_source(folder)
        if source.skipped:
            print(f"no classes: {listing(source.skipped)}", flush=True)
        index = write(source, destination, options, lambda text: print(text, flush=True))
    except RequestError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(WRONG_REQUEST)
    shards = index["shards"]
    total = sum(sum(shard["counts"]) for shard in shards)
    print(f"{total:,} pictures of {len(index['labels'])} classes in {len(shards)} shards: {destination}")


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.OmitArgPrefixes,))
