"""A run that is kept, in a rehearsal, with nobody there: whatever happens, it ends with the losses of an undisturbed
one or with a reason, there is never more than one slice for it, and nobody else's request is touched."""

import json
import os
import random
import re
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rehearsal import state
from rehearsal.daemon import cli
from rehearsal.rehearse import is_done, read_losses, step_in
from tests.rehearsal.daemon.conftest import LIMIT_S, ROOT, Person
from tests.rehearsal.daemon.test_rehearsal_up import (
    LAUNCH_LIMIT_S,
    SIZES,
    fetched,
    run_started,
    status,
)
from tests.waiting import until

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS = 30_000  # of 2 ms: what is preempted is caught in the midst of them, also the third time
# Every new host would tokenise anew.
OPTIONS = (
    f"--steps {STEPS} --checkpoint-every 100 --log-every 50 --eval-every {STEPS} --batch-size 12 {SIZES}"
    " --eval-fraction 0.01 --remote-cache gs://my-rehearsal-runs/tokens"
)
TRAIN = f"fab train --stack rehearsal --job flax_mlm --args '{OPTIONS}'"
RECOVERY_LIMIT_S = 600.0
LOOK_S = 2.0
THEIRS = "projects/my-rehearsal/locations/us-west4-a"
ALIVE = ("CREATING", "READY", "RESTARTING", "STARTING")
LEASE_S = 60.0
AWAY_S = 300.0
ANOTHER = """
import os, runpy, time
real = time.time
time.time = lambda: real() + float(os.environ["OFF_S"])
while True:
    try:
        runpy.run_module("keeper", run_name="__main__")
    except SystemExit:
        pass
    time.sleep(2)
"""


def is_ours(found: Mapping[str, Any]) -> bool:
    """Whether a node or a request is not somebody else's."""
    return not found["name"].endswith("/theirs")


def state_of(request: Mapping[str, Any]) -> str:
    return str(request["state"]["state"])


class Cloud:
    """What the simulated API shows, looked at twice a second. most: nodes of the slice that were there at once."""

    def __init__(self, url: str) -> None:
        self._url, self.most, self._over = url, 0, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self._url}/v2/{path}", data=data, method=method, headers={"content-type": "application/json"}
        )
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
            return json.loads(answer.read())

    def requests(self) -> list[dict[str, Any]]:
        found = self.ask("GET", "projects/my-rehearsal/locations/-/queuedResources").get(
            "queuedResources", []
        )
        return [each for each in found if is_ours(each)]

    def theirs(self) -> Any:
        return self.ask("GET", f"{THEIRS}/queuedResources/theirs")

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.5):
            nodes = self.ask("GET", "projects/my-rehearsal/locations/-/nodes").get("nodes", [])
            alive = [node for node in nodes if is_ours(node) and node["state"] in ALIVE]
            self.most = max(self.most, len(alive))


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, environ: Mapping[str, str]) -> Iterator[Person]:
    """Whose rehearsal is up, with a keeper; somebody else has a TPU in another zone of the project."""
    person = Person(tmp_path_factory.mktemp("kept") / "rehearsal", environ)
    try:
        person.up(cli.UpRequest(keeper=True))
        person.succeed("fab deploy --stack rehearsal", LAUNCH_LIMIT_S)
        cloud = Cloud(state.require(person.folder).tpu_url)
        node = {
            "acceleratorType": "v5litepod-4",
            "runtimeVersion": "v2-alpha-tpuv5-lite",
            "labels": {"owner": "them"},
        }
        theirs = {"tpu": {"nodeSpec": [{"parent": THEIRS, "nodeId": "theirs", "node": node}]}, "spot": {}}
        cloud.ask("POST", f"{THEIRS}/queuedResources?queuedResourceId=theirs", theirs)
        until(lambda: state_of(cloud.theirs()) == "ACTIVE", LIMIT_S)
        cloud.close()
        yield person
    finally:
        cli.down(person.folder, person.said.append)


