"""Docker on a host, for runs in containers: installed, running, and allowed to the user who logs in. Pure."""

from __future__ import annotations

from launch.deploy.steps import APT_IS_FREE, PACKAGES_LIMIT_S, Step

# Who joins a group has it from the next log-in on; `sg` takes it at once, which is enough to see that it will work.
CHECK = """
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
CHANGE = f"""{APT_IS_FREE}
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


def step() -> Step:
    """Docker, from the distribution's own package where there is none."""
    return Step(
        name="docker",
        check=CHECK,
        change=CHANGE,
        limit_s=PACKAGES_LIMIT_S,
        root=True,
        needs=("certificates",),
        remedy="`journalctl --unit docker` on that host says why it does not start",
    )
