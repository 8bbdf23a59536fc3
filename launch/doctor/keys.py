"""The keys that this machine logs in with, and whether OS Login knows them."""

from __future__ import annotations

import asyncio
import stat

from launch.doctor.finding import Said, fail, ok, warn
from launch.doctor.machine import Machine
from launch.ssh import identities, login
from launch.ssh.problems import NEW_KEY


def usable(machine: Machine) -> list[Said]:
    """Whether there is a key that can be used without anybody typing, and why others cannot."""
    found = _load(machine)
    said = [ok(f"{len(found.keys)} to log in with: {', '.join(found.names)}")]
    said += [warn(reason, "`ssh-add` puts a key into the agent") for reason in found.kept_back]
    open_to_others = [
        path
        for path in identities.files(machine.environ, machine.home)
        if path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o077
    ]
    return said + [
        warn(f"{path} can be read by others, and `fab ssh` refuses it", f"chmod 600 {path}")
        for path in open_to_others
    ]


def os_login(machine: Machine) -> list[Said]:
    """Whether the account has a user name on the hosts, and one of this machine's keys is known there."""
    answer = machine.ask(login.PROFILE)
    if answer.exit_code is None:
        return [fail("cannot be asked without `gcloud`", "install it")]
    if answer.exit_code != 0:
        return [fail(f"`{' '.join(login.PROFILE)}` says: {answer.last_line}", "`gcloud auth login`")]
    known, keys = login.known_keys(answer.stdout), _load(machine)
    named = ", ".join(identities.fingerprint(key.public_data) for key in keys.keys)
    if not known:
        return [
            warn(
                f"OS Login knows no key of your account yet; the first connection adds {keys.names[0]}",
                f"or now: {NEW_KEY}",
            )
        ]
    user = login.user_of_profile(answer.stdout)
    ours = [key for key in keys.keys if key.public_data in known]
    if ours:
        return [ok(f"user {user}, with {len(ours)} of the keys above")]
    return [fail(f"user {user}, but OS Login knows none of this machine's keys ({named})", NEW_KEY)]


def _load(machine: Machine) -> identities.Identities:
    async def load() -> identities.Identities:
        found = await identities.load(machine.environ, machine.home)
        await found.close()
        return found

    return asyncio.run(load())
