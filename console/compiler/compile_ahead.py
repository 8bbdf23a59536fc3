"""A run that waits for its TPU slice has its training step compiled meanwhile, in a process of its own beside the wait.

Nothing waits for it and nothing fails with it: what is compiled too late, or not at all, is compiled on the slice.

The program: `python -P -m console.compiler.compile_ahead`, a request as JSON on standard input.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys

from filelock import FileLock, Timeout

from backends.local import environments
from console.compiler import fit
from contracts.aliases import Say
from contracts.errors import DONE, FAILED, RequestError
from jobs.runtime.storage.cache import user_cache_dir
from launch import jobs
from launch.code import precompiled
from launch.code.precompiled import Step
from launch.hosts import HostError
from launch.jobs import CHECKOUT
from launch.request.run_request import Request, work_out
from launch.targets import Target

NICENESS = 10


def begin(request: Request, target: Target, say: Say, *, is_submitted: bool = False) -> None:
    """Have the step of a run compiled for its slice, unless it is. is_submitted: any machine may start the run."""
    try:
        planned = work_out(request, target)
    except (RequestError, HostError):
        return  # the launch says it
    step, bucket = planned.step, target.inventory.storage.bucket_url
    if (
        step is None
        or bucket is None
        or planned.precompiled is not None
        or not fit.can_keep(jobs.find(step.job))
    ):
        return
    if not environments.is_made(fit.ENVIRONMENT):
        say(
            "the training step is compiled on the slice, as this machine has no TPU compiler; "
            f"`{fit.fit_command(step, target, '--keep')}` gets it, and compiles beforehand"
        )
        return
    if step.code != jobs.bundle(CHECKOUT).sha256:
        return  # the run is of another state of this checkout
    folder = user_cache_dir(os.environ) / precompiled.FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    control = target.inventory.control if is_submitted else None
    order = {"step": dataclasses.asdict(step), "bucket": bucket, "control": control}
    log, request_file = folder / f"{step.name}.log", folder / f"{step.name}.request"
    request_file.write_text(json.dumps(order))
    files = [
        os.open(request_file, os.O_RDONLY),
        *[os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)] * 2,
    ]
    try:  # not a Popen, which would have to be waited for
        os.posix_spawn(
            sys.executable,
            [sys.executable, "-P", "-m", "console.compiler.compile_ahead"],
            {**os.environ, "PYTHONPATH": str(CHECKOUT)},
            setsid=True,
            file_actions=[(os.POSIX_SPAWN_DUP2, file, to) for to, file in enumerate(files)],
        )
    finally:
        for file in {*files}:
            os.close(file)
    say(f"meanwhile this machine compiles the training step for {target.slice.accelerator_type} ({log})")


def compile_step(step: Step, bucket: str, control: str | None) -> str:
    """Compile a step, put its program into the bucket and its note where a launch looks: here, and in the documents.

    Return a line about it.

    Raises:
        RequestError: the options do not suit the slice, it does not fit, or a place cannot be written.
        HostError: the compiler failed.
    """
    request = {"job": step.job, "words": step.words, "keep": True, **step.topology}
    answer = fit.cached_answer(request, str(step.topology["topology"]))
    if answer["note"] is None:
        raise RequestError("nothing is kept" if answer["fits"] else "nothing is kept, as it does not fit")
    precompiled.record(step, answer["note"])
    note = precompiled.with_url(answer["note"], bucket)
    precompiled.upload(note)
    if control is not None:
        precompiled.publish(note, step, control)
    return f"compiled {step.job}'s step in {answer['compile_s']:.0f} s: {note['url']}"


def main() -> int:
    request = json.load(sys.stdin)
    step = Step(**{**request["step"], "words": tuple(request["step"]["words"])})
    os.nice(NICENESS)
    lock = FileLock(user_cache_dir(os.environ) / precompiled.FOLDER / f"{step.name}.lock", timeout=0)
    try:
        with lock:
            print(compile_step(step, request["bucket"], request["control"]), flush=True)
    except Timeout:
        print("another process compiles it", flush=True)
    except (RequestError, HostError) as error:
        print(error, file=sys.stderr)
        return FAILED
    return DONE


if __name__ == "__main__":
    sys.exit(main())
