"""The hosts: whether each is reached, what its agent finds there, and whether runs can be written where they lie."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from contracts.files import Files, is_url
from launch import plan as plans
from launch.doctor.check import Check, Said, fail, ok
from launch.hosts import HostError, ask_all
from launch.plan import Plan
from launch.remote_files import Buckets
from launch.target import Target

IN_USE = ("device", "lockfile", "leftovers")
"""Checks that fail of a host that is at work, which is no fault of the host."""
ALIKE = ("kernel", "cpus")
"""Facts in which the hosts of a slice do not differ."""
NOTHING = "0" * 64
"""Stands for a bundle of code that no host has: none is sent."""


def asked(target: Target, framework: str) -> Plan:
    """A plan that nobody carries out: what a run would ask of the hosts."""
    return plans.on(
        target,
        run_id="doctor",
        job="doctor",
        framework=framework,
        run_dir=target.runs_url,
        cwd=plans.HOME,
        bundle_sha256=NOTHING,
        container=plans.choose_container(target, framework, None, plans.built_here),
    )


def reached(target: Target, indexes: Sequence[int]) -> list[Said]:
    """Whether the hosts answer, and how long that takes; all are asked at once.

    The first time is the agent's own way in: unpacked where the host has not got it yet.
    """
    began_s = time.monotonic()
    agents = [target.agents[index] for index in indexes]
    answers = ask_all(agents, "list", [{"path": agent.root} for agent in agents])
    took_s = time.monotonic() - began_s
    said = []
    for index, answer in zip(indexes, answers, strict=True):
        host = target.hosts[index]
        way = {"iap": "through IAP", "gateway": "through the gateway", "direct": "directly", "local": "here"}
        if isinstance(answer, HostError):
            said.append(fail(f"{answer.reason} ({way[host.reach]})", answer.remedy, host=host.name))
        else:
            said.append(ok(f"answers {way[host.reach]} ({took_s:.1f} s)", host=host.name))
    return said


def preflight(target: Target, framework: str) -> list[Said]:
    """What a run would find on every host, each check of each."""
    plan = asked(target, framework)
    requests = [plans.preflight(plan, index, now_s=time.time()) for index in range(plan.processes)]
    answers = ask_all(target.agents, "preflight", requests)
    busy = runs_on(target)
    said: list[Said] = []
    for host, answer in zip(target.hosts, answers, strict=True):
        if isinstance(answer, HostError):
            said.append(Said("fail", answer.reason, answer.remedy, host.name, "preflight"))
        else:
            said += [_check(each, host.name, busy.get(host.name)) for each in answer["checks"]]
            said += _facts(answer.get("facts", {}), host.name, target) if plan.container is None else []
    return [*said, *_differing(answers, target)]


def runs_on(target: Target) -> dict[str, str]:
    """The run that each host is at work for, where it is."""
    request = {"run_id": None, "attempt": None, "process_id": None}
    answers = ask_all(target.agents, "status", [request] * len(target.agents))
    found = {}
    for host, answer in zip(target.hosts, answers, strict=True):
        if not isinstance(answer, HostError):
            for entry in answer["processes"]:
                if entry["state"] in ("starting", "running"):
                    found[host.name] = str(entry["run_id"])
    return found


def _check(check: Mapping[str, Any], host: str, busy_with: str | None) -> Said:
    name, message = str(check["name"]), str(check["message"])
    if check["ok"]:
        return Said("ok", message, "", host, name)
    if busy_with is not None and name in IN_USE:
        return Said("warn", f"{message}: {busy_with} is running", f"`fab stop --run {busy_with}`", host, name)
    return Said("fail", message, str(check["remedy"] or ""), host, name)


def _facts(facts: Mapping[str, Any], host: str, target: Target) -> list[Said]:
    """What no run needs today and somebody may look for. Absent facts say nothing."""
    if target.is_local or not target.inventory.images or "docker" not in facts:
        return []
    if facts["docker"]:
        return [Said("ok", "docker is there", "", host, "docker")]
    return [
        Said(
            "warn",
            "docker is not there, and the stack has images",
            "take a runtime that has it",
            host,
            "docker",
        )
    ]


def _differing(answers: Sequence[Mapping[str, Any] | HostError], target: Target) -> list[Said]:
    """Hosts of one slice that are not alike."""
    said = []
    for name in ALIKE:
        by_value: dict[str, list[str]] = {}
        for host, answer in zip(target.hosts, answers, strict=True):
            if not isinstance(answer, HostError) and name in answer.get("facts", {}):
                by_value.setdefault(str(answer["facts"][name]), []).append(host.name)
        if len(by_value) > 1:
            told = "; ".join(f"{value} on {', '.join(hosts)}" for value, hosts in by_value.items())
            said.append(
                Said("warn", f"not the same on all hosts: {told}", "make the slice again", None, name)
            )
    return said


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
    bucket = target.inventory.storage.bucket_url
    found = [Check(AREA, "runs", lambda: from_here(target.files, target.runs_url))]
    if target.runs_on_share and not target.is_local and len(target.hosts) > 1:
        found.append(Check(AREA, "share", lambda: shared(target)))
    if bucket is not None and not target.runs_url.startswith(f"{bucket}/"):
        # What lies on a share is reached through the hosts; the bucket is not.
        found.append(Check(AREA, "bucket", lambda: from_here(Buckets(), bucket)))
    if bucket is not None:
        found.append(Check(AREA, "bucket from a host", lambda: from_host(target, bucket)))
    return found


def from_here(files: Files, url: str) -> Said:
    """Whether whoever launches runs can write and read there."""
    said: list[Said] = []
    # A bucket's client library tries again by itself, for longer than anybody waits; then its thread is left behind.
    thread = threading.Thread(target=lambda: said.append(_try(files, url)), daemon=True)
    thread.start()
    thread.join(HERE_LIMIT_S)
    if not said:
        return fail(f"{url}: no answer within {HERE_LIMIT_S:.0f} s", "see whether this machine reaches it")
    return said[0]


def _try(files: Files, url: str) -> Said:
    path, data = trial(url), secrets.token_hex(8).encode()
    try:
        files.write(path, data)
        found = files.read([path])[0]
        files.remove(path)
    except HostError as error:
        of_a_host = error.host and not is_url(error.host)
        return fail(f"{url}: {error.reason}", error.remedy, host=error.host if of_a_host else None)
    except Exception as error:  # every client library has errors of its own
        return fail(f"{url}: {_first_line(error)}", _remedy(url))
    if found != data:
        return fail(f"{url}: what was written is not what is read", "look for a copy between here and there")
    return ok(f"{url} can be written and read from here")


def shared(target: Target) -> list[Said]:
    """Whether what one host writes into the folder of runs is what all others read there."""
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


def from_host(target: Target, url: str) -> Said:
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
        said = (done.stderr or done.stdout).strip().splitlines()
        return fail(
            f"{python} cannot try it: {said[-1] if said else 'it said nothing'}", "`fab deploy`", host=host
        )
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


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0][:300] if lines else type(error).__name__
