"""`fab keeper install`: installs the keeper's code, environment and timer on the stack's gateway or on this machine.

Code and environment are in folders named by their hashes. Only the units say which of them are used. A pass that is
under way therefore ends with the code that it began with, and an interrupted installation changes nothing.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from backends.local.processes import LocalTransport
from backends.vm import deploy, python_environment
from backends.vm.access import gateway_access
from backends.vm.login import KEY_VARIABLE
from backends.vm.python_environment import Lock
from backends.vm.steps import Step, at_home, certificates
from contracts.errors import RequestError
from contracts.inventory import Gateway, Inventory
from keeper import gateway_login
from launch import jobs
from launch.code.bundles import Bundle, left_out_lines
from launch.hosts import HostError, Transport
from launch.jobs import CHECKOUT
from launch.output import say, terminal

FOLDERS = ("backends", "console", "contracts", "host", "infra", "jobs", "keeper", "launch", "requirements")
MODULES = ("asyncssh", "googleapiclient", "gcsfs", "tyro", "rich")
NAME = "tpu-stack-keeper"
EVERY_S = 60
PASS_LIMIT_S = 7200
"""The limit of one pass, in which a slice is served, its hosts are prepared, and a run starts."""
FIRST_PASS_S = 120
SHARE_OWNER = 1000
"""`infra.file_server.OWNER_ID`: as this user the keeper reads and writes run directories on the share."""
INHERITED_VARIABLES = (
    gateway_login.VARIABLE, KEY_VARIABLE, "PATH", "HTTPS_PROXY", "NO_PROXY", "CLOUDSDK_CONFIG",
    "GOOGLE_APPLICATION_CREDENTIALS",
)  # fmt: skip
"""Variables of this shell that a keeper on this machine gets."""
ADDRESSES_LIMIT_S = 60.0
CLOSED = (
    "RuntimeDirectoryPreserve", "NoNewPrivileges", "ProtectHome", "PrivateTmp", "PrivateDevices", "LockPersonality",
    "ProtectKernelTunables", "ProtectKernelModules", "ProtectControlGroups", "RestrictNamespaces", "RestrictSUIDSGID",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where a keeper is installed. name: of its units. root, units: folders. python: its interpreter.

    system: it is a service of the machine with a user of its own, and not of whoever installs it.
    environment: its variables. binds: folders that it sees under another path.
    """

    name: str
    root: str
    units: str
    python: str
    system: bool
    environment: tuple[tuple[str, str], ...]
    binds: tuple[tuple[str, str], ...] = ()

    @property
    def systemctl(self) -> str:
        return "systemctl" if self.system else "systemctl --user"

    def code(self, bundle: str) -> str:
        """The folder of a bundle by its SHA-256."""
        return f"{self.root}/code/{bundle[:16]}"


def gateway_place(inventory: Inventory, lock: Lock) -> Place:
    """Return the gateway, which sees the share's folder under the path where hosts mount it. Pure."""
    root, storage = f"/opt/{NAME}", inventory.storage
    own = storage.nfs_source.partition(":")[2] if storage.nfs_source else None
    return Place(
        name=NAME,
        root=root,
        units="/etc/systemd/system",
        python=f"{root}/venv-{lock.sha256[:16]}/bin/python",
        system=True,
        environment=(
            ("HOME", f"/var/lib/{NAME}"),
            (gateway_login.VARIABLE, gateway_login.METADATA),
            (KEY_VARIABLE, f"/run/{NAME}/id_ed25519"),
        ),
        binds=((own, storage.nfs_mount),) if own and storage.nfs_mount else (),
    )


def local_place(inventory: Inventory) -> Place:
    """Return this machine: a service of this user for each stack, with the environment of this checkout."""
    return Place(
        name=f"{NAME}-{inventory.stack}",
        root=f"~/.local/share/tpu-stack/keeper/{inventory.stack}",
        units="~/.config/systemd/user",
        python=sys.executable,
        system=False,
        environment=tuple((name, os.environ[name]) for name in INHERITED_VARIABLES if name in os.environ),
    )


def install(inventory: Inventory, *, on_this_machine: bool) -> int:
    """Carry out `fab keeper install`; 0 where a pass of the keeper has succeeded there.

    Raises:
        RequestError: the stack has no keeper, or no gateway to put it on.
        HostError: nobody knows the gateway's host key.
    """
    if not inventory.has_keeper:
        raise RequestError(
            f"the stack {inventory.stack} has no keeper; set tpu-stack:keeper: true, then `pulumi up`"
        )
    if inventory.slices and all(one_slice.pool for one_slice in inventory.slices):
        raise RequestError(
            f"the keeper is for TPU VMs, and all slices of {inventory.stack} are node pools, whose cluster starts pods "
            "again; set tpu-stack:keeper: false, then `pulumi up`"
        )
    bundle, lock = _bundle(), python_environment.read_lock("keeper", CHECKOUT, "")
    transport: Transport
    if on_this_machine:
        place, transport, host = local_place(inventory), LocalTransport(), "this machine"
    else:
        place = gateway_place(inventory, lock)
        transport, host = _gateway(inventory)
    sent = f"/var/tmp/{NAME}-{bundle.sha256[:16]}.tar.gz"
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "code")
        file.write_bytes(bundle.archive)
        transport.put(file, sent)
    tell = say(terminal())
    for line in left_out_lines([bundle]):
        tell(line)
    planned = steps(place, inventory, bundle, sent, lock)
    deployment = deploy.Deployment(
        host, planned, lambda result: tell(f"[{host}] {result.step}: {result.message}")
    )
    outcome = deployment.begin(transport).outcome()
    terminal().print(deploy.table([outcome]))
    tell(deploy.verdict([outcome]))
    return 1 if outcome.failed else 0


