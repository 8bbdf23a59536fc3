"""Requests and answers: the verbs, what each request must hold, and a session that carries them out in order."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal

from contracts.errors import os_error_reason, remedy_for
from contracts.host_interface import PROTOCOL_VERSION

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeAlias

    from contracts.aliases import Json as Json

    Kind: TypeAlias = tuple[Callable[[Any], bool], str]
    from typing import BinaryIO, TextIO


class Refused(Exception):
    """The request is wrong: whoever sent it has to change it."""

    status = 2

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.message, self.remedy = message, remedy


class Failed(Refused):
    """The request is right and this host could not carry it out."""

    status = 1


def check(name: str, message: str, remedy: str | None = None) -> Json:
    """Return one finding of an answer; what needs a remedy is not in order."""
    return {"name": name, "ok": remedy is None, "message": message, "remedy": remedy}


def is_text(value: object) -> bool:
    """Whether the kernel can take `value` as an argument or a path: no NUL, nothing that UTF-8 cannot say."""
    return isinstance(value, str) and "\0" not in value and not re.search("[\ud800-\udfff]", value)


def is_whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_number(value: object, low: float, high: float) -> bool:
    numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
    return numeric and low <= value <= high  # type: ignore[operator]


def matches(pattern: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None


def is_path(value: object) -> bool:
    return isinstance(value, str) and is_text(value) and value[:1] in ("/", "~")


def is_peer(value: object) -> bool:
    return (
        isinstance(value, dict)
        and all(is_text(value.get(name)) and value[name] for name in ("name", "host"))
        and is_whole(value.get("port"), 1, 65535)
    )


def is_list_with(is_item: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_item, value))


def is_environment(value: object) -> bool:
    return isinstance(value, dict) and all(
        is_text(name) and name != "" and "=" not in name and is_text(text) for name, text in value.items()
    )


IMAGE = r"sha256:[0-9a-f]{64}|[a-z0-9][a-z0-9.-]*(:[0-9]+)?(/[a-z0-9._-]+)+@sha256:[0-9a-f]{64}"


def is_image(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(IMAGE, value) is not None


def is_optional_size(value: object) -> bool:
    return value is None or is_whole(value, 1, 1 << 62)


def is_container(value: object) -> bool:
    return (
        isinstance(value, dict)
        and is_image(value.get("image"))
        and value.get("platform") in ("cpu", "gpu", "tpu")
        and all(is_list_with(is_path)(value.get(name)) for name in ("mounts", "read_only_mounts"))
        and is_optional_size(value.get("shm_bytes"))
        and value.get("access") in (None, "devices", "privileged")
    )


def is_image_here(value: object) -> bool:
    return (
        isinstance(value, dict)
        and is_image(value.get("image"))
        and is_list_with(is_path)(value.get("mounts"))
        and is_optional_size(value.get("size_bytes"))
    )


LARGEST_READ = 16 << 20
KINDS: dict[str, Kind] = {
    "text": (lambda value: is_text(value) and value != "", "a string that is not empty"),
    "name": (matches(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"), "letters, digits, '.', '_' and '-', 128 at most"),
    "sha256": (matches("[0-9a-f]{64}"), "64 hexadecimal digits"),
    "path": (is_path, "a path starting with / or ~"),
    "paths": (is_list_with(is_path), "a list of paths starting with / or ~"),
    "content": (lambda value: isinstance(value, str) and is_text(value.replace("\0", "")), "a string"),
    "flag": (lambda value: isinstance(value, bool), "true or false"),
    "peers": (is_list_with(is_peer), "a list of objects with name, host and port"),
    "platform": (matches("cpu|gpu|tpu"), "cpu, gpu or tpu"),
    "count": (lambda value: is_whole(value, 0, 1 << 31), "a whole number from 0"),
    "positive": (lambda value: is_whole(value, 1, 1 << 31), "a whole number from 1"),
    "port": (lambda value: is_whole(value, 1, 65535), "a whole number from 1 to 65535"),
    "bytes": (lambda value: is_whole(value, 0, 1 << 62), "a whole number from 0"),
    "offset": (lambda value: is_whole(value, -(1 << 62), 1 << 62), "a whole number"),
    "limit": (lambda value: is_whole(value, 4, LARGEST_READ), f"a whole number from 4 to {LARGEST_READ}"),
    "seconds": (lambda value: is_number(value, 0, 86400 * 30), "a number of seconds from 0 to 30 days"),
    "time": (lambda value: is_number(value, 0, 1e12), "seconds since 1970"),
    "offsets": (is_list_with(lambda item: is_whole(item, -(1 << 62), 1 << 62)), "a list of whole numbers"),
    "texts": (is_list_with(is_text), "a list of strings"),
    "argv": (
        lambda value: is_list_with(is_text)(value) and value[:1] not in ([], [""]),
        "a list of strings, the program first",
    ),
    "env": (is_environment, "an object of names and strings"),
    "image": (is_image, "an image by digest, HOST/PATH@sha256:…, or the id of one here, sha256:…"),
    "container": (
        is_container,
        "an object with image (HOST/PATH@sha256:… or sha256:…), platform, mounts, read_only_mounts, shm_bytes, access",
    ),
    "image_here": (
        is_image_here,
        "an object with image (HOST/PATH@sha256:… or sha256:…), mounts and size_bytes",
    ),
    "cpus": (
        lambda value: value != [] and is_list_with(lambda item: is_whole(item, 0, 1 << 16))(value),
        "a list of CPU numbers that is not empty",
    ),
}


def decoded(body: bytes) -> Json:
    """The object that a request's text holds.

    Raises:
        Refused: it is not one JSON object.
    """
    try:
        request = json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise Refused(f"the request is not JSON: {error}", "send one JSON object") from None
    if not isinstance(request, dict):
        raise Refused("the request is not a JSON object", "send one JSON object")
    return request


def checked(verb: str, fields: str, request: Json) -> Json:
    """The request with every field checked; an absent optional field is None.

    `fields` are names and kinds, as in VERBS.

    Raises:
        Refused: another version, or any field missing or of another kind; it names all of them.
    """
    version = request.get("version")
    if not is_whole(version, PROTOCOL_VERSION, PROTOCOL_VERSION):
        raise Refused(
            f"the request has version {shown(version)}, this agent speaks version {PROTOCOL_VERSION}",
            "use the launcher and the agent of one checkout",
        )
    values: Json = {}
    mistakes = []
    for field in fields.split():
        name, _, kind = field.rstrip("?").partition(":")
        is_right, rule = KINDS[kind]
        value = values[name] = request.get(name)
        if value is None:
            mistakes += [] if field.endswith("?") else [f"{name} is missing; it is {rule}"]
        elif not is_right(value):
            mistakes.append(f"{name} is {shown(value)}; it must be {rule}")
        elif kind in ("path", "paths"):
            paths = [os.path.expanduser(path) for path in ([value] if kind == "path" else value)]
            mistakes += [
                f"{name} is {shown(path)}; this host knows no such home directory"
                for path in paths
                if not os.path.isabs(path)
            ]
            values[name] = paths[0] if kind == "path" else paths
        elif kind in ("container", "image_here"):
            lists = {name: value[name] for name in ("mounts", "read_only_mounts") if name in value}
            expanded = {name: [os.path.expanduser(path) for path in lists[name]] for name in lists}
            values[name] = {**value, **expanded}
    if mistakes:
        raise Refused(f"{verb}: " + "; ".join(mistakes), "correct the request")
    return values


def shown(value: object) -> str:
    """`value` for a message: short, and the kind alone of what may hold secrets, as an environment does."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


