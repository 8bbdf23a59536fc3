"""This machine: interpreter, packages, checkout, disks, command-line tools, SSH keys, Google accounts."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.metadata
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from backends.vm import login
from backends.vm.access import NEW_KEY
from console.doctor.check import Check, Finding, fail, ok, skip, warn
from contracts.errors import message_line
from launch import jobs
from launch.output import last_line

AREA = "this machine"
LEAST_PYTHON = (3, 12)
LITTLE_BYTES, TOO_LITTLE_BYTES = 2 * 2**30, 256 * 2**20
COMMAND_LIMIT_S = 30.0
LEAST_GCLOUD = 478
GCLOUD_LOGIN = "`gcloud auth login`; `gcloud auth application-default login` is another login, Pulumi's"
ADC_REMEDY = "`gcloud auth application-default login`"
ANSWER_LIMIT_S = 20.0
PERMISSIONS = {
    "iap.tunnelInstances.accessViaIAP": "roles/iap.tunnelResourceAccessor",
    "compute.instances.osLogin": "roles/compute.osLogin",
}
"""What logging in through IAP takes, and the role that gives it (`tpu-stack:access` grants both)."""
BUCKET_VARIABLE = "STORAGE_EMULATOR_HOST"
Test = Callable[[str, Sequence[str]], Sequence[str]]
PIN = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^]]*\])?==([^\s;\\]+)[^\S\n]*(;)?", re.MULTILINE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What a command of this machine came to. `exit_code` None: it is not installed; -1: it was not done in time."""

    exit_code: int | None
    stdout: str = ""
    stderr: str = ""

    @property
    def last_line(self) -> str:
        return last_line(self.stderr.strip() or self.stdout)


