"""Where runs lie: written, read and removed again, from this machine and from the first host."""

from __future__ import annotations

import json
import secrets
import threading

from contracts.files import Files, is_url
from launch.agents import ask_all
from launch.buckets import Buckets
from launch.doctor.finding import Check, Said, fail, ok
from launch.errors import HostError
from launch.target import Target

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
