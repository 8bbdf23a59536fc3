"""The verb preflight: whether a job can start here."""

from __future__ import annotations

import os
import time

from .bundles import bundle_dir
from .checks import check_clock, check_port
from .devices import check_device, check_lockfiles
from .docker_checks import check_docker
from .facts import facts
from .interpreter import REMEDY, check_python
from .leftovers import check_leftovers
from .mounts import check_mount
from .peers import check_peers
from .places import check_room, free_bytes, lies_in, look_at

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .protocol import Json


def preflight(request: Json) -> Json:
    """Whether a job can start here; looks at everything, so that one visit finds all there is to mend."""
    now = time.time()
    proc_root = request["proc_root"] or "/proc"
    # The interpreter takes longest, and works while the rest is looked at.
    bare = request["container"] is None
    python = (
        check_python(request["python"], request["modules"], request["python_remedy"] or REMEDY)
        if bare
        else None
    )
    checks = [] if request["mount"] is None else [check_mount(request["mount"])]
    is_mounted = all(check["ok"] for check in checks)
    places = [
        look_at(name, request[name])
        for name in ("root", "run_dir", "cache_dir")
        if request[name] is not None and (is_mounted or not lies_in(request[name], request["mount"]))
    ]
    checks += [place["check"] for place in places]
    checks += check_room(places, request["min_free_bytes"])
    if request["port"] is not None:
        checks.append(check_port(request["port"], proc_root))
    checks.append(check_clock(now - request["time"], request["max_clock_offset_s"]))
    checks.append(check_device(request["platform"], request["device_globs"], proc_root))
    checks += check_lockfiles(request["platform"], request["lockfiles"], proc_root)
    if request["alone"]:
        checks += check_leftovers(request["root"], not bare)
    checks += check_peers(request["peers"]) if request["peers"] else []
    bundle = request["bundle"]
    known = {
        **facts(),
        "time": now,
        "clock_offset_s": now - request["time"],
        "bundle_present": bool(bundle) and os.path.isdir(bundle_dir(request["root"], bundle)),
        "free_bytes": free_bytes(places),
    }
    if python is not None:
        return {"checks": [python(), *checks], "facts": known}
    found, of_docker = check_docker(request)
    return {"checks": [*found, *checks], "facts": {**known, **of_docker}}
