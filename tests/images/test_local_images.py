"""What there is of images, as a person sees it."""

from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from images import local_images
from images.local_images import Image
from launch.runs import Run

HASHES = ("0" * 12, "1" * 12)
DIGEST = "sha256:" + "d" * 64
REFERENCE = f"h/p/r/jax@{DIGEST}"
CURRENT = f"tpu-stack/jax:cpu-{HASHES[0]}"


def image(*tags: str, references: tuple[str, ...] = (), id: str = "sha256:" + "a" * 64) -> Image:
    return Image(
        id=id, framework="jax", platform="cpu", recipe=HASHES[0], tags=tags, references=references,
        size_bytes=1_250_000_000, created_s=0.0,
    )  # fmt: skip


def shown(table: Table) -> list[list[str]]:
    console = Console(width=240)
    with console.capture() as capture:
        console.print(table)
    return [line.split() for line in capture.get().splitlines()][1:]


def test_the_state_of_an_image_says_whether_it_is_of_this_checkout() -> None:
    states = {
        "current": image(CURRENT, f"h/p/r/jax:cpu-{HASHES[0]}"),
        "old": image(f"tpu-stack/jax:cpu-{HASHES[1]}"),
        "failed": image(f"{CURRENT}-failed"),
        "unnamed": image(),
        "other": image("somebody/jax:mine"),
    }
    assert {state: local_images.state(each, {CURRENT}) for state, each in states.items()} == {
        name: name for name in states
    }


def test_old_is_what_no_recipe_makes_no_container_uses_and_nobody_named() -> None:
    kept = [
        image(CURRENT),
        image(f"tpu-stack/jax:cpu-{HASHES[1]}", id="used"),
        image(f"tpu-stack/jax:cpu-{HASHES[1]}", "mine:1"),
    ]
    doomed = [image(f"tpu-stack/jax:cpu-{HASHES[1]}"), image(f"{CURRENT}-failed"), image()]
    assert local_images.old([*kept, *doomed], current={CURRENT}, used={"used"}) == doomed


def test_an_image_is_shown_with_the_latest_runs_that_used_it_by_id_or_by_digest(
    write_run: Callable[..., Run],
) -> None:
    by_id = [write_run(f"flax_mlm-2026112{day}-000000-abcd", image=image().id) for day in range(4)]
    by_digest = write_run("flax_mlm-20261125-000000-abcd", image=REFERENCE)
    bare = write_run("flax_mlm-20261126-000000-abcd", image=None)
    (row,) = shown(
        local_images.table_of_local(
            [image(CURRENT, references=(REFERENCE,))], {CURRENT}, [bare, by_digest, *by_id]
        )
    )
    assert row[:5] == ["jax", "cpu", CURRENT, "1.25", "GB"]
    assert " ".join(row[7:]) == (
        f"current {by_digest.run_id}, {by_id[0].run_id}, {by_id[1].run_id} and 2 more"
    )
