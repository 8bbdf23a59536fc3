"""A pass: while all is well it costs little and writes nothing, and what one step cannot do keeps no other from it."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from contracts.inventory import RECORDED, SPECIFICATION, slices_to_json, to_json
from infra.documents import ABSENT, Documents
from infra.slice_apis.retry import CloudTpuError
from keeper import __main__ as main
from keeper import reclaim
from launch.control.control_documents import Attempt, Run
from launch.control.store import Store
from rehearsal.simulated_cloud import SimulatedCloud
from tests.infra.bucket import Bucket, served
from tests.infra.cloud_tpu.lab import OWNER, Cloud, wanted_props
from tests.keeper.lab import INVENTORY
from tests.launch.slices import make_host
from tests.processes import run_program

RUNS = 50


def test_fifty_runs_that_are_well_cost_five_requests_and_a_second_of_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted at the servers. The pass is a process of its own, as the timer starts it."""
    with served() as url, SimulatedCloud() as api:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        cloud = Cloud(api, api.cloud.clock)
        for number in range(RUNS):
            cloud.put(f"q{number}", owner=OWNER)
        api.control.advance(3600.0)
        documents = Documents("gs://b/control")
        (one,) = INVENTORY.slices
        slices = [dataclasses.replace(one, name=f"s{n}", origin=f"queued-resource q{n}") for n in range(RUNS)]
        inventory = dataclasses.replace(INVENTORY, slices=tuple(slices))
        specification = {
            "project": "grant", "owner": OWNER, "inventory": to_json(inventory),
            "slices": {f"s{n}": wanted_props(queued_resource_id=f"q{n}") for n in range(RUNS)},
        }  # fmt: skip
        documents.write(SPECIFICATION, specification, version=ABSENT)
        hosts = [dataclasses.replace(each, hosts=(make_host(0),)) for each in slices]
        documents.write(RECORDED, json.loads(slices_to_json(hosts)), version=ABSENT)
        store = Store(documents)
        for number in range(RUNS):
            run = Run(
                run_id=f"run-{number}", stack="dev", runs_url="gs://b/runs", slices=(f"s{number}",), slice=f"s{number}",
                project="grant", attempt=Attempt(number=0, has_joined=True), seen="running",
            )  # fmt: skip
            store.edit_run(run.run_id, lambda _, run=run: run)  # type: ignore[misc]
            Bucket.objects[f"runs/run-{number}/heartbeats/host-0.json"] = (1, b"{}", {})
        code = (
            "import sys, time\nfrom infra.documents import Documents\n"
            "from keeper import __main__ as main, stack_store\n"
            "main.LOOK_EVERY_S, main.is_noted, stack_store.is_noted = 0.0, lambda _: False, lambda _: False\n"
            "import keeper.reclaim as reclaim; reclaim.is_noted = lambda _: False\n"
            "code = main.watch(Documents('gs://b/control'), print)\nprint(time.process_time()); sys.exit(code)"
        )
        environ = {
            **os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "GOOGLE_TPU_V2_CUSTOM_ENDPOINT": f"{api.url}/v2/",
        }  # fmt: skip

        answer, listings = api.server.answer, list[str]()

        def counted(method: str, target: str, body: bytes) -> Any:
            listings.append(f"{method} {target}")
            return answer(method, target, body)

        monkeypatch.setattr(api.server, "answer", counted)

        def one_pass() -> tuple[list[str], list[str]]:
            Bucket.requests.clear()
            listings.clear()
            done = run_program([sys.executable, "-c", code], environ)
            assert done.returncode == 0, done.stdout + done.stderr
            return [*Bucket.requests, *listings], done.stdout.splitlines()

        before = {name: held[0] for name, held in Bucket.objects.items()}
        one_pass()  # its cache is empty
        used_s = float("inf")
        for _ in range(4):  # neighbours on the same cores make a process take more, and never less
            requests, lines = one_pass()
            # Each of two looks lists the documents and Google's requests; the first one lists signs of life too.
            assert len(requests) == 5 and {each.partition(" ")[0] for each in requests} == {"GET"}, requests
            assert len(lines) == 1, lines
            if (used_s := min(used_s, float(lines[-1]))) < 1.0:
                break
        assert used_s < 1.0
        assert {name: held[0] for name, held in Bucket.objects.items()} == before
        cloud.client.close()


def test_what_one_step_cannot_do_does_not_keep_the_others_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def step(name: str) -> Callable[..., Any]:
        def fail(*_: Any, **__: Any) -> None:
            done.append(name)
            raise CloudTpuError(f"no {name}")

        return fail

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(main, "reconcile", step("runs"))
    monkeypatch.setattr(main, "note_look", step("note"))
    monkeypatch.setattr(reclaim, "give_back", step("idle"))
    said: list[str] = []
    assert main.watch(Documents(str(tmp_path)), said.append) == 1
    assert done == ["runs", "note", "idle"] and said == [f"error: no {name}" for name in done]


def test_a_quiet_pass_does_without_what_logs_in_to_hosts() -> None:
    """Its import takes as long as all the others together, every minute."""
    code = "import keeper.__main__, sys; sys.exit('asyncssh' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
