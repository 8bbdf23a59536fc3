"""The verbs: where each is carried out, its fields and their kinds, and the one response to whatever came."""

from __future__ import annotations

import importlib
import os

from .protocol import VERSION, Failed, Refused, checked, decoded, reason_of, remedy_for

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .protocol import Json

ONE = "run_id:name attempt:count process_id:count"
PLACES = "run_dir:path? cache_dir:path mount:path? min_free_bytes:bytes bundle:sha256?"
HOST = "python:text modules:texts python_remedy:text? platform:platform port:port? peers:peers? alone:flag?"
CLOCK = "time:time max_clock_offset_s:seconds"
WHERE = "device_globs:texts? lockfiles:texts? proc_root:path?"
PROGRAM = "argv:argv env:env cwd:path log_path:path run_dir:path? num_processes:positive cpus:cpus?"
HUB = "hub_host:text? hub_port:port? hub_token:text? assemble_s:seconds? silence_s:seconds?"
LIMITS = "hang_floor_s:seconds? heartbeat_limit_s:seconds?"
# Each verb with its module and function, and its fields; one with a question mark may be absent or null.
VERBS: dict[str, tuple[str, str]] = {
    "preflight": ("preflight.preflight", f"{HOST} {PLACES} {CLOCK} {WHERE} container:image_here?"),
    "stage": ("bundles.stage", "sha256:sha256 archive_base64:text?"),
    "start": (
        "start.start",
        f"{ONE} {PROGRAM} settle_s:seconds? {HUB} {LIMITS} container:container?",
    ),
    "pull": ("pull.pull", "image:image attempts:positive min_free_bytes:bytes keep:texts? limit_s:seconds?"),
    "describe": ("describe.describe", ""),
    "prune": ("prune.prune", "keep:texts"),
    "join": ("join.join", f"{ONE} limit_s:seconds"),
    "status": ("status.status", "run_id:name? attempt:count? process_id:count?"),
    "stop": ("stop.stop", "run_id:name attempt:count? process_id:count? grace_s:seconds"),
    "logs": ("logs.logs", f"{ONE} offset:offset limit_bytes:limit"),
    "stacks": ("stacks.stacks", f"{ONE} timeout_s:seconds"),
    "read": ("disk.read", "paths:paths offsets:offsets? limit_bytes:limit"),
    "write": ("disk.write", "path:path text:content"),
    "list": ("disk.names", "path:path"),
    "remove": ("disk.remove", "path:path"),
}


def action_of(verb: str) -> Callable[[Json], Json]:
    """The function of a verb. Its module alone is loaded: start-up is paid on every host.

    Raises:
        Failed: the agent's own files are not what they were, as after a crash of the host.
    """
    module, _, function = VERBS[verb][0].partition(".")
    try:
        action: Callable[[Json], Json] = getattr(importlib.import_module(f".{module}", __package__), function)
    except (ImportError, SyntaxError, ValueError, AttributeError) as error:
        here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        raise Failed(f"the agent in {here} is damaged: {error}", f"on that host: rm -r {here}") from None
    return action


def respond(verb: str | None, body: bytes) -> tuple[Json, int]:
    """The response to one request and the exit status that goes with it; never raises.

    Without a verb the request itself has to say it.
    """
    try:
        if not os.path.exists("/proc/self/stat"):
            raise Failed("this host has no /proc", "run the agent on Linux with /proc mounted")
        request = decoded(body)
        name = request.get("verb") if verb is None else verb
        if not isinstance(name, str) or name not in VERBS:
            raise Refused(f"{name!r} is not a verb of this agent", f"use one of {', '.join(sorted(VERBS))}")
        request = checked(name, f"root:path {VERBS[name][1]}", request)
        return {"version": VERSION, "ok": True, **action_of(name)(request)}, 0
    except Refused as error:
        return refusal(error.message, error.remedy), error.status
    except OSError as error:
        return refusal(f"{name}: {reason_of(error)}", remedy_for(error)), 1
    except Exception as error:
        import traceback

        traceback.print_exc()
        message = f"{name}: the agent has a bug: {type(error).__name__}: {error}"
        return refusal(message, "the traceback is on the agent's stderr; report it"), 1


def refusal(message: str, remedy: str) -> Json:
    return {"version": VERSION, "ok": False, "error": {"message": message, "remedy": remedy}}