ONE_PROCESS = "run_id:name attempt:count process_id:count"
PLACES = "run_dir:path? cache_dir:path mount:path? min_free_bytes:bytes bundle:sha256?"
HOST = "python:text modules:texts python_remedy:text? platform:platform peers:peers? alone:flag?"
PORTS = "port:port? free_ports:positive?"
CLOCK = "time:time max_clock_offset_s:seconds"
DEVICE_FIELDS = "device_globs:texts? lockfiles:texts?"
PROGRAM = "argv:argv env:env cwd:path log_path:path run_dir:path? num_processes:positive cpus:cpus?"
LIVENESS = "liveness_host:text liveness_port:port liveness_token:text assemble_s:seconds? silence_s:seconds?"
LIMITS = (
    "hang_floor_s:seconds? heartbeat_limit_s:seconds? budget_s:count? budget_reason:text? slice_ends_s:time?"
)
# Each verb with its module and function, and its fields; one with a question mark may be absent or null.
VERBS: dict[str, tuple[str, str]] = {
    "preflight": (
        "preflight.preflight",
        f"{HOST} {PORTS} {PLACES} {CLOCK} {DEVICE_FIELDS} container:image_here?",
    ),
    "stage": (
        "storage.staged_bundles.stage",
        "sha256:sha256 archive_base64:text? offset:bytes? size_bytes:bytes? archive_path:text?",
    ),
    "start": (
        "start.start",
        f"{ONE_PROCESS} {PROGRAM} {LIVENESS} {LIMITS} container:container? secrets:env? worker_env:env?",
    ),
    "pull": (
        "containers.image_pull.pull",
        "image:image attempts:positive min_free_bytes:bytes limit_s:seconds?",
    ),
    "describe": ("host_facts.describe", ""),
    "join": ("attempt_process.join", f"{ONE_PROCESS} limit_s:seconds"),
    "status": ("attempt_process.status", "run_id:name? attempt:count? process_id:count?"),
    "stop": ("attempt_process.stop", "run_id:name attempt:count? process_id:count? grace_s:seconds"),
    "logs": ("attempt_process.logs", f"{ONE_PROCESS} offset:offset limit_bytes:limit"),
    "stacks": (
        "stack_traces.stacks",
        f"{ONE_PROCESS} timeout_s:seconds py_spy:sha256? own_command:flag?",
    ),
    "shell": ("shell.shell", ONE_PROCESS),
    "profile": ("attempt_process.profile", f"{ONE_PROCESS} id:name steps:count? first:count?"),
    "read": (
        "storage.host_files.read_slices",
        "paths:paths offsets:offsets? limit_bytes:limit folders:paths?",
    ),
    "write": ("storage.host_files.write_file", "path:path text:content offset:bytes?"),
    "create": ("storage.host_files.create_file", "path:path text:content"),
    "move": ("storage.host_files.move_file", "path:path to:path"),
    "list": ("storage.host_files.list_names", "path:path"),
    "remove": ("storage.host_files.remove_file", "path:path"),
    "folder_bytes": ("storage.host_files.folder_bytes", "path:path"),
    "remove_folder": ("storage.host_files.remove_folder", "path:path first:name"),
}


