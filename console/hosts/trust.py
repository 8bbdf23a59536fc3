"""`fab trust`: host keys that a person has compared and confirmed, kept beside the inventory.

A host's key is published as a guest attribute, and `pulumi up` writes it into the inventory. Where an organisation's
policy forbids that, or what was published is of an earlier host, a person has to say which key is right. Nothing here
trusts a key by itself: it is shown, and compared with the one on the host, before it counts.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from backends.resolve import choose_hosts
from backends.vm import login
from backends.vm.access import ATTRIBUTES_POLICY, iap_tunnel
from backends.vm.transport import SshTransport
from contracts.aliases import Say
from contracts.errors import RequestError
from contracts.inventory import Host
from contracts.run_records import moment
from launch import inventories
from launch.targets import Target

FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")
FILES = {"ssh-ed25519": "ed25519", "ssh-rsa": "rsa"}
"""Of a key's kind the part of its file's name in /etc/ssh; every other kind is ECDSA."""
YES = "yes"

Answer = Callable[[str], str]


def trust(
    target: Target,
    path: Path,
    *,
    hosts: str | None,
    instance: str | None,
    fingerprint: str | None,
    answer: Answer | None = None,
    tell: Say = print,
) -> int:
    """Show the key of each host, ask, and keep what was confirmed; 0 where all of them are, else 1.

    path: the file of confirmed keys. hosts: None: all of them. instance: the name of the host's VM, where it has
    published none. fingerprint: compared already, so that nothing is asked. answer: gives a person's answer; without
    it the terminal's.

    Raises:
        RequestError: there is no such host, nobody can be asked, or the fingerprint is another.
        HostError: a host does not show its key.
    """
    target.require("trust")
    if fingerprint is not None and not FINGERPRINT.fullmatch(fingerprint):
        raise RequestError(
            f'--fingerprint: "{fingerprint}" is not a fingerprint; write it as `ssh-keygen -l` prints it, SHA256:…'
        )
    chosen = choose_hosts(target.slice.hosts, hosts)
    if len(chosen) > 1 and (instance is not None or fingerprint is not None):
        raise RequestError("--instance and --fingerprint are of one host: name one with --host")
    return max(_trust_host(target, host, path, instance, fingerprint, answer, tell) for host in chosen)


def _trust_host(
    target: Target,
    host: Host,
    path: Path,
    instance: str | None,
    fingerprint: str | None,
    answer: Answer | None,
    tell: Say,
) -> int:
    entries = inventories.read_keys(path)
    public_key = _shown(target, host, instance)
    mark = login.fingerprint(public_key.public_data)
    name = instance or host.name
    line = public_key.export_public_key().decode().split()
    key = f"{line[0]} {line[1]}"
    if key in host.host_keys and instance in (None, host.name):
        tell(f"host {host.index} ({name}) shows the key {mark}, which is known already: nothing to do")
        return 0
    for text in _warning_lines(target, host, name, line[0], mark, entries):
        tell(text)
    if not _is_confirmed(mark, fingerprint, answer):
        tell(f"nothing was stored: host {host.index} is as little trusted as before")
        return 1
    new = inventories.Trusted(
        slice=target.slice.name,
        index=host.index,
        name=name,
        internal_address=host.internal_address,
        host_key=key,
        confirmed=moment(time.time()),
    )
    kept_entries = [entry for entry in entries if (entry.slice, entry.index) != (new.slice, new.index)]
    inventories.write_keys(path, sorted([*kept_entries, new], key=lambda entry: (entry.slice, entry.index)))
    tell(f"host {host.index} is trusted by this key from now on; it is in {path}")
    return 0


def _shown(target: Target, host: Host, instance: str | None) -> Any:
    """Return the key that the host shows, without checking it."""
    transport = target.transports[[target_host.index for target_host in target.hosts].index(host.index)]
    assert isinstance(transport, SshTransport), "only a host that is reached over SSH has a key"
    access = transport.access
    is_first_of_iap = access.proxy_command is not None and access.through is None
    if instance is not None and target.inventory.project is not None:
        tunnel = iap_tunnel(instance, target.slice.zone, target.inventory.project, access.port)
        access = dataclasses.replace(access, proxy_command=tunnel, through=None, otherwise=None)
    elif is_first_of_iap and not host.host_keys and host.name == f"{target.slice.name}-{host.index}":
        raise RequestError(
            f"fab trust: host {host.index} has published no instance name, without which IAP makes no tunnel to it "
            f"(the organisation policy {ATTRIBUTES_POLICY} forbids that); say it with "
            f"--instance t1v-n-…-w-{host.index}: `hostname` prints it on the host"
        )
    return transport.host_key(access)


def _warning_lines(
    target: Target, host: Host, name: str, kind: str, mark: str, entries: Sequence[inventories.Trusted]
) -> list[str]:
    """Return what a person has to know before the answer."""
    before = [entry for entry in entries if (entry.slice, entry.index) == (target.slice.name, host.index)]
    fingerprints = [login.fingerprint(login.public_data(line)) for line in host.host_keys]
    lines = [f"host {host.index} ({name}) shows the host key", f"  {kind} {mark}"]
    if fingerprints:
        source = f"confirmed on {before[0].confirmed}" if before and before[0].name == name else "published"
        lines += [
            f"which is ANOTHER than the known one, {' and '.join(fingerprints)} ({source}).",
            "Either the host was made again or set up anew, or somebody is in between; only a comparison tells.",
        ]
    else:
        lines.append("which nothing is known of: anybody in between could show a key.")
    return [
        *lines,
        "Compare it on the host itself, reached by another way than this one, or by who set it up:",
        f"  ssh-keygen -lf /etc/ssh/ssh_host_{FILES.get(kind, 'ecdsa')}_key.pub",
    ]


def _is_confirmed(mark: str, fingerprint: str | None, answer: Answer | None) -> bool:
    if fingerprint is not None:
        if fingerprint != mark:
            raise RequestError(f"--fingerprint {fingerprint}: the host shows {mark}; nothing was stored")
        return True
    if answer is None:
        if not sys.stdin.isatty():
            raise RequestError(
                "fab trust: nobody is there to be asked, so nothing was stored; compare the fingerprint, then give it "
                "with --fingerprint SHA256:…"
            )
        answer = input
    return answer(f"Is it the same? Type {YES} to trust this key: ").strip() == YES
