"""A step compiled while its slice is waited for goes along with the run, whichever machine starts it."""

import dataclasses
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backends.local import environments
from console.compiler import compile_ahead, fit
from infra.documents import Documents
from jobs.runtime.storage.cache import user_cache_dir
from launch import launching
from launch.code import precompiled
from launch.request.run_request import Request, work_out
from launch.targets import Target
from tests.launch.slices import make_host, make_inventory, make_slice, make_target

HELLO = Request(job="jax_hello", arguments=("--steps", "20"), name=None, resume=None)
LIMIT_S = 300.0


@pytest.fixture
def on_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Continues on another machine: one with a cache of its own, and the environments that this one has."""
    real = user_cache_dir(os.environ) / "environments"
    real.mkdir(parents=True, exist_ok=True)

    def go(name: str) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        cache = user_cache_dir(os.environ)
        if not cache.exists():
            cache.mkdir(parents=True)
            (cache / "environments").symlink_to(real)

    go("here")
    return go


@pytest.fixture
def target(tmp_path: Path, make_agent: Any) -> Target:
    """A v5litepod-16 whose bucket is a folder."""
    of_slice = make_slice([make_host(index) for index in range(4)])
    inventory = make_inventory(of_slice)
    storage = dataclasses.replace(inventory.storage, bucket_url=f"file://{tmp_path}/bucket")
    (tmp_path / "bucket" / "cache" / "executables").mkdir(parents=True)
    agents = [make_agent(lambda *_: {}) for _ in range(4)]
    return make_target(agents, inventory=dataclasses.replace(inventory, storage=storage), slice=of_slice)


def told(request: Request, target: Target) -> list[str]:
    lines: list[str] = []
    compile_ahead.begin(request, target, lines.append, is_submitted=True)
    return lines


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
def test_a_step_is_compiled_beside_the_wait_and_each_machine_that_starts_the_run_sends_the_note_of_it(
    target: Target, on_machine: Callable[[str], None], tmp_path: Path
) -> None:
    environments.ensure(fit.ENVIRONMENT, print)
    (line,) = told(HELLO, target)
    assert line.startswith("meanwhile this machine compiles the training step for v5litepod-16 (")
    planned = work_out(HELLO, target)
    assert planned.step is not None and planned.precompiled is None, "a launch waits for nothing"
    log = user_cache_dir(os.environ) / "precompiled" / f"{planned.step.name}.log"
    until_s = time.monotonic() + LIMIT_S
    while "compiled jax_hello's step in" not in log.read_text():
        assert time.monotonic() < until_s, log.read_text()
        time.sleep(0.2)

    sent = work_out(HELLO, target)
    note = sent.precompiled
    assert note is not None
    assert sent.notes == (f"the training step was compiled beforehand: {note['url']}",)
    assert sent.bundles[0].names == planned.bundles[0].names | {f"executables/{note['key']}.json"}
    there = Path(note["url"].removeprefix("file://")).read_bytes()
    assert hashlib.sha256(there).hexdigest() == note["sha256"]
    assert told(HELLO, target) == []  # it is compiled
    other_options = dataclasses.replace(HELLO, arguments=("--batch-size", "32"))
    assert work_out(other_options, target).precompiled is None

    # Another machine finds the note among the control documents.
    documents = Documents(str(tmp_path / "bucket" / "control"))
    on_machine("there")
    assert work_out(HELLO, target).precompiled is None
    found = precompiled.find_published(planned.step, documents)
    again = work_out(dataclasses.replace(HELLO, precompiled=found), target)
    assert again.bundles == sent.bundles
    # What was submitted with the note has it, wherever it is carried out.
    submitted = dataclasses.replace(HELLO, submitted=launching.submitted(sent))
    assert work_out(submitted, target).bundles == sent.bundles


def test_where_nothing_can_be_compiled_beforehand_a_line_says_what_would_or_there_is_nothing_to_say(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "is_made", lambda _: False)
    (line,) = told(HELLO, target)
    assert line == (
        "the training step is compiled on the slice, as this machine has no TPU compiler; `fab fit --job jax_hello "
        "--accelerator v5litepod-16 --keep -- --steps 20` gets it, and compiles beforehand"
    )
    no_bucket = dataclasses.replace(target.inventory.storage, bucket_url=None)
    inventory = dataclasses.replace(target.inventory, storage=no_bucket)
    for request, where in (
        (dataclasses.replace(HELLO, arguments=("--no-such", "1")), target),  # the launch says it
        (
            dataclasses.replace(HELLO, job="keras_glue", arguments=()),
            target,
        ),  # it trains with another program
        (HELLO, dataclasses.replace(target, platform="cpu")),
        (HELLO, dataclasses.replace(target, inventory=inventory)),
        (HELLO, dataclasses.replace(target, slice=dataclasses.replace(target.slice, topology="2x8"))),
    ):
        assert told(request, where) == []
