"""What a host needs, as a list of steps: how it is seen that it is there, and how it is made. Pure."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

LOOK_LIMIT_S = 60.0
FIRST_BOOT_LIMIT_S = 300.0
PACKAGES_LIMIT_S = 900.0
SHARE_LIMIT_S = 240.0
SHELL_TOOLS = ("zsh", "byobu", "mosh")
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
SHARE_UNIT = "tpu-stack-share.service"
HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"
HUGE_PAGES_AT_BOOT = "/etc/tmpfiles.d/tpu-stack-huge-pages.conf"
STARTUP_UNIT = "google-startup-scripts.service"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One thing that a host needs. `when`, `check` and `change` are text for sh; their last line is the message.

    when: whether the step applies to this host at all (none: it does). check: whether it is in order (status 3: it is
    not, and nothing changes that, but no run needs it). change: makes it so, within `limit_s`; none: it is waited for
    that long. root: whether `change` needs root. needs: steps without which this one is not tried. needed: whether runs
    need it; where they do not, it failing is a warning.
    """

    name: str
    check: str
    change: str = ""
    when: str = ""
    limit_s: float = 0.0
    look_limit_s: float = LOOK_LIMIT_S
    root: bool = False
    needs: tuple[str, ...] = ()
    needed: bool = True
    remedy: str = ""


def to_json(steps: Sequence[Step]) -> str:
    """As `runner` takes them."""
    return json.dumps([dataclasses.asdict(step) for step in steps])


def at_home(path: str) -> str:
    """Return a path on a host as a word for sh; "~/" is the home directory there."""
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)


HAS_APT = "command -v apt-get >/dev/null || { echo 'this host has no apt'; exit 1; }"

# Who holds a lock is in the kernel's table, which everybody may read: pid in the fifth column, inode at the end.
APT_IS_FREE = """
apt_holder() {
  for lock in /var/lib/dpkg/lock-frontend /var/lib/dpkg/lock /var/lib/apt/lists/lock; do
    inode=$(stat -c %i "$lock" 2>/dev/null) || continue
    pid=$(awk -v inode="$inode" '$2 != "->" && $6 ~ ":" inode "$" { print $5; exit }' /proc/locks)
    [ -n "$pid" ] || continue
    echo "$(cat "/proc/$pid/comm" 2>/dev/null || echo 'a process') (pid $pid)"
    return
  done
}
wait_for_apt() {
  until=$(($(date +%s) + 600)) told=
  while holder=$(apt_holder); [ -n "$holder" ]; do
    [ "$holder" = "$told" ] || say "waiting for apt, which $holder holds"
    told=$holder
    [ "$(date +%s)" -lt "$until" ] || { echo "apt is still held by $holder after 600 s"; exit 1; }
    sleep 2
  done
}
apt_install() {
  wait_for_apt
  as_root dpkg --configure -a || return
  say "installing $*"
  # Somebody else may be quicker to the lock that was free just now.
  as_root apt-get -q -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 -o Acquire::http::Timeout=30 update || return
  as_root apt-get -q -y -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 -o Acquire::http::Timeout=30 \\
    --no-install-recommends install "$@"
}
"""


def first_boot() -> Step:
    """A fresh VM is still being set up when its sshd answers already.

    Some images have cloud-init and do not run it: after the boot nothing comes any more, and nothing here needs it.
    """
    return Step(
        name="first boot",
        when="command -v cloud-init >/dev/null || { echo 'this host has no cloud-init'; exit 1; }",
        check="""
state=$(cloud-init status 2>/dev/null | sed -n 's/^status: *//p')
case $state in
  done|disabled|degraded*) echo "cloud-init is through" ;;
  error*) echo "cloud-init is through, with errors (cloud-init status --long)" ;;
  'not run'*|'not started'*)
    boot=$(systemctl is-system-running 2>/dev/null)
    case $boot in
      initializing|starting) echo "cloud-init is at: $state, and the boot is under way"; exit 1 ;;
    esac
    echo "cloud-init was not run on this host: what an image leaves to it has not been done"
    exit 3 ;;
  *) echo "cloud-init is at: ${state:-no answer}"; exit 1 ;;
esac
""",
        limit_s=FIRST_BOOT_LIMIT_S,
        remedy="see `cloud-init status --long` and /var/log/cloud-init-output.log on that host",
    )


def certificates() -> Step:
    """What HTTPS needs; all else that the launcher uses comes with Python and sshd."""
    return Step(
        name="certificates",
        when=HAS_APT,
        check=f"[ -s {CERTIFICATES} ] || {{ echo 'there is no {CERTIFICATES}'; exit 1; }}; echo 'they are there'",
        change=f"{APT_IS_FREE}\napt_install ca-certificates",
        limit_s=PACKAGES_LIMIT_S,
        root=True,
        remedy="see that the host reaches its package mirror (Cloud NAT, Private Google Access)",
    )


def huge_pages(setting: str = HUGE_PAGES, at_boot: str = HUGE_PAGES_AT_BOOT) -> Step:
    """Transparent huge pages for all memory, now and after each boot.

    Without them libtpu starts and stops slowly from v5e on, as JAX itself warns (jax/_src/cloud_tpu_init.py). systemd
    writes at boot what a file in /etc/tmpfiles.d says.
    """
    return Step(
        name="huge pages",
        when=f"[ -e {setting} ] || {{ echo 'this kernel has no transparent huge pages'; exit 1; }}",
        check=f"""
grep -qF '[always]' {setting} || {{ echo "transparent huge pages are at: $(cat {setting})"; exit 1; }}
echo "transparent huge pages are on"
""",
        change=f"""
mkdir -p "$(dirname {at_boot})" && echo 'w {setting} - - - - always' >{at_boot}
echo always >{setting}
""",
        limit_s=30.0,
        root=True,
        needed=False,
        remedy="without them a TPU starts and stops slowly, no more; an administrator can write `always` to that file",
    )


