"""How builds look while they go on."""

from __future__ import annotations

import io
import re

from rich.console import Console

from launch.images import board


def test_without_a_terminal_each_thing_that_begins_is_a_line_and_progress_now_and_then() -> None:
    out = io.StringIO()
    with board.make(Console(file=out, width=20), ["jax"]) as shown:
        watch = shown.begin("jax")
        watch.state("step 1/9  RUN something that is longer than the terminal is wide [bold] :x:")
        for number in range(50):
            watch.progress(f"layer {number}/50")
        watch.note("ok   imports")
        shown.end("jax", "built")
    assert out.getvalue().splitlines() == [
        "jax  0:00  step 1/9  RUN something that is longer than the terminal is wide [bold] :x:",
        "jax  0:00  layer 0/50",
        "jax  ok   imports",
        "jax  built",
    ]


def test_on_a_terminal_every_name_has_one_line_that_is_cut_and_never_wrapped() -> None:
    out = io.StringIO()
    console = Console(file=out, width=40, force_terminal=True)
    lines = board.Lines(console, ["jax", "pytorch"])
    lines.begin("jax").state("step 2/9  RUN " + "x" * 100)
    with console.capture() as capture:
        console.print(lines.table())
    seen = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in capture.get().splitlines()]
    assert len(seen) == 2
    assert seen[0].startswith("jax      0:00  step 2/9  RUN xxx")
    assert len(seen[0]) == 40
    assert seen[1].split() == ["pytorch", "waits"]