Ask = Callable[[Sequence[str]], Answer]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Where `fab` runs, as far as a check looks at it. ask: runs a command."""

    environ: Mapping[str, str]
    home: Path
    checkout: Path
    cache_dir: Path
    ask: Ask


def ask(argv: Sequence[str]) -> Answer:
    """Run a command with a limit; it is asked nothing, so it must not ask anything either."""
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=COMMAND_LIMIT_S,
            check=False,
        )
    except FileNotFoundError:
        return Answer(exit_code=None)
    except subprocess.TimeoutExpired:
        return Answer(exit_code=-1, stderr=f"no answer within {COMMAND_LIMIT_S:.0f} s")
    return Answer(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr)


def checks(machine: Machine, *, needs_pulumi: bool) -> list[Check]:
    checks = [
        Check(AREA, "python", python),
        Check(AREA, "packages", lambda: packages(machine.checkout / "requirements" / "run.txt")),
        Check(AREA, "checkout", lambda: checkout(machine.checkout)),
        Check(AREA, "disk", lambda: [disk(path) for path in (machine.checkout, machine.cache_dir)]),
    ]
    if needs_pulumi:
        checks.append(Check(AREA, "pulumi", lambda: pulumi(machine.ask)))
        checks.append(Check(AREA, "pulumi login", lambda: pulumi_login(machine.ask)))
    return checks


def python(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> Finding:
    text = ".".join(map(str, version))
    if version[:2] < LEAST_PYTHON:
        return fail(
            f"this is Python {text}; 3.12 or later is needed", "`make install PYTHON=/path/to/python3.12`"
        )
    return ok(f"Python {text}, {sys.executable}")


def packages(lock: Path, installed: Callable[[str], str] = importlib.metadata.version) -> Finding:
    """Compare what is installed with the lock. What a marker may leave out is looked at if it is there."""
    wrong, count = [], 0
    for name, pinned, marker in PIN.findall(lock.read_text(encoding="utf-8")):
        try:
            have = installed(name)
        except importlib.metadata.PackageNotFoundError:
            wrong += [] if marker else [f"{name} {pinned} is missing"]
            continue
        count += 1
        if have != pinned:
            wrong.append(f"{name} is {have}, not {pinned}")
    if not wrong:
        return ok(f"all {count} as in requirements/{lock.name}")
    more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
    return fail(f"not as in requirements/{lock.name}: {', '.join(wrong[:5])}{more}", "`make install`")


def checkout(folder: Path) -> Finding:
    commit = jobs.git_commit(folder)
    if commit is None:
        return warn(
            f"{folder} is no git checkout with a commit",
            "runs cannot name the code that they were made with; `git clone`, or `git init` and commit",
        )
    if commit.is_dirty:
        return warn(
            f"commit {commit.hash[:12]}, with changes that no commit has",
            "commit them, so that a run's code can be found again",
        )
    return ok(f"commit {commit.hash[:12]}")


def disk(path: Path, free_bytes: int | None = None) -> Finding:
    while not path.exists():
        path = path.parent
    free = shutil.disk_usage(path).free if free_bytes is None else free_bytes
    message = f"{path} has {free / 2**30:.1f} GiB free"
    if free >= LITTLE_BYTES:
        return ok(message)
    return (fail if free < TOO_LITTLE_BYTES else warn)(
        message, "remove old runs (`fab runs --all`) or caches"
    )


def pulumi(ask: Ask, package: str | None = None) -> Finding:
    """Check the command line: it may be newer than the Python package, but not of an earlier minor version."""
    package = package or importlib.metadata.version("pulumi")
    answer = ask(["pulumi", "version"])
    if answer.exit_code is None:
        return warn(
            "`pulumi` is not on PATH",
            "needed for --stack NAME, `pulumi up` and `fab recover`: https://www.pulumi.com/docs/install",
        )
    have = re.search(r"v?(\d+)\.(\d+)\.\d+", answer.stdout)
    if answer.exit_code != 0 or have is None:
        return warn(f"`pulumi version` says: {answer.last_line}", "see that it is Pulumi's command line")
    minimum = tuple(map(int, package.split(".")[:2]))
    if (int(have[1]), int(have[2])) < minimum and int(have[1]) <= minimum[0]:
        return warn(
            f"the command line is {have[0]}, its Python package {package}",
            "install a command line as new as that",
        )
    return ok(f"{have[0]}")


def pulumi_login(ask: Ask) -> Finding:
    """Check that Pulumi knows where the states of stacks are kept."""
    answer = ask(["pulumi", "whoami", "--non-interactive"])
    if answer.exit_code is None:
        return skip("cannot be asked without `pulumi`")
    if answer.exit_code != 0:
        return warn(
            f"`pulumi whoami` says: {answer.last_line}",
            "`pulumi login`; with stacks in a bucket `pulumi login gs://BUCKET`, or here `pulumi login --local`",
        )
    return ok("there is one")


def gcloud(ask: Ask) -> list[Finding]:
    """gcloud: new enough, and with an account of its own, which application default credentials are not."""
    version = ask(["gcloud", "version", "--format=json"])
    if version.exit_code is None:
        return [
            fail(
                "`gcloud` is not on PATH",
                "install the Google Cloud CLI: https://cloud.google.com/sdk/docs/install",
            )
        ]
    return [gcloud_version(version), gcloud_account(ask)]


def gcloud_version(answer: Answer) -> Finding:
    """Check the version: before 478 (May 2024), a tunnel asked about the instance, which for a TPU's is refused."""
    have = re.search(r'"Google Cloud SDK": *"(\d+)[.\d]*"', answer.stdout)
    if have is None:
        return warn(f"`gcloud version` says: {answer.last_line}", "see that it is the Google Cloud CLI")
    if int(have[1]) < LEAST_GCLOUD:
        return fail(
            f"gcloud is version {have[1]}, and {LEAST_GCLOUD} or later is needed for tunnels to TPU hosts",
            "`gcloud components update`, or by the package manager that installed it",
        )
    return ok(f"version {have[1]}")


def gcloud_account(ask: Ask) -> Finding:
    answer = ask(["gcloud", "auth", "list", "--filter=status:ACTIVE", "--format=value(account)"])
    if answer.exit_code != 0:
        return fail(f"`gcloud auth list` says: {answer.last_line}", GCLOUD_LOGIN)
    accounts = answer.stdout.split()
    if not accounts:
        return fail("gcloud has no account", GCLOUD_LOGIN)
    return ok(f"as {accounts[0]}")


def usable(machine: Machine) -> list[Finding]:
    """Check that a key can be used without anybody typing, and say why others cannot."""
    identities = _load(machine)
    findings = [ok(f"{len(identities.keys)} to log in with: {', '.join(identities.names)}")]
    findings += [warn(reason, "`ssh-add` puts a key into the agent") for reason in identities.kept_back]
    open_to_others = [
        path
        for path in login.files(machine.environ, machine.home)
        if path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o077
    ]
    return findings + [
        warn(f"{path} can be read by others, and `fab ssh` refuses it", f"chmod 600 {path}")
        for path in open_to_others
    ]


