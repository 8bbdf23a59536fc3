"""`fab doctor --first-day`: what no machine but a real host can tell, as a text for a bug report without secrets."""

from __future__ import annotations

import getpass
import re
import sys
from collections.abc import Mapping, Sequence

from contracts.errors import RequestError
from launch import jobs
from launch.commands import verify
from launch.doctor import workstation
from launch.hosts import HostError, HostsError, ask_all
from launch.jobs import CHECKOUT
from launch.target import Target

E_MAIL = re.compile(r"[\w.+-]+@[\w-]+(\.[\w-]+)+")
SECRETS = (
    re.compile(r"\bya29\.[\w.-]+"),
    re.compile(
        r"(?i)\b((?:[\w-]*(?:token|password|passphrase|secret|credential|api[-_]?key)[\w-]*)\s*[=:]\s*)\S+"
    ),
    re.compile(r"-----BEGIN [^-]*PRIVATE KEY-----.*?(?:-----END [^-]*-----|$)", re.DOTALL),
)
PROCESS = ("RUN_PROCESS_ID", "jax.process_index()")
LEAST_NAME = 4
"""A shorter name, such as a user's, would be taken out of other words too."""


def first_day(target: Target, framework: str = "jax") -> int:
    """Print the text; 0 where a host answered."""
    print(
        "asking every host, then starting one process on each: a minute or two …", file=sys.stderr, flush=True
    )
    answers = ask_all(target.agents, "describe", [{} for _ in target.agents])
    hosts = [
        {"agent": str(each)} if isinstance(each, HostError) else {k: str(v) for k, v in each["found"].items()}
        for each in answers
    ]
    lines = [*about(target), *grouped(hosts), *processes(target, framework)]
    print("\n".join(["```", *(without_names(line, private(target, hosts)) for line in lines), "```"]))
    return 0 if any(not isinstance(each, HostError) for each in answers) else 1


def about(target: Target) -> list[str]:
    """This machine and the slice, as far as a reader of the report has to know them."""
    commit = jobs.commit_of(CHECKOUT)
    one = target.slice
    tools = [("pulumi", ["pulumi", "version"]), ("gcloud", ["gcloud", "version"])]
    said = [f"{name} {_first(workstation.ask(argv))}" for name, argv in tools]
    changed = " with changes" if commit and commit.is_dirty else ""
    keyed = sum(bool(host.host_keys) for host in target.hosts)
    return [
        f"tpu-stack {commit.hash[:12] if commit else '?'}{changed}, Python {sys.version.split()[0]}, {', '.join(said)}",
        f"slice: {one.accelerator_type} {one.topology} x {one.count} in {one.zone}, {one.capacity}",
        f"hosts: {len(target.hosts)} of {len(one.hosts)}, platform {target.platform}, with a known key {keyed}",
        f"made as: {one.origin.partition(' ')[0]}",
        f"reached: {', '.join(sorted({host.reach for host in target.hosts}))}",
        f"images: {', '.join(target.inventory.images) or 'none'}",
    ]


def _first(answer: workstation.Answer) -> str:
    if answer.exit_code is None:
        return "is not there"
    return (answer.stdout.strip() or answer.last_line).splitlines()[0]


def grouped(hosts: Sequence[Mapping[str, str]]) -> list[str]:
    """A line for each thing: once where all hosts say the same, else one for each of their answers. Pure."""
    titles = list(dict.fromkeys(title for host in hosts for title in host))
    lines = []
    for title in titles:
        by_text: dict[str, list[str]] = {}
        for index, host in enumerate(hosts):
            if title in host:
                by_text.setdefault(host[title], []).append(str(index))
        for text, indexes in by_text.items():
            whose = "" if len(indexes) == len(hosts) else f" [host {','.join(indexes)}]"
            lines.append(f"{title}{whose}: {text}")
    return lines


def processes(target: Target, framework: str) -> list[str]:
    """Both numbers of every process, from a group of them, or why there is none."""
    try:
        plan, failures, found = verify.gather(target, framework, None)
        verify.clear(target, plan)
    except (RequestError, HostError, HostsError) as error:
        return [f"{' and '.join(PROCESS)}: not known, for no group was formed: {error}"]
    told = [
        f"{index} and {each.get('process_index', '?')} ({each['local_devices']} of {each['devices']} devices)"
        for index, each in enumerate(found)
        if each is not None
    ]
    lines = [f"{' and '.join(PROCESS)}: {', '.join(told) or 'no process said any'}"]
    if found and found[0] is not None:
        kind = found[0]
        versions = ", ".join(f"{name} {version}" for name, version in kind["versions"].items())
        lines.append(f"devices: {kind['platform']}, {kind['device_kind']}; {versions}")
    return lines + [f"process: {each}" for each in failures]


def private(target: Target, hosts: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """What is told of nobody: name → what stands in its place."""
    inventory = target.inventory
    found = {inventory.project or "": "PROJECT", getpass.getuser(): "USER"}
    found |= {host.user or "": "USER" for host in target.hosts}
    found |= {(inventory.storage.bucket_url or "").removeprefix("gs://"): "BUCKET"}
    for host in hosts:
        home = re.search(r"/home/([\w.-]+)", host.get("python", ""))
        found |= {home[1]: "USER"} if home else {}
    return {name: word for name, word in found.items() if len(name) >= LEAST_NAME}


def without_names(text: str, names: Mapping[str, str]) -> str:
    """Without people, projects, and whatever looks like a credential. Pure."""
    for pattern in SECRETS:
        text = pattern.sub(lambda match: f"{match[1] if match.lastindex else ''}(left out)", text)
    text = E_MAIL.sub("E-MAIL", text)
    for name in sorted(names, key=len, reverse=True):
        text = re.sub(rf"(?<![\w]){re.escape(name)}(?![\w])", names[name], text)
    return text
