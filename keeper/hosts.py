"""Kept runs on their hosts: their signs of life by one listing of each bucket; a run examined, resumed or stopped.

A run is resumed by `launch.recovery` and `launch.launch`, as `fab recover` does it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from backends.targets import of_inventory, resolve
from console.follow import STOP_GRACE_S
from contracts import atomic, run_directory
from contracts.errors import UNAVAILABLE, RequestError, Unreachable
from contracts.files import is_url
from contracts.inventory import Inventory
from contracts.run_directory import RunDirectory, State
from infra.documents import Documents, DocumentsError
from infra.lease import clock_s
from jobs.runtime.metric_definitions import finite
from keeper.rules import Facts, Sign
from keeper.store import Stack, Wanted
from launch import costs, recovery, runs, targets
from launch import launch as launching
from launch.hosts import HostError, stop_processes
from launch.runs import Run
from launch.targets import Given, Target

Say = Callable[[str], None]


class WrongRequestError(Exception):
    """A run cannot be resumed as it is described, however often that is tried."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Examined:
    """A run as it was read, and what the rules have to know of it."""

    run: Run
    facts: Facts


def _facts(run: Run, state: State) -> Facts:
    if run.unread_result is not None:
        raise RequestError(f"{run.run_id}: how it ended cannot be read: {run.unread_result}")
    result = run.current_result() or {}
    return Facts(
        state=state,
        is_wrong=bool(result.get("request")),
        is_outage=result.get("exit_code") == UNAVAILABLE,
        error=str(result.get("error") or "").partition("\n")[0],
        cost_usd=costs.least_usd(run),
        max_usd=finite(run.described.get("max_usd")),
        saved=() if state in run_directory.ACTIVE else tuple(run.directory.checkpoint_steps()),
    )


class Hosts:
    """The hosts of wanted runs. Every method may raise HostError, HostsError or RequestError."""

    def __init__(self, say: Say) -> None:
        self._say = say

    def signs(self, wanted: Sequence[Wanted]) -> dict[str, Sign]:
        """Return what a listing shows of each run; runs that cannot be listed from this machine are left out."""
        found: dict[str, Sign] = {}
        names = [run_directory.heartbeat(0), run_directory.RESULT]
        for folder in sorted({each.runs_url for each in wanted if not each.for_queue}):
            ids = sorted(each.run_id for each in wanted if each.runs_url == folder)
            if not is_url(folder) and not Path(folder).is_dir():
                continue
            try:
                ages_s = Documents(folder).ages_s(ids, names)
            except DocumentsError as error:
                self._say(str(error))
                continue
            for run_id in ids:
                beat, result = (f"{run_id}/{name}" for name in names)
                found[run_id] = Sign(beat_age_s=ages_s.get(beat), has_result=result in ages_s)
        return found

    def directory(self, wanted: Wanted) -> RunDirectory | None:
        """Return a run's directory as this machine sees it without hosts; None where it does not."""
        if wanted.for_queue or (not is_url(wanted.runs_url) and not Path(wanted.runs_url).is_dir()):
            return None
        here = resolve(targets.Wanted(runs=wanted.runs_url))
        return here.runs.directory(wanted.run_id)

    def without_hosts(self, wanted: Wanted) -> Examined | None:
        """Return a run whose hosts are gone, as its directory tells it; None where that cannot be read from here."""
        directory = self.directory(wanted)
        if directory is None or (run := runs.read(directory)) is None:
            return None
        outcome = (run.current_result() or {"outcome": "lost"}).get("outcome")
        state: State = next((known for known in run_directory.OUTCOMES if known == outcome), "lost")
        return Examined(run=run, facts=_facts(run, state))

    def target(self, wanted: Wanted, stack: Stack | None) -> Target:
        """Return where a run is to go on. stack: with the hosts as they are now; None: this machine."""
        if stack is None:
            place = targets.Wanted(runs=wanted.runs_url)
            here = resolve(place)
            run = runs.read(here.runs.directory(wanted.run_id))
            return resolve(place, run) if run else here
        return self.on(stack, wanted.slice, wanted.runs_url or None)

    def on(self, stack: Stack, slice_name: str, runs_url: str | None = None) -> Target:
        """Return a slice of a stack. runs_url: where its runs are; None: where they are by default."""
        inventory = from_here(stack.inventory, os.environ)
        given = None
        if stack.platform is not None:
            given = Given(
                inventory=inventory,
                folder=Path("/nonexistent"),
                platform=stack.platform,
                python=stack.python or targets.PYTHON,
                stand_in_devices=stack.stand_in_devices or (),
            )
        asked = targets.Wanted(stack=inventory.stack, slice=slice_name, runs=runs_url, given=given)
        return of_inventory(inventory, asked)

    def examine(self, wanted: Wanted, target: Target, now_s: float) -> Examined:
        """Read a run and ask its hosts what it is doing. now_s: by the clock of the store.

        Raises:
            RequestError: there is no such run.
        """
        run = runs.read(target.runs.directory(wanted.run_id))
        if run is None:
            raise RequestError(f"{wanted.runs_url}/{wanted.run_id}: there is no such run any more")
        known = runs.look(target.find_agents(run.described), run)
        state = runs.state(
            run, known.processes, unanswered=len(known.errors), knowing=known.knowing, now_s=now_s
        )
        return Examined(run=run, facts=_facts(run, state))

    def silent(self, target: Target) -> list[HostError]:
        return list(runs.look_at_all(target.agents).errors)

    def prepare(self, reopen: Callable[[], Target], require_there: Callable[[], None]) -> Target:
        """Wait until new hosts answer, and prepare them. require_there: raises once their slice is lost."""
        return recovery.prepared(reopen, self._say, require_there)

    def resume(
        self, run: Run, target: Target, now_s: Callable[[], float], require: Callable[[], object]
    ) -> Run:
        """Start the next attempt of a run with the code of its latest one, and return when every process has joined.

        now_s: the clock of the store. This machine's may be wrong, for which hosts would be refused. require: raises
        once the slice's lease is somebody else's.

        Where its directory does not have that code, it goes on with the code that this keeper was installed with.

        Raises:
            WrongRequestError: it cannot be resumed as it is described.
            launch.launch.LaunchFailed: they did not join.
        """
        request = dataclasses.replace(recovery.resuming(run), submitted=recovery.as_it_was(run))
        try:
            launching.work_out(request, target)
        except Unreachable:
            raise
        except RequestError as error:
            raise WrongRequestError(str(error)) from None
        leased = dataclasses.replace(target, alone=lambda: contextlib.nullcontext(require))
        return launching.launch(request, leased, self._say, now_s=now_s)

    def stop(self, run: Run, target: Target) -> None:
        """Stop a run with a checkpoint, as `fab stop` does, also where the keeper's own user has resumed it."""
        stop_processes(target.find_agents(run.described), run.run_id, run.attempt, grace_s=STOP_GRACE_S)

    def write_acts(self, wanted: Wanted, run: Run) -> None:
        """Write what was done about a run into its directory."""
        text = "".join(json.dumps(dict(act)) + "\n" for act in wanted.acts)
        run.directory.write_text(run_directory.KEEPER, text)