def verb_function(verb: str) -> Callable[[Json], Json]:
    """The function of a verb. Its module alone is loaded: start-up is paid on every host.

    Raises:
        Failed: the agent's own files are not what they were, as after a crash of the host.
    """
    module, _, function = VERBS[verb][0].rpartition(".")
    try:
        action: Callable[[Json], Json] = getattr(importlib.import_module(f".{module}", __package__), function)
    except (ImportError, SyntaxError, ValueError, AttributeError) as error:
        agent_dir = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        raise Failed(
            f"the agent in {agent_dir} is damaged: {error}", f"on that host: rm -r {agent_dir}"
        ) from None
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
        return {"version": PROTOCOL_VERSION, "ok": True, **verb_function(name)(request)}, 0
    except Refused as error:
        return refusal(error.message, error.remedy), error.status
    except OSError as error:
        return refusal(f"{name}: {os_error_reason(error)}", remedy_for(error)), 1
    except Exception as error:
        import traceback

        traceback.print_exc()
        message = f"{name}: the agent has a bug: {type(error).__name__}: {error}"
        return refusal(message, "the traceback is on the agent's stderr; report it"), 1


def refusal(message: str, remedy: str) -> Json:
    return {"version": PROTOCOL_VERSION, "ok": False, "error": {"message": message, "remedy": remedy}}


LONGEST_LINE = 1 << 28


def serve(first: bytes, requests: BinaryIO, answers: TextIO, idle_limit_s: int) -> int:
    """Answer `first` and what follows it, until the input ends or nothing has come for the limit.

    A line without its end is a request that its sender could not finish; it is not carried out.
    """
    line = first
    while line.endswith(b"\n") or len(line) == LONGEST_LINE:
        signal.alarm(0)
        if line.endswith(b"\n"):
            answer, _ = respond(None, line)
        else:
            answer = refusal(f"a request is longer than {LONGEST_LINE} bytes", "send less at once")
            while line and not line.endswith(b"\n"):
                line = requests.readline(LONGEST_LINE)
        try:
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
        except BrokenPipeError:
            os._exit(0)  # nobody reads; at its end the interpreter would try once more and complain
        signal.alarm(idle_limit_s)
        line = requests.readline(LONGEST_LINE)
    return 0
