"""Docker's engine as this user meets it: the `docker` command, never without a limit, and its complaints."""

from __future__ import annotations

import os
import re

from .protocol import Failed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


ANSWER_LIMIT_S = 15.0
STARTING = "`sudo systemctl start docker`; why it does not run: `journalctl --unit docker`"
# What the command says → what to do about it. The first that is found counts; {user} is whoever runs the agent.
REMEDIES = (
    ("permission denied while trying to connect", "`sudo usermod --append --groups docker {user}`, then log in again"),
    ("dial unix .* permission denied", "`sudo usermod --append --groups docker {user}`, then log in again"),
    ("cannot connect to the docker daemon|is the docker daemon running", STARTING),
    ("unexpected eof|connection reset by peer", f"Docker went away meanwhile; {STARTING}"),
    ("no such image|unable to find image", "pull it; one that was built on this host: `fab build`"),
    ("could not select device driver.*gpu", "install the NVIDIA Container Toolkit on this host, and restart Docker"),
    ("gathering device information", "the device is gone; see `dmesg` on this host, or choose another one"),
    ("bind source path does not exist", "make that directory, or leave it out of the mounts"),
    ("tini.*executable file not found", "this is no image of `fab build`: those have tini; build or name another"),
    ("setpriv.*executable file not found", "your user id is larger than Docker takes: the image needs util-linux"),
    ("no space left on device", "`docker image ls` and `docker image rm` on this host, or a larger disk"),
)  # fmt: skip
# What the client itself reads; the rest of this agent's environment is none of its business.
READ_BY_CLIENT = re.compile("HOME|PATH|LANG|DOCKER_.*|XDG_.*|SSH_AUTH_SOCK")


class Answer:
    """What the command said. It is no success where `code` is not 0; None: there was no answer within the limit."""

    def __init__(self, code: int | None, out: str, complaint: str) -> None:
        self.code, self.out, self.complaint = code, out, complaint

    @property
    def is_good(self) -> bool:
        return self.code == 0


def program() -> str | None:
    """The `docker` command by its absolute path, if there is one."""
    import shutil

    found = shutil.which("docker")
    return None if found is None else os.path.abspath(found)


def required_program() -> str:
    found = program()
    if found is None:
        raise Failed(
            "there is no `docker` on this host's PATH", "`fab deploy` installs it; or `--runtime bare`"
        )
    return found


def client_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What of this agent's environment the client needs, and none of the host's other secrets."""
    return {name: value for name, value in environ.items() if READ_BY_CLIENT.fullmatch(name)}


def ask(
    arguments: list[str],
    limit_s: float = ANSWER_LIMIT_S,
    environment: Mapping[str, str] | None = None,
    docker: str | None = None,
) -> Answer:
    """Run `docker` with these arguments; a client that does not end within the limit is killed.

    environment: values for the names that the arguments pass on.

    Raises:
        Failed: there is no such command on this host.
    """
    import subprocess  # not at the top: every verb loads this file, and few ask Docker

    try:
        done = subprocess.run(
            [docker or required_program(), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd="/",
            env={**client_environment(os.environ), **(environment or {})},
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(None, "", f"Docker gave no answer within {limit_s:g} s")
    except OSError as error:
        raise Failed(
            f"{docker} cannot be run: {error.strerror}", "install Docker anew on this host"
        ) from None
    return Answer(
        done.returncode, done.stdout.decode(errors="replace"), core(done.stderr.decode(errors="replace"))
    )


def core(complaint: str) -> str:
    """What is wrong, in one line, without the command's own introduction and its warnings."""
    lines = [line.strip() for line in complaint.splitlines() if line.strip()]
    told = [line for line in lines if not re.match("WARNING|DEPRECATED|See '|Run '|time=", line)] or lines
    joined = " ".join(told[-3:])
    return re.sub(r"^(docker: )?(Error response from daemon: |Error: )?", "", joined)[:600]


def remedy_of(complaint: str, user: str, otherwise: str = STARTING) -> str:
    """What to do about a complaint. Pure."""
    for pattern, remedy in REMEDIES:
        if re.search(pattern, complaint, re.IGNORECASE | re.DOTALL):
            return remedy.format(user=user)
    return otherwise


def is_no_answer(complaint: str) -> bool:
    """Whether Docker is not there to be asked, as while it is being installed or restarted. Pure."""
    rule = "cannot connect to the docker|docker daemon running|no answer within|no `docker` on|unexpected eof"
    return re.search(rule, complaint, re.IGNORECASE) is not None


def failure(what: str, complaint: str) -> Failed:
    from .proc import user_name

    otherwise = "see what Docker says there; `docker info` on that host"
    return Failed(f"{what}: {complaint}", remedy_of(complaint, user_name(), otherwise))