# --- how a keeper on a gateway logs in ------------------------------------------------------------------------------

# By OS Login as the gateway's own account, inside the network, without gcloud. The key is made here. It is in the
# folder that systemd makes in memory for the service (`/run`). OS Login knows it for a day, and it is replaced before
# that. On other machines the keeper logs in as `fab` does.
# https://cloud.google.com/compute/docs/oslogin/rest/v1/users/importSshPublicKey
VARIABLE = "TPU_STACK_KEEPER_LOGIN"
METADATA = "metadata"
"""The variable's value where the machine's account comes from Google's metadata server and hosts are in its network."""
ENDPOINT = "https://oslogin.googleapis.com"
SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)
ANSWER_LIMIT_S = 30.0
KEY_LIFE_S = 24 * 3600.0
RENEW_BEFORE_S = 4 * 3600.0
"""How long before its end a key is replaced, as a recovery may take a few hours."""


def from_here(inventory: Inventory, environ: Mapping[str, str]) -> Inventory:
    """Return the inventory with the hosts as this machine reaches them.

    Raises:
        HostError: OS Login does not take the key.
    """
    if environ.get(VARIABLE) != METADATA or inventory.project is None:
        return inventory
    from backends.vm.login import KEY_VARIABLE

    return inside(inventory, user(inventory.project, Path(environ[KEY_VARIABLE])))


def inside(inventory: Inventory, user_name: str) -> Inventory:
    """Return the inventory with every host reached at its internal address, as that user. Pure."""
    slices = tuple(
        dataclasses.replace(
            each,
            hosts=tuple(
                dataclasses.replace(host, reach="direct", external_address=None, user=user_name)
                for host in each.hosts
            ),
        )
        for each in inventory.slices
    )
    return dataclasses.replace(inventory, slices=slices)


def user(project: str, key: Path) -> str:
    """Return the user name of this machine's account. Makes `key` and adds it to the account where that is needed.

    Asks Google only where there is no key yet, or it is about to expire. Raises as `from_here`.
    """
    known = key.with_suffix(".json")
    try:
        found = json.loads(known.read_text(encoding="utf-8"))
        if key.exists() and clock_s() < float(found["renew_at_s"]):
            return str(found["user"])
    except (OSError, ValueError, LookupError, TypeError):
        pass
    import asyncssh  # which a quiet pass does without

    from backends.vm.login import user_of_profile

    known.unlink(missing_ok=True)
    fresh = asyncssh.generate_private_key("ssh-ed25519", comment="tpu-stack keeper")
    name = user_of_profile(_add_to_account(project, fresh.export_public_key("openssh").decode().strip()))
    atomic.write(key, fresh.export_private_key("openssh"), mode=0o600)
    # By a clock that begins with each boot, as the key does.
    atomic.write(known, json.dumps({"user": name, "renew_at_s": clock_s() + KEY_LIFE_S - RENEW_BEFORE_S}))
    return name


def _add_to_account(project: str, public_key: str) -> str:
    """Add a key to this machine's account in OS Login; return the account's profile as JSON."""
    import google.auth.compute_engine
    import google.auth.exceptions
    import google.auth.transport.requests

    try:
        account = google.auth.compute_engine.Credentials(scopes=SCOPES)  # type: ignore[no-untyped-call]
        account.refresh(google.auth.transport.requests.Request())  # type: ignore[no-untyped-call]
        session = google.auth.transport.requests.AuthorizedSession(account)  # type: ignore[no-untyped-call]
        answer = session.post(
            f"{ENDPOINT}/v1/users/{account.service_account_email}:importSshPublicKey",
            params={"projectId": project},
            json={"key": public_key, "expirationTimeUsec": str(int((time.time() + KEY_LIFE_S) * 1e6))},
            timeout=ANSWER_LIMIT_S,
        )
        if answer.status_code == 200:
            return json.dumps(answer.json().get("loginProfile", {}))
        why = str(answer.json()["error"]["message"])
    except (LookupError, TypeError, ValueError, google.auth.exceptions.GoogleAuthError, OSError) as error:
        why = str(error) or repr(error)
    raise HostError(
        host="",
        reason=f"OS Login does not take a key of this machine's account: {why.strip().splitlines()[0]}",
        remedy=(
            "`pulumi up` with tpu-stack:keeper: true gives the gateway its account and switches on the OS Login API"
        ),
    )