def os_login(machine: Machine) -> list[Finding]:
    """Check that the account has a user name on the hosts, and that one of this machine's keys is known there."""
    answer = machine.ask(login.PROFILE)
    if answer.exit_code is None:
        return [fail("cannot be asked without `gcloud`", "install it")]
    if answer.exit_code != 0:
        return [fail(f"`{' '.join(login.PROFILE)}` says: {answer.last_line}", "`gcloud auth login`")]
    account_keys, keys = login.known_keys(answer.stdout), _load(machine)
    named = ", ".join(login.fingerprint(key.public_data) for key in keys.keys)
    if not account_keys:
        return [
            warn(
                f"OS Login knows no key of your account yet; the first connection adds {keys.names[0]}",
                f"or now: {NEW_KEY}",
            )
        ]
    user = login.user_of_profile(answer.stdout)
    ours = [key for key in keys.keys if key.public_data in account_keys]
    if ours:
        return [ok(f"user {user}, with {len(ours)} of the keys above")]
    return [fail(f"user {user}, but OS Login knows none of this machine's keys ({named})", NEW_KEY)]


def _load(machine: Machine) -> login.Identities:
    async def load() -> login.Identities:
        identities = await login.load(machine.environ, machine.home)
        await identities.close()
        return identities

    return asyncio.run(load())


def default_credentials(environ: Mapping[str, str]) -> Finding:
    """Check the credentials that Pulumi and the bucket's client library use. No token is shown."""
    if environ.get(BUCKET_VARIABLE):
        return skip(f"not needed: ${BUCKET_VARIABLE} names a stand-in for Google's buckets")
    import google.auth.exceptions

    try:
        credentials, project = _credentials()
    except google.auth.exceptions.DefaultCredentialsError:
        return fail("there are no application default credentials", ADC_REMEDY)
    except google.auth.exceptions.RefreshError as error:
        return fail(f"the application default credentials are refused: {message_line(error)}", ADC_REMEDY)
    except google.auth.exceptions.TransportError as error:
        return warn(
            f"Google cannot be asked: {message_line(error)}", "see that this machine reaches googleapis.com"
        )
    account = getattr(credentials, "service_account_email", None) or "a person"
    return ok(f"of {account}" + (f", project {project}" if project else ""))


def _credentials() -> tuple[Any, str | None]:
    import google.auth
    import google.auth.transport.requests

    credentials, project = google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])
    request = google.auth.transport.requests.Request()

    def limited(*arguments: Any, **options: Any) -> Any:
        return request(*arguments, **{**options, "timeout": ANSWER_LIMIT_S})

    credentials.refresh(limited)  # type: ignore[no-untyped-call]
    return credentials, project


def tested_permissions(project: str, permissions: Sequence[str]) -> Sequence[str]:
    """Return those of the permissions that the caller has in the project, as Resource Manager says."""
    import google.auth.transport.requests

    session = google.auth.transport.requests.AuthorizedSession(_credentials()[0])  # type: ignore[no-untyped-call]
    answer = session.post(
        f"https://cloudresourcemanager.googleapis.com/v1/projects/{project}:testIamPermissions",
        json={"permissions": list(permissions)},
        timeout=ANSWER_LIMIT_S,
    )
    answer.raise_for_status()
    return [str(permission) for permission in answer.json().get("permissions", [])]


def roles(project: str, environ: Mapping[str, str], test: Test = tested_permissions) -> list[Finding]:
    """Check that the account may tunnel and log in. A role for single machines does not show: no failure."""
    if environ.get(BUCKET_VARIABLE):
        return [skip("not asked: this is a rehearsal")]
    try:
        have = test(project, list(PERMISSIONS))
    except Exception as error:  # whichever library refuses, it is only a question less answered
        return [
            warn(
                f"the roles in {project} cannot be asked: {message_line(error)}",
                "logging in below shows them",
            )
        ]
    lacking = {name: role for name, role in PERMISSIONS.items() if name not in have}
    if not lacking:
        return [ok(f"may tunnel through IAP and log in to {project}")]
    return [
        warn(
            f"{name} is not granted in {project}",
            f"have an administrator give you {role} (`tpu-stack:access`)",
        )
        for name, role in lacking.items()
    ]
