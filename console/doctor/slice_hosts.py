"""The slice and its hosts: what Google and the inventory say, what agents find, whether runs can be written."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from backends.host_backend import IN_USE
from backends.vm.access import ATTRIBUTES_POLICY
from backends.vm.deploy import FRAMEWORK
from console.doctor.check import Check, Finding, fail, ok, skip, warn
from console.doctor.workstation import Ask
from contracts.errors import message_line
from contracts.files import Files, is_url
from contracts.inventory import Inventory, Slice
from infra.catalogue import CatalogueError, accelerator, zone_region
from launch import plan as plans
from launch import pricing
from launch.hosts import HostError, ask_all
from launch.output import counted, last_line
from launch.remote_files import Buckets, with_time_limit
from launch.targets import Plan, Target

ALIKE = ("kernel", "cpus")
"""Facts in which the hosts of a slice do not differ."""
NOTHING = "0" * 64
"""Stands for a bundle of code that no host has: none is sent."""
MULTI_REGIONS = {"us": "us", "eu": "europe", "asia": "asia"}
EGRESS = "reading across regions is billed by the gigabyte"


def stack_checks(target: Target, ask: Ask) -> list[Check]:
    """Return the checks of the slice that can be made before one of its hosts is asked."""
    inventory, one_slice = target.inventory, target.slice
    checks = [
        Check("stack", "slice", lambda: slice_in_use(inventory, one_slice)),
        Check("stack", "regions", lambda: regions(inventory, one_slice)),
    ]
    if (project := inventory.project) is not None:
        checks.append(Check("stack", "capacity", lambda: request_state(ask, project, one_slice)))
    return checks


DESCRIBED = {
    "queued-resource": (["tpus", "queued-resources"], "state.state"),
    "node": (["tpus", "tpu-vm"], "state"),
    "group": (["instance-groups", "managed"], "status.appliedAcceleratorTopologies[0].state"),
    "instance": (["instances"], "status"),
}
"""By the kind of a slice's origin: the words behind `gcloud compute` that describe it, and where its state is."""


def request_state(ask: Ask, project: str, one_slice: Slice) -> Finding:
    """Ask Google for the state of what the slice came from: a queued resource, a node, a group or an instance."""
    kind, _, name = one_slice.origin.partition(" ")
    if kind not in DESCRIBED or not name:
        return skip(f"{one_slice.name} came from no request to Google's APIs")
    arguments, path = DESCRIBED[kind]
    # Of a multislice on Compute Engine, which has one for each slice, the first.
    name = f"{name}-0" if kind in ("group", "instance") and one_slice.count > 1 else name
    answer = ask(
        [
            "gcloud", "compute", *arguments, "describe", name,
            f"--zone={one_slice.zone}", f"--project={project}", f"--format=value({path})",
        ]
    )  # fmt: skip
    if answer.exit_code is None:
        return skip("cannot be asked without `gcloud`")
    again = "`fab recover`, or `pulumi up --refresh`"
    if answer.exit_code != 0:
        if re.search(r"NOT_FOUND|not found|404", answer.stderr):
            return fail(f"{one_slice.origin} is gone", again)
        return warn(f"{one_slice.origin} cannot be asked: {answer.last_line}", "`gcloud auth login`")
    state = answer.stdout.strip()
    if state in ("ACTIVE", "READY", "ACTIVE_DEGRADED", "RUNNING"):
        return ok(f"{one_slice.origin} is {state}")
    lost = state in ("SUSPENDED", "SUSPENDING", "FAILED", "PREEMPTED", "TERMINATED", "STOPPED", "INCOMPLETE")
    return (fail if lost else warn)(
        f"{one_slice.origin} is {state or 'in no state that it tells'}",
        again if lost else "wait, then `pulumi up --refresh`",
    )