@pytest.fixture(scope="module")
def right(kept: Person, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of an undisturbed run."""
    run = run_started(kept.succeed(TRAIN, LAUNCH_LIMIT_S))
    return read_losses(fetched(kept, run, tmp_path_factory.mktemp("right")) / "metrics.jsonl")


@pytest.fixture
def cloud(kept: Person) -> Iterator[Cloud]:
    made = Cloud(state.require(kept.folder).tpu_url)
    before = made.theirs()
    yield made
    made.close()
    assert made.theirs() == before


def log(person: Person) -> str:
    return (person.folder / "keeper.log").read_text(errors="replace")


def ends(person: Person, run: str) -> list[str]:
    """Why the keeper keeps a run no longer, which it notes at the look after."""
    said = person.succeed("fab keeper status --stack rehearsal")
    return re.findall(rf" {run} ends: (.*)", said)


def is_asked_for(cloud: Cloud, before: str) -> bool:
    """Whether the slice that was preempted has been asked for again."""
    return any(state_of(each) != "SUSPENDED" and each["createTime"] > before for each in cloud.requests())


def preempt(person: Person, cloud: Cloud) -> str:
    """Take the slice; return when it had been made."""
    (request,) = cloud.requests()
    person.act("preempt")
    return str(request["createTime"])


def until_step(person: Person, step: int) -> None:
    def is_there() -> bool:
        said = status(person)
        assert not is_done(said), f"it was too quick to be struck: {said}"
        at = step_in(said)
        return (-1 if at is None else at) >= step

    until(is_there, RECOVERY_LIMIT_S, pause_s=LOOK_S)


def until_it_says(person: Person, *words: str) -> None:
    """Until `fab status` says one of them."""

    def says() -> bool:
        said = status(person)
        return any(each in said for each in words)

    until(says, RECOVERY_LIMIT_S, pause_s=LOOK_S)


def at_a_random_moment(person: Person, cloud: Cloud, _tmp: Path) -> None:
    """In any phase: starting, joining, stepping, saving, evaluating."""
    rng = random.Random(os.environ.get("SEED", "0"))
    for least, most in ((-1, 0), (1, 3000), (6000, 12000)):
        step = rng.randint(least, most)
        until_step(person, step)
        preempt(person, cloud)
        until_it_says(person, " stepping ", " done ")


def in_a_stock_out(person: Person, cloud: Cloud, _tmp: Path) -> None:
    until_step(person, 100)
    person.act("stockout")
    before = preempt(person, cloud)
    until(lambda: is_asked_for(cloud, before), LIMIT_S)
    threading.Event().wait(30)  # it goes on waiting
    person.act("restock")


def twice_in_a_row(person: Person, cloud: Cloud, _tmp: Path) -> None:
    until_step(person, 100)
    before = preempt(person, cloud)
    until(lambda: is_asked_for(cloud, before), LIMIT_S)
    until(lambda: any(state_of(each) == "ACTIVE" for each in cloud.requests()), LIMIT_S)
    preempt(person, cloud)


def gateway_off_in_mid_recovery(person: Person, cloud: Cloud, _tmp: Path) -> None:
    """Its lease is left behind too, by a keeper that is dead."""
    until_step(person, 100)
    before = preempt(person, cloud)
    until(lambda: is_asked_for(cloud, before), LIMIT_S)
    person.act("gateway-off")
    threading.Event().wait(10)
    person.act("gateway-on")


def bucket_away(person: Person, cloud: Cloud, _tmp: Path) -> None:
    until_step(person, 100)
    person.act("bucket-away")
    preempt(person, cloud)
    threading.Event().wait(AWAY_S)
    person.act("bucket-back")


def with_another(person: Person, cloud: Cloud, tmp_path: Path, off_s: float) -> Callable[[], None]:
    """Start another keeper, on a machine whose clock is off."""
    opened = state.open_rehearsal(person.environ).environment
    environ = {
        **person.environ, **opened, "OFF_S": str(off_s), "TPU_STACK_KEEPER": "gs://my-rehearsal-runs/control",
        "GOOGLE_TPU_V2_CUSTOM_ENDPOINT": state.require(person.folder).tpu_url,
    }  # fmt: skip
    with (tmp_path / "another.log").open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-c", ANOTHER],
            env=environ,
            cwd=ROOT,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )

    def end() -> None:
        process.kill()
        process.wait()

    return end


def two_keepers(person: Person, cloud: Cloud, tmp_path: Path) -> None:
    until_step(person, 100)
    end = with_another(person, cloud, tmp_path, 0.0)
    try:
        preempt(person, cloud)
        until_it_says(person, " done ")
    finally:
        end()


def a_clock_that_is_off(person: Person, cloud: Cloud, tmp_path: Path) -> None:
    """By an hour, of the only keeper; and of a host."""
    until_step(person, 100)
    person.act("gateway-off")
    end = with_another(person, cloud, tmp_path, 3600.0)
    try:
        preempt(person, cloud)
        until_it_says(person, " done ")
    finally:
        end()
        person.act("gateway-on")


def pulumi_up_in_the_middle(person: Person, cloud: Cloud, _tmp: Path) -> None:
    until_step(person, 100)
    before = preempt(person, cloud)
    until(lambda: is_asked_for(cloud, before), LIMIT_S)
    done = person.type(
        "pulumi",
        "up",
        "--refresh",
        "--yes",
        "--skip-preview",
        "--stack",
        "rehearsal",
        limit_s=RECOVERY_LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr


STORIES = (
    at_a_random_moment, in_a_stock_out, twice_in_a_row, gateway_off_in_mid_recovery, two_keepers, a_clock_that_is_off,
    pulumi_up_in_the_middle, bucket_away,
)  # fmt: skip


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_a_kept_run_ends_with_the_losses_of_an_undisturbed_one(
    kept: Person,
    right: dict[int, float],
    cloud: Cloud,
    tmp_path: Path,
    story: Callable[[Person, Cloud, Path], None],
) -> None:
    run = run_started(kept.succeed(f"{TRAIN} --keep --detach", LAUNCH_LIMIT_S))
    story(kept, cloud, tmp_path)
    try:
        until(
            lambda: f"{run} " in status(kept) and " done " in status(kept), RECOVERY_LIMIT_S, pause_s=LOOK_S
        )
    except AssertionError:
        raise AssertionError(
            status(kept) + kept.type("fab", "keeper", "status").stdout + log(kept)[-3000:]
        ) from None
    folder = fetched(kept, run, tmp_path)
    assert len(json.loads((folder / "run.json").read_text())["attempts"]) > 1, (
        "it was done before it was lost"
    )
    assert read_losses(folder / "metrics.jsonl") == right
    assert cloud.most == 1 and len(cloud.requests()) == 1
    until(
        lambda: [text.partition(":")[0] for text in ends(kept, run)] == ["it is done"],
        LIMIT_S,
        pause_s=LOOK_S,
    )


FIRST_ZONE, SECOND_ZONE = "us-central1-a", "us-south1-a"


def losses_in_the_bucket(person: Person, run: str) -> dict[int, float]:
    """The losses of a run whose directory is there, as is that of every slice with several zones."""
    opened = state.open_rehearsal(person.environ).environment
    name = urllib.parse.quote(f"runs/{run}/metrics.jsonl", safe="")
    url = f"{opened['STORAGE_EMULATOR_HOST']}/storage/v1/b/my-rehearsal-runs/o/{name}?alt=media"
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=10) as answer:
        (person.folder / "metrics.jsonl").write_bytes(answer.read())
    return read_losses(person.folder / "metrics.jsonl")


def zone_of(cloud: Cloud) -> str:
    """Where the only request of the slice is; "" where it is not served."""
    (one, *others) = [*cloud.requests(), None]
    return one["name"].split("/")[3] if one and others == [None] and state_of(one) == "ACTIVE" else ""


def entries(person: Person) -> dict[str, dict[str, Any]]:
    """Of the queue, by name."""
    found = json.loads(person.succeed("fab queue --json --stack rehearsal"))["entries"]
    return {each["name"]: each for each in found}


def test_what_is_queued_ends_with_the_losses_of_an_undisturbed_run(
    kept: Person, right: dict[int, float], cloud: Cloud, tmp_path: Path
) -> None:
    """By priority; a worker is killed while it starts a run, and the slice is lost in a stock-out with nobody there."""
    kept.act("gateway-off")
    for name, priority in (("low", 0), ("gone", 1), ("high", 2)):
        words = f"--name {name} --priority {priority} --job flax_mlm --args '{OPTIONS}'"
        kept.succeed(f"fab submit --stack rehearsal {words}")
    with subprocess.Popen(
        [Path(sys.executable).with_name("fab"), "queue", "work", "--stack", "rehearsal"],
        env={**kept.environ, **state.open_rehearsal(kept.environ).environment},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as worker:
        assert worker.stdout is not None
        first = next(line for line in worker.stdout if line.startswith("started "))
        worker.kill()
    assert entries(kept)["high"]["state"] == "starting" and entries(kept)["high"]["run_id"] in first
    kept.succeed("fab queue cancel gone --stack rehearsal")
    before = len(log(kept))
    kept.act("stockout")  # who has chips keeps them
    kept.act("gateway-on")
    until_step(kept, 100)
    preempt(kept, cloud)
    kept.succeed(f"fab queue move {entries(kept)['low']['number']} first --stack rehearsal")
    threading.Event().wait(30)  # it waits for chips
    kept.act("restock")
    until(
        lambda: {each["state"] for each in entries(kept).values()} == {"done", "cancelled"}, RECOVERY_LIMIT_S
    )
    done = [each for each in entries(kept).values() if each["state"] == "done"]
    assert sorted(each["name"] for each in done) == ["high", "low"]
    assert re.search(r"entry \d+ \(.*\): .* goes on from", log(kept)[before:])
    for each in done:
        place = tmp_path / each["name"]
        place.mkdir()
        assert read_losses(fetched(kept, each["run_id"], place) / "metrics.jsonl") == right
    assert cloud.most == 1


@pytest.mark.parametrize(
    "strategy", ["race", "first"]
)  # after a race two zones may serve the next test at once
def test_a_kept_run_goes_on_in_the_zone_that_has_chips(
    kept: Person, right: dict[int, float], cloud: Cloud, strategy: str
) -> None:
    """The keeper brings it back in the second zone and, once nobody keeps it any more, `fab recover` in the first."""
    turns = {"slices[0].zone-wait": "1m"} if strategy == "first" else {}
    config = {
        "slices[0].zones[0]": FIRST_ZONE, "slices[0].zones[1]": SECOND_ZONE, "slices[0].strategy": strategy, **turns,
        "allow-cross-region": "true",
    }  # fmt: skip
    kept.type("pulumi", "config", "rm", "--path", "tpu-stack:slices[0].zone-wait", "--stack", "rehearsal")
    for key, value in config.items():
        kept.succeed(f"pulumi config set --path 'tpu-stack:{key}' {value} --stack rehearsal")
    kept.succeed("pulumi up --refresh --yes --skip-preview --stack rehearsal")
    assert zone_of(cloud) == FIRST_ZONE
    run = run_started(kept.succeed(f"{TRAIN} --keep --detach", LAUNCH_LIMIT_S))
    until_step(kept, 300)  # each checkpoint waits for the one before, so that of step 100 is whole
    known = len(log(kept))
    kept.act("stockout")
    preempt(kept, cloud)
    until(lambda: zone_of(cloud) == SECOND_ZONE, RECOVERY_LIMIT_S, pause_s=LOOK_S)
    kept.act("restock")
    resumed = f"{run}: it was lost, and goes on from the checkpoint"
    until(lambda: resumed in log(kept)[known:], LIMIT_S, pause_s=LOOK_S)
    until_it_says(kept, " stepping ", " done ")
    kept.succeed(f"fab unkeep {run} --stack rehearsal")
    kept.act("stockout", zone=SECOND_ZONE)
    preempt(kept, cloud)
    assert "is done" in kept.succeed(f"fab recover --run {run} --stack rehearsal", RECOVERY_LIMIT_S)
    kept.act("restock", zone=SECOND_ZONE)
    assert zone_of(cloud) == FIRST_ZONE and cloud.most == 1
    assert losses_in_the_bucket(kept, run) == right


def test_a_stack_that_is_destroyed_in_the_middle_is_gone_and_its_run_waits_with_a_reason(
    kept: Person, cloud: Cloud, tmp_path: Path
) -> None:
    """The last: nothing is left of the stack."""
    run = run_started(kept.succeed(f"{TRAIN} --keep --detach", LAUNCH_LIMIT_S))
    until_step(kept, 100)
    before = preempt(kept, cloud)
    until(lambda: is_asked_for(cloud, before), LIMIT_S)
    line = "pulumi destroy --yes --skip-preview --stack rehearsal"
    refused = kept.type(*line.split(), limit_s=RECOVERY_LIMIT_S)
    assert refused.returncode != 0 and "a bucket with data is not deleted" in refused.stdout + refused.stderr
    threading.Event().wait(LEASE_S)  # the keeper has looked often enough since
    assert cloud.requests() == [] and cloud.most == 1
    assert (
        log(kept).count(f"{run}: its slice was removed by `pulumi destroy`; `pulumi up` makes it again") == 1
    )