def _bundle() -> Bundle:
    return jobs.bundle(CHECKOUT, FOLDERS)


def _gateway(inventory: Inventory) -> tuple[Transport, str]:
    from backends.vm.connection import Ssh
    from backends.vm.transport import SshTransport

    gateway = inventory.gateway
    if gateway is None or inventory.project is None:
        raise RequestError(
            f"the stack {inventory.stack} has no gateway; `fab keeper install --here` takes this machine, or write "
            "kind: gateway in tpu-stack:storage.nfs, then `pulumi up`"
        )
    if not gateway.host_keys:
        gateway = dataclasses.replace(gateway, host_keys=_host_keys(gateway, inventory.project))
    return SshTransport(gateway_access(inventory, gateway), Ssh()), gateway.name


def _host_keys(gateway: Gateway, project: str) -> tuple[str, ...]:
    """Return the host keys that the gateway has published as guest attributes."""
    command = ["gcloud", "compute", "instances", "get-guest-attributes", gateway.name]
    command += [f"--zone={gateway.zone}", f"--project={project}", "--query-path=hostkeys/", "--format=json"]
    remedy = "is it running, and may this account read it? `" + shlex.join(command) + "`"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ADDRESSES_LIMIT_S, check=True)
        keys = tuple(f"{entry['key']} {entry['value']}" for entry in json.loads(done.stdout))
    except FileNotFoundError:
        raise HostError(
            host=gateway.name,
            reason="the command gcloud is not installed",
            remedy="install the Google Cloud CLI",
        ) from None
    except subprocess.SubprocessError as error:
        output = str(getattr(error, "stderr", None) or error).strip().splitlines()
        reason = next((line for line in output if line.startswith("ERROR")), output[-1])
        raise HostError(
            host=gateway.name, reason=f"its host keys cannot be read: {reason}", remedy=remedy
        ) from None
    except (ValueError, LookupError, TypeError):
        keys = ()
    if not keys:
        raise HostError(host=gateway.name, reason="it has published no host keys", remedy=remedy)
    return keys


# --- what is done there, pure -----------------------------------------------------------------------------------


def steps(place: Place, inventory: Inventory, bundle: Bundle, sent: str, lock: Lock) -> tuple[Step, ...]:
    """Return the steps that install a keeper, in order. sent: the path of the bundle on that machine."""
    code = place.code(bundle.sha256)
    before: tuple[Step, ...] = ()
    if place.system:
        uploaded = dataclasses.replace(lock, folder=f"{code}/requirements")
        step = python_environment.managed_environment(
            MODULES, uploaded, place.python.removesuffix("/bin/python")
        )
        environment = dataclasses.replace(
            step,
            root=True,
            needs=("certificates", "code"),
            # Where the service's user can read it, which /root is not; compiled, as it cannot write there.
            change=f"umask 022\nexport UV_PYTHON_INSTALL_DIR={place.root}/python UV_NO_CACHE=1 "
            f"UV_COMPILE_BYTECODE=1\n{step.change}",
        )
        before = (certificates(), _user())
    else:
        environment = python_environment.existing_python(place.python, MODULES, "`make install`")
    return (*before, _code(place, code, sent, bundle.sha256), environment, _service(place, code, inventory))


def _user() -> Step:
    return Step(
        name="user",
        check=f"id {NAME}",
        change=f"""
getent passwd {SHARE_OWNER} >/dev/null || owner='--uid {SHARE_OWNER}'
useradd --system $owner --user-group --home-dir /var/lib/{NAME} --shell /usr/sbin/nologin {NAME}
""",
        limit_s=30.0,
        root=True,
        remedy="see why useradd refuses it",
    )


def _code(place: Place, code: str, sent: str, sha256: str) -> Step:
    folder = at_home(code)
    return Step(
        name="code",
        check=f"[ -d {folder} ] || {{ echo {shlex.quote(code)}' is not there'; exit 1; }}\necho {shlex.quote(code)}",
        change=f"""
set -e
umask 022
new={folder}.new.$$
trap 'rm -rf "$new" "$new.tar"' EXIT
mkdir -p "$new"
cp {sent} "$new.tar"
echo "{sha256}  $new.tar" | sha256sum --check --status || {{ echo {sent}' is not what was sent'; exit 1; }}
tar --extract --gzip --no-same-owner --file "$new.tar" --directory "$new"
mv -T "$new" {folder} || [ -d {folder} ]  # somebody else may have been quicker
rm -f {sent}
""",
        limit_s=120.0,
        root=place.system,
        remedy="see that the disk has room",
    )