def slice_in_use(inventory: Inventory, one_slice: Slice) -> list[Finding]:
    """Compare the slice's hosts with what its type has, and say what an hour of it costs."""
    other_slices = [candidate.name for candidate in inventory.slices if candidate.name != one_slice.name]
    also = f" (also there: {', '.join(other_slices)})" if other_slices else ""
    count = len(one_slice.hosts)
    findings = [
        ok(
            f"{one_slice.name}: {one_slice.accelerator_type} in {one_slice.zone}, {counted(count, 'host')}{also}"
        )
    ]
    try:
        kind = accelerator(one_slice.accelerator_type)
    except CatalogueError:
        return findings
    if count != kind.hosts * one_slice.count:
        findings.append(
            warn(
                f"{one_slice.accelerator_type} has {kind.hosts * one_slice.count} hosts, the inventory has {count}",
                "`pulumi up --refresh`: the others had published no host key when it was written",
            )
        )
    nameless = [str(host.index) for host in one_slice.hosts if not host.host_keys]
    if nameless:
        findings.append(
            warn(
                f"no host key is known of host {', '.join(nameless)}, so that nobody can be sure who answers",
                "`pulumi up --refresh` reads what they have published; where the organisation policy "
                f"{ATTRIBUTES_POLICY} holds, or in an inventory of your own: `fab trust --host {nameless[0]}`",
            )
        )
    cost = pricing.an_hour(one_slice)
    return [*findings, ok(cost) if pricing.list_price(one_slice) else skip(f"its price is {cost}")]


def regions(inventory: Inventory, one_slice: Slice) -> list[Finding]:
    """Check that the bucket and the images are in the region of the TPUs."""
    try:
        region = zone_region(one_slice.zone)
    except CatalogueError:
        return [skip(f"{one_slice.zone} is no zone of Google's")]
    findings = []
    bucket_region = inventory.storage.bucket_region
    if inventory.storage.bucket_url is not None and bucket_region is not None:
        findings.append(_region(f"the bucket {inventory.storage.bucket_url}", bucket_region.lower(), region))
    for stack, reference in sorted(inventory.images.items()):
        place = reference.partition("/")[0].removesuffix("-docker.pkg.dev")
        if place != reference.partition("/")[0]:
            findings.append(_region(f"the image of {stack}", place, region))
        if "@sha256:" not in reference:
            findings.append(
                warn(f"the image of {stack} is named by a tag: {reference}", "name it by its digest")
            )
    return findings or [skip("the stack has neither a bucket nor images")]


def _region(subject: str, place: str, region: str) -> Finding:
    if place == region:
        return ok(f"{subject} is in {region}, as the TPUs are")
    if MULTI_REGIONS.get(place, "-") == region.partition("-")[0]:
        return warn(
            f"{subject} is in the multi-region {place}, the TPUs in {region}",
            f"{EGRESS}: use one in {region}",
        )
    return warn(f"{subject} is in {place}, the TPUs in {region}", f"{EGRESS}: use one in {region}")


def dry_plan(target: Target) -> Plan:
    """Return a plan that nobody carries out: what a run would ask of the hosts."""
    return Plan(
        target=target,
        run_id="doctor",
        job="doctor",
        framework=FRAMEWORK,
        run_dir=target.runs_url,
        cwd=plans.HOME,
        bundle_sha256=NOTHING,
        container=plans.choose_container(target, FRAMEWORK, None),
    )


def reached(target: Target, indexes: Sequence[int]) -> list[Finding]:
    """Check that the hosts answer, and how long that takes; all are asked at once.

    The first time is the agent's own way in: unpacked where the host has not got it yet.
    """
    began_s = time.monotonic()
    agents = [target.agents[index] for index in indexes]
    answers = ask_all(agents, "list", [{"path": agent.root} for agent in agents])
    took_s = time.monotonic() - began_s
    findings = []
    for index, answer in zip(indexes, answers, strict=True):
        host = target.hosts[index]
        way = {"iap": "through IAP", "gateway": "through the gateway", "direct": "directly", "local": "here"}
        if isinstance(answer, HostError):
            findings.append(fail(f"{answer.reason} ({way[host.reach]})", answer.remedy, host=host.name))
        else:
            findings.append(ok(f"answers {way[host.reach]} ({took_s:.1f} s)", host=host.name))
    return findings


