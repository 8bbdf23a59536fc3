"""What tf.data reads from shards: which pictures a step takes and how each is changed depend on seed and step only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from jobs.tf_images.data import Index, Part, choose_part

OPEN_SHARDS = 8
"""Shards that are read at a time, record by record in turn."""
READ_AHEAD_BYTES = 1 << 20
FEATURES = {
    "image/encoded": tf.io.FixedLenFeature((), tf.string),
    "image/class/label": tf.io.FixedLenFeature((), tf.int64),
}
ENDLESS = 2**62
MOST_IN_MEMORY_BYTES, DECODED_AT_ONCE = 256 << 20, 256
type OpenShard = Callable[[Any, Any, Any], Any]
"""From what `Pictures._shards` says of a shard to what is in it."""


def _records(path: Any, _first: Any, count: Any) -> Any:
    """The records of a shard, as they are in its file."""
    return tf.data.TFRecordDataset(path, buffer_size=READ_AHEAD_BYTES).take(count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pictures:
    """How the pictures of an index are read. counts: of each shard, how many records are to be read."""

    index: Index
    counts: dict[str, int]
    size: int
    seed: int
    shuffle: int = 1
    flip: bool = False
    shift: float = 0.0
    zoom: float = 0.0
    class_weights: tuple[float, ...] = ()
    """Of each class, by its index."""

    def train(self, *, host: int, hosts: int, batch: int, done: int, steps: int, wait_s: Any) -> Any:
        """Batches without end: pictures (B, H, W, C) of uint8, one-hot labels (B, K), weights (B,).

        done: batches that were taken before, of the `steps` batches of a training. wait_s: a variable that seconds are
        added to in which somebody waits.
        """
        part = choose_part(self.index.split_shards("train"), host=host, hosts=hosts)
        records, taken = self.records(part), done * batch
        is_in_memory = self._fits_in_memory(part, epochs=steps * batch / records)
        open_shard, picture_of = self._in_memory(part) if is_in_memory else (_records, self._decoded)

        def epoch(number: Any) -> Any:
            seed = tf.stack([tf.constant(self.seed, tf.int64), number])
            order = tf.random.experimental.stateless_shuffle(tf.range(len(part.names)), seed)
            mixed = tf.random.stateless_uniform((), seed, 0, 2**62, tf.int64)
            # Mixed before they are decoded, which is less to keep.
            return self._read(part, order, open_shard).shuffle(
                self.shuffle, mixed, reshuffle_each_iteration=False
            )

        pictures = tf.data.Dataset.range(taken // records, ENDLESS).flat_map(epoch).skip(taken % records)
        weights = tf.constant(self.class_weights or (1.0,) * len(self.index.labels), tf.float32)

        def change(number: Any, batch: Any) -> Any:
            images_BHWC, labels_B = picture_of(batch) if is_in_memory else batch
            seed = tf.stack([tf.constant(self.seed * hosts + host, tf.int64), number])
            one_hot_BK = tf.one_hot(labels_B, len(self.index.labels))
            return self._changed(images_BHWC, seed), one_hot_BK, tf.gather(weights, labels_B)

        if not is_in_memory:
            pictures = pictures.map(picture_of, tf.data.AUTOTUNE)
        batches = pictures.batch(batch, drop_remainder=True).enumerate(done)
        return _timed(batches.map(change, tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE), wait_s)

    def _in_memory(self, part: Part) -> tuple[OpenShard, Any]:
        """What lists the numbers of a shard's pictures in place of its records, and what takes the pictures of several
        numbers: the order is that of the records."""
        whole = dataclasses.replace(part, stride=1, first=0)
        in_order = self._shards(whole, tf.range(len(part.names))).flat_map(_records)
        read = in_order.map(self._decoded, tf.data.AUTOTUNE)
        chunks = list(read.batch(DECODED_AT_ONCE).prefetch(1).as_numpy_iterator())
        with tf.device("/CPU:0"):
            images_NHWC, labels_N = (
                tf.constant(np.concatenate(values)) for values in zip(*chunks, strict=True)
            )

        def numbers(_path: Any, first: Any, count: Any) -> Any:
            return tf.data.Dataset.range(first, first + count)

        return numbers, lambda numbers_B: (tf.gather(images_NHWC, numbers_B), tf.gather(labels_N, numbers_B))

    def _fits_in_memory(self, part: Part, epochs: float) -> bool:
        """Whether pictures are decoded once and kept: they are seen again, and do not take much."""
        pictures = sum(self.counts[name] for name in part.names)
        return epochs >= 2 and pictures * self.size**2 * self.index.channels <= MOST_IN_MEMORY_BYTES

    def held_out(self, *, host: int, hosts: int, batch: int, batches: int) -> Any:
        """So many batches, in their order: pictures (B, H, W, C), labels (B,); -1 where pictures have ended."""
        part = choose_part(self.index.split_shards("eval"), host=host, hosts=hosts)
        pictures = self._read(part, tf.range(len(part.names))).map(self._decoded, tf.data.AUTOTUNE)
        none = tf.zeros((self.size, self.size, self.index.channels), tf.uint8), tf.constant(-1, tf.int64)
        filled = pictures.concatenate(tf.data.Dataset.from_tensors(none).repeat(batch * batches))
        return filled.batch(batch, drop_remainder=True).take(batches).prefetch(tf.data.AUTOTUNE)

    def count_held_out(self, *, host: int, hosts: int) -> int:
        """How many pictures a host evaluates on."""
        return self.records(choose_part(self.index.split_shards("eval"), host=host, hosts=hosts))

    def records(self, part: Part) -> int:
        """How many a host reads of a part."""
        total = sum(self.counts[name] for name in part.names)
        return max(0, -(-(total - part.first) // part.stride))

    def _read(self, part: Part, order: Any, open_shard: OpenShard = _records) -> Any:
        """The records of a part, of OPEN_SHARDS shards in turn."""
        records = self._shards(part, order).interleave(
            open_shard,
            cycle_length=min(OPEN_SHARDS, len(part.names)),
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )
        return records.shard(part.stride, part.first) if part.stride > 1 else records

    def _shards(self, part: Part, order: Any) -> Any:
        """Of each shard of a part: its path, the records before its own in the order of names, and how many it has."""
        counts = np.array([self.counts[name] for name in part.names])
        columns = [f"{self.index.place}/{name}" for name in part.names], np.cumsum(counts) - counts, counts
        return tf.data.Dataset.from_tensor_slices(tuple(tf.gather(column, order) for column in columns))

    def _decoded(self, record: Any) -> Any:
        """(H, W, C) of uint8, and the label."""
        features = tf.io.parse_single_example(record, FEATURES)
        return picture(features["image/encoded"], self.index.channels, self.size, self.index.size), features[
            "image/class/label"
        ]

    def _changed(self, images_BHWC: Any, seed: Any) -> Any:
        """The pictures moved, enlarged or mirrored, by one transformation each."""
        if not (self.flip or self.shift or self.zoom):
            return images_BHWC
        count, side = tf.shape(images_BHWC)[0], float(self.size)
        drawn_4B = tf.random.stateless_uniform((4, count), seed, -1, 1)
        scale_B = 1 + self.zoom * drawn_4B[0]
        mirror_B = tf.where(drawn_4B[1] < 0, -1.0, 1.0) if self.flip else tf.ones((count,))
        centre, zero_B = (side - 1) / 2, tf.zeros((count,))
        # Of each place in the new picture where it comes from in the old one: x = a0 x' + a2, y = b1 y' + b2.
        a0_B = scale_B * mirror_B
        a2_B = centre - a0_B * centre + self.shift * side * drawn_4B[2]
        b2_B = centre - scale_B * centre + self.shift * side * drawn_4B[3]
        return tf.raw_ops.ImageProjectiveTransformV3(
            images=images_BHWC,
            transforms=tf.stack([a0_B, zero_B, a2_B, zero_B, scale_B, b2_B, zero_B, zero_B], axis=1),
            output_shape=[self.size, self.size],
            fill_value=0.0,
            interpolation="BILINEAR",
            fill_mode="CONSTANT",
        )


def picture(data: Any, channels: int, size: int, own_size: int | None) -> Any:
    """A JPEG or PNG as (size, size, channels) of uint8. own_size: its side, where that is known and it is a square."""
    image_HWC = tf.io.decode_image(data, channels, expand_animations=False)
    if own_size != size:
        resized = tf.image.resize(image_HWC, (size, size), antialias=True)
        image_HWC = tf.cast(tf.clip_by_value(tf.round(resized), 0, 255), tf.uint8)
    return tf.ensure_shape(image_HWC, (size, size, channels))


def _timed(batches: Any, wait_s: Any) -> Any:
    """The same batches; what whoever takes one has waited for it is added to `wait_s`."""
    iterator = iter(batches)

    def take(_: Any) -> Any:
        began_s = tf.timestamp()
        with tf.control_dependencies([began_s]):
            batch = iterator.get_next()
        with tf.control_dependencies(tf.nest.flatten(batch)):
            wait_s.assign_add(tf.timestamp() - began_s)
        return batch

    return tf.data.Dataset.range(ENDLESS).map(take)


def balanced(counts: tuple[int, ...]) -> tuple[float, ...]:
    """Weights of classes by which each counts the same; their mean over all pictures is 1."""
    present = sum(count > 0 for count in counts)
    return tuple(
        np.divide(sum(counts) / present, counts, where=np.array(counts) > 0, out=np.zeros(len(counts)))
    )