def shell_tools() -> Step:
    """What people install by hand on a TPU VM."""
    listed = shlex.join(SHELL_TOOLS)
    return Step(
        name="comforts",
        when=HAS_APT,
        check=f"""
missing=
for package in {listed}; do
  dpkg-query -W -f '${{Status}}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
done
[ -z "$missing" ] || {{ echo "not installed:$missing"; exit 1; }}
echo "installed: {listed}"
""",
        change=f"{APT_IS_FREE}\napt_install {listed}",
        limit_s=PACKAGES_LIMIT_S,
        root=True,
        remedy="see that the host reaches its package mirror (Cloud NAT, Private Google Access)",
    )


def share(mount: str, source: str | None) -> Step:
    """The NFS share, which the host's start-up script mounts as a service; a service that gave up is started again."""
    at = shlex.quote(mount)
    return Step(
        name="share",
        check=f"""
awk -v at={at} '$2 == at {{ found = 1 }} END {{ exit !found }}' /proc/self/mounts ||
  {{ echo "nothing is mounted at "{at}; exit 1; }}
timeout 10 stat -t {at} >/dev/null 2>&1 || {{ echo {at}" is mounted, but its server does not answer"; exit 1; }}
echo "mounted at "{at}
""",
        change=f"""
is_mounted() {{ awk -v at={at} '$2 == at {{ found = 1 }} END {{ exit !found }}' /proc/self/mounts; }}
state() {{ systemctl show --property ActiveState --value "$1" 2>/dev/null; }}
[ -d /run/systemd/system ] && systemctl cat {SHARE_UNIT} >/dev/null 2>&1 ||
  [ "$(state {STARTUP_UNIT})" = activating ] ||
  {{ echo "nothing is mounted at "{at}", and this host has no {SHARE_UNIT}"; exit 1; }}
if ! is_mounted; then
  # The start-up script, or a try of the service itself, may be under way.
  while [ "$(state {STARTUP_UNIT})" = activating ] || [ "$(state {SHARE_UNIT})" = activating ]; do
    [ "$told" = yes ] || say "the host is mounting it"
    told=yes
    is_mounted && exit 0
    sleep 2
  done
  is_mounted && exit 0
fi
say "restarting {SHARE_UNIT}"
systemctl reset-failed {SHARE_UNIT} 2>/dev/null
timeout 120 systemctl restart {SHARE_UNIT} || {{
  journalctl --unit {SHARE_UNIT} --no-pager --lines 2 --output cat
  exit 1
}}
""",
        limit_s=SHARE_LIMIT_S,
        root=True,
        remedy=f"see that {source or 'its server'} is up; on the host: journalctl --unit {SHARE_UNIT}",
    )


def folders(paths: Sequence[str], needs: Sequence[str] = ()) -> Step:
    """Folders that the user of a run writes to."""
    quoted_paths = " ".join(at_home(path) for path in paths)
    return Step(
        name="folders",
        check=f"""
for path in {quoted_paths}; do
  [ -d "$path" ] || {{ echo "$path is not there"; exit 1; }}
  trial=$(mktemp "$path/.deploy-trial.XXXXXX" 2>&1) || {{ echo "$path cannot be written: ${{trial##*: }}"; exit 1; }}
  printf x >"$trial" || {{ rm -f "$trial"; echo "$path cannot be written: is the disk full?"; exit 1; }}
  rm -f "$trial"
done
echo {shlex.quote(", ".join(paths))}
""",
        change=f"mkdir -p {quoted_paths}",
        limit_s=60.0,
        needs=tuple(needs),
        remedy="free some space on that disk, or give the folder to the user that logs in",
    )


# Who joins a group has it from the next log-in on; `sg` takes it at once, which is enough to see that it will work.
DOCKER_CHECK = """
command -v docker >/dev/null || { echo 'there is no docker'; exit 1; }
ask() { timeout 20 docker version --format '{{.Server.Version}}' 2>&1; }
said=$(ask) || said=$(sg docker -c "timeout 20 docker version --format '{{.Server.Version}}'" 2>/dev/null) || {
  said=$(ask)
  case $said in
    *'permission denied'*) echo "$(id -un) may not use Docker" ;;
    *) echo "Docker does not answer: $(printf '%s\\n' "$said" | tail -n 1)" ;;
  esac
  exit 1
}
echo "Docker $said"
"""
DOCKER_CHANGE = f"""{APT_IS_FREE}
set -e
command -v docker >/dev/null || apt_install docker.io
if [ -d /run/systemd/system ]; then
  say "starting Docker"
  systemctl enable --now docker
fi
user=${{SUDO_USER:-$(id -un)}}
getent group docker >/dev/null || groupadd --system docker
[ "$user" = root ] || usermod --append --groups docker "$user"
"""


def docker() -> Step:
    """Docker, from the distribution's own package where there is none."""
    return Step(
        name="docker",
        check=DOCKER_CHECK,
        change=DOCKER_CHANGE,
        limit_s=PACKAGES_LIMIT_S,
        root=True,
        needs=("certificates",),
        remedy="`journalctl --unit docker` on that host says why it does not start",
    )


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
    """Return the hosts of Google's registries among image references."""
    hosts = {image.partition("/")[0] for image in images}
    return tuple(sorted(host for host in hosts if GOOGLES.fullmatch(host)))


def docker_login(hosts: Sequence[str]) -> tuple[Step, ...]:
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
            remedy="fix or remove that file",
        ),
    )