def preflight(target: Target) -> list[Finding]:
    """Return what a run would find on every host, each check of each."""
    plan = dry_plan(target)
    requests = [plans.preflight(plan, index, now_s=time.time()) for index in range(plan.processes)]
    answers = ask_all(target.agents, "preflight", requests)
    busy = runs_on(target)
    findings: list[Finding] = []
    for host, answer in zip(target.hosts, answers, strict=True):
        if isinstance(answer, HostError):
            findings.append(fail(answer.reason, answer.remedy, host=host.name, name="preflight"))
        else:
            findings += [_check(check, host.name, busy.get(host.name)) for check in answer["checks"]]
            findings += _facts(answer.get("facts", {}), host.name, target) if plan.container is None else []
    return [*findings, *_differing(answers, target)]


def runs_on(target: Target) -> dict[str, str]:
    """Return the run that each host is at work for, where it is."""
    request = {"run_id": None, "attempt": None, "process_id": None}
    answers = ask_all(target.agents, "status", [request] * len(target.agents))
    run_ids = {}
    for host, answer in zip(target.hosts, answers, strict=True):
        if not isinstance(answer, HostError):
            for entry in answer["processes"]:
                if entry["state"] in ("starting", "running"):
                    run_ids[host.name] = str(entry["run_id"])
    return run_ids


def _check(check: Mapping[str, Any], host: str, busy_with: str | None) -> Finding:
    name, message = str(check["name"]), str(check["message"])
    if check["ok"]:
        return ok(message, host=host, name=name)
    if busy_with is not None and name in IN_USE:
        remedy = f"`fab stop {busy_with}`"
        return warn(f"{message}: {busy_with} is running", remedy, host=host, name=name)
    return fail(message, str(check["remedy"] or ""), host=host, name=name)


def _facts(facts: Mapping[str, Any], host: str, target: Target) -> list[Finding]:
    """Return facts that no run needs today and somebody may look for. Absent facts say nothing."""
    if not target.inventory.images or "docker" not in facts:
        return []
    if facts["docker"]:
        return [ok("docker is there", host=host, name="docker")]
    message = "docker is not there, and the stack has images"
    return [warn(message, "take a runtime that has it", host=host, name="docker")]


def _differing(answers: Sequence[Mapping[str, Any] | HostError], target: Target) -> list[Finding]:
    """Hosts of one slice that are not alike."""
    findings = []
    for name in ALIKE:
        by_value: dict[str, list[str]] = {}
        for host, answer in zip(target.hosts, answers, strict=True):
            if not isinstance(answer, HostError) and name in answer.get("facts", {}):
                by_value.setdefault(str(answer["facts"][name]), []).append(host.name)
        if len(by_value) > 1:
            values = "; ".join(f"{value} on {', '.join(hosts)}" for value, hosts in by_value.items())
            findings.append(warn(f"not the same on all hosts: {values}", "make the slice again", name=name))
    return findings


AREA = "storage"
HERE_LIMIT_S = 45.0
PROBE_LIMIT_S = 90.0
ROLE = "roles/storage.objectUser"
# In the interpreter that jobs have, with the client library and the credentials that they have.
PROBE = """
import json, sys
url, text = sys.argv[1:]
try:
    import fsspec
    bucket = fsspec.core.url_to_fs(url, use_listings_cache=False)[0]
    bucket.pipe_file(url, text.encode())
    found = bucket.cat_file(url).decode()
    bucket.rm_file(url)
    print(json.dumps(None if found == text else "it was read back as something else"))
except Exception as error:
    print(json.dumps(type(error).__name__ + ": " + (str(error).splitlines() or [""])[0][:300]))
"""