def _service(place: Place, code: str, inventory: Inventory) -> Step:
    """Return the step that writes the units and waits for a first pass, which shows whether the keeper works."""
    service, timer = f"{place.name}.service", f"{place.name}.timer"
    files = {service: service_unit(place, code, inventory), timer: timer_unit(inventory)}
    units, root, ctl = at_home(place.units), at_home(place.root), place.systemctl
    unit_texts = {f"{units}/{name}": shlex.quote(text) for name, text in files.items()}
    same = "\n".join(
        f"printf %s {text} | cmp -s - {path} || {{ echo {path}' is not there, or old'; exit 1; }}"
        for path, text in unit_texts.items()
    )
    # Not for others to read: a proxy's address may have a password in it.
    write = "\n".join(
        f"(umask 077 && printf %s {text} >{path}.new) && mv {path}.new {path}"
        for path, text in unit_texts.items()
    )
    stays = 'loginctl enable-linger || say "it runs only while you are logged in: sudo loginctl enable-linger $USER"'
    by_hand = f"cd {code} && {place.python} -m keeper --store {inventory.control}"
    systemd = f"""[ -d /run/systemd/system ] ||
  {{ echo "there is no systemd here; let another timer do: {by_hand}"; exit 1; }}"""
    # What the keeper itself has written, without systemd's own lines.
    field = "_SYSTEMD_UNIT" if place.system else "--user _SYSTEMD_USER_UNIT"
    last_line = f"$(journalctl --lines 1 --output cat --no-pager {field}={service} 2>/dev/null)"
    return Step(
        name="service",
        check=f"""
{systemd}
{same}
{ctl} is-active --quiet {timer} || {{ echo '{timer} is not active'; exit 1; }}
[ "$({ctl} show --property Result --value {service})" = success ] ||
  {{ echo "the last pass failed: {last_line}"; exit 1; }}
echo "a pass every {EVERY_S} s: {ctl} list-timers {timer}"
""",
        change=f"""
{systemd}
set -e
umask 022
{at_home(place.python)} -m compileall -q {at_home(code)}  # a pass cannot write there
mkdir -p {units}
{write}
{ctl} daemon-reload
{"" if place.system else stays}
{ctl} enable --quiet {timer}
{ctl} reset-failed {service} 2>/dev/null || :
{ctl} restart {timer}
say "waiting for the first pass"
status=0
timeout {FIRST_PASS_S} {ctl} start {service} 2>/dev/null || status=$?
case $status in
  0) ;;
  124) say "a pass is under way" ;;
  *) echo "the first pass failed: {last_line}"; exit 1 ;;
esac
# What was used before the last two installations, nobody uses any more.
touch {at_home(code)} {at_home(place.python.removesuffix("/bin/python"))}
for kind in code/ venv-; do
  ls -dt {root}/$kind* 2>/dev/null | tail -n +4 | while read -r old; do rm -rf "$old"; done
done
""",
        limit_s=FIRST_PASS_S + 60.0,
        root=place.system,
        needs=("code", "python"),
        remedy=f"journalctl {'' if place.system else '--user '}--unit {place.name}",
    )


def service_unit(place: Place, code: str, inventory: Inventory) -> str:
    """Return the service, which carries out one pass. As a service of the machine it may see and write little."""
    folder = f"%h{code[1:]}" if code.startswith("~/") else code
    lines = [
        f"[Unit]\nDescription=The keeper of tpu-stack {inventory.stack}: one look at its runs",
        "Wants=network-online.target\nAfter=network-online.target nfs-server.service\n",
        f"[Service]\nType=oneshot\nExecStart={place.python} -m keeper --store {inventory.control}",
        f"WorkingDirectory={folder}\nTimeoutStartSec={PASS_LIMIT_S}\nNice=5",
        # In quotes in a unit, % and backslashes mean something.
        *(
            'Environment="{}={}"'.format(name, re.sub(r'(["\\\\])', r"\\\1", value).replace("%", "%%"))
            for name, value in (("PYTHONUNBUFFERED", "1"), *place.environment)
        ),
    ]
    if place.system:
        lines += [f"{name}={NAME}" for name in ("User", "StateDirectory", "RuntimeDirectory")]
        lines += [
            "RuntimeDirectoryMode=0700",
            "MemoryMax=1G",
            "CapabilityBoundingSet=",
            "ProtectSystem=strict",
        ]
        lines += [f"{name}=yes" for name in CLOSED]
        lines += [
            "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
            "SystemCallArchitectures=native",
        ]
        lines += [f"BindPaths=-{source}:{target}" for source, target in place.binds]
    return "\n".join([*lines, ""])


def timer_unit(inventory: Inventory) -> str:
    """Return the timer. It uses monotonic clocks, so a change of the time of day does not disturb it."""
    return f"""[Unit]
Description=A look of the keeper of tpu-stack {inventory.stack} every {EVERY_S} s

[Timer]
OnBootSec=20
OnUnitActiveSec={EVERY_S}
AccuracySec=1

[Install]
WantedBy=timers.target
"""
