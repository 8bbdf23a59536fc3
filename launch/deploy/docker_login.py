"""Docker logs in to the stack's image repository as the host's service account: a helper, and its name in Docker's
configuration. Pure."""

from __future__ import annotations

import base64
import hashlib
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from launch.deploy.steps import Step

HELPER = "/usr/local/bin/docker-credential-tpu-stack"
HELPER_NAME = "tpu-stack"
HELPER_TEXT = Path(__file__).with_name("credential_helper.py")
HAS_DOCKER = "command -v docker >/dev/null || { echo 'this host has no docker'; exit 1; }"
GOOGLES = re.compile(r"[a-z0-9-]+-docker\.pkg\.dev|([a-z]+\.)?gcr\.io")

# What else the file holds is somebody's own and stays. Others may read it half-written, so it is renamed.
CONFIGURATION = """
import json, os, sys
change, helper, registries = sys.argv[1] == "change", sys.argv[2], sys.argv[3:]
folder = os.environ.get("DOCKER_CONFIG") or os.path.expanduser("~/.docker")
path = os.path.join(folder, "config.json")
try:
    with open(path, encoding="utf-8") as file:
        settings = json.load(file)
except FileNotFoundError:
    settings = {}
except ValueError as error:
    sys.exit(print(path + " is not JSON: " + str(error)) or 1)
if not isinstance(settings, dict) or not isinstance(settings.get("credHelpers", {}), dict):
    sys.exit(print(path + " is no configuration of Docker") or 1)
helpers = settings.setdefault("credHelpers", {})
lacking = [name for name in registries if helpers.get(name) != helper]
if lacking and not change:
    sys.exit(print(path + " names no helper for " + ", ".join(lacking)) or 1)
if lacking:
    helpers.update(dict.fromkeys(lacking, helper))
    os.makedirs(folder, mode=0o700, exist_ok=True)
    beside = path + "." + str(os.getpid())
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump(settings, file, indent=2)
    os.replace(beside, path)
print("logs in to " + ", ".join(registries) + " as the service account")
"""


def registries(images: Iterable[str]) -> tuple[str, ...]:
    """The hosts of Google's registries among image references."""
    hosts = {image.partition("/")[0] for image in images}
    return tuple(sorted(host for host in hosts if GOOGLES.fullmatch(host)))


def steps(hosts: Sequence[str]) -> tuple[Step, ...]:
    """None where there is no image in a registry of Google's."""
    if not hosts:
        return ()
    text = HELPER_TEXT.read_bytes()
    digest = hashlib.sha256(text).hexdigest()
    arguments = shlex.join([HELPER_NAME, *hosts])
    code = shlex.quote(CONFIGURATION)
    return (
        Step(
            name="docker helper",
            when=HAS_DOCKER,
            check=f"""
echo "{digest}  {HELPER}" | sha256sum --check --status 2>/dev/null ||
  {{ echo "{HELPER} is not there, or old"; exit 1; }}
[ -x {HELPER} ] || {{ echo "{HELPER} cannot be run"; exit 1; }}
echo {HELPER}
""",
            change=f"""
set -e
umask 022
echo {base64.b64encode(text).decode()} | base64 -d >{HELPER}.new
chmod 0755 {HELPER}.new
mv {HELPER}.new {HELPER}
""",
            limit_s=30.0,
            root=True,
            remedy="see why that folder cannot be written",
        ),
        Step(
            name="docker log-in",
            when=HAS_DOCKER,
            check=f'"$PYTHON" -S -E -c {code} look {arguments}',
            change=f'"$PYTHON" -S -E -c {code} change {arguments}',
            limit_s=30.0,
            needs=("docker helper",),
            remedy="mend or remove that file",
        ),
    )