def checks(target: Target) -> list[Check]:
    """Return the checks that runs can be written, from here and from the hosts."""
    bucket = target.inventory.storage.bucket_url
    checks = [Check(AREA, "runs", lambda: from_here(target.files, target.runs_url))]
    if target.runs_on_share and not target.capabilities.shares_host and len(target.hosts) > 1:
        checks.append(Check(AREA, "share", lambda: shared(target)))
    if bucket is not None and not target.runs_url.startswith(f"{bucket}/"):
        # What lies on a share is reached through the hosts; the bucket is not.
        checks.append(Check(AREA, "bucket", lambda: from_here(Buckets(), bucket)))
    if bucket is not None:
        checks.append(Check(AREA, "bucket from a host", lambda: from_host(target, bucket)))
    return checks


def from_here(files: Files, url: str) -> Finding:
    """Check that whoever launches runs can write and read there."""
    path, data = trial(url), secrets.token_hex(8).encode()

    def there_and_back() -> bytes | None:
        files.write(path, data)
        content = files.read([path])[0]
        files.remove(path)
        return content

    try:
        # A bucket's client library tries again by itself, for longer than anybody waits.
        content = with_time_limit(HERE_LIMIT_S, url, there_and_back)
    except HostError as error:
        is_host_error = error.host not in ("", url) and not is_url(error.host)
        return fail(f"{url}: {error.reason}", error.remedy, host=error.host if is_host_error else None)
    except Exception as error:  # every client library has errors of its own
        return fail(f"{url}: {message_line(error)}", _remedy(url))
    if content != data:
        return fail(f"{url}: what was written is not what is read", "look for a copy between here and there")
    return ok(f"{url} can be written and read from here")


def shared(target: Target) -> list[Finding]:
    """Check that all hosts read what one of them writes into the folder of runs."""
    path, text = trial(target.runs_url), secrets.token_hex(8)
    target.agents[0].ask("write", {"path": path, "text": text})
    request = {"paths": [path], "offsets": None, "limit_bytes": 1024}
    answers = ask_all(target.agents, "read", [request] * len(target.agents))
    target.agents[0].ask("remove", {"path": path})
    remedy = "mount one share there on all hosts, or keep runs in a bucket (--runs gs://…)"
    blind = [
        fail(f"does not see what {target.hosts[0].name} writes in {target.runs_url}", remedy, host=host.name)
        for host, answer in zip(target.hosts, answers, strict=True)
        if not isinstance(answer, HostError) and answer["files"][0]["text"] != text
    ]
    return blind or [ok(f"{target.runs_url} is the same folder on all hosts that answer")]


def from_host(target: Target, url: str) -> Finding:
    """Jobs write checkpoints with the host's own service account."""
    python = target.python
    shell = 'exec "$HOME"/"$0" -c "$@"' if python.startswith("~/") else 'exec "$0" -c "$@"'
    argv = ["sh", "-c", shell, python.removeprefix("~/"), PROBE, trial(url), secrets.token_hex(8)]
    done = target.transports[0].begin(argv, "", timeout_s=PROBE_LIMIT_S).result()
    host = target.hosts[0].name
    if done.exit_code is None:
        return fail(
            f"{url}: no answer within {PROBE_LIMIT_S:.0f} s", "see whether the host reaches Google", host=host
        )
    try:
        problem = json.loads(done.stdout)
    except ValueError:
        reason = last_line(done.stderr or done.stdout)
        return fail(f"{python} cannot try it: {reason}", "`fab deploy`", host=host)
    if problem is not None:
        return fail(f"{url}: {problem}", f"give the hosts' service account {ROLE} on it", host=host)
    return ok(f"{url} can be written and read", host=host)


def trial(url: str) -> str:
    return f"{url.rstrip('/')}/.tpu-stack-doctor-{secrets.token_hex(6)}"


def _remedy(url: str) -> str:
    return (
        f"have {ROLE} on it granted to you"
        if is_url(url)
        else "see to that folder: its disk, its owner, its mount"
    )
