"""`fab notify`, and what it configures: messages about the end of a run, to Slack, a webhook or by e-mail.

An address is a secret, because whoever knows a webhook's can write there. So addresses come from the environment, as
they are or as the name of a secret in Secret Manager, and no message, log or state contains one. A channel that fails
is a line for the user; it raises nothing and delays nothing by more than LIMIT_S.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import email.message
import functools
import html
import os
import re
import smtplib
import ssl
import time
import urllib.parse
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from contracts import run_directory
from contracts.aliases import Say
from contracts.errors import DONE, FAILED, RequestError, Unreachable
from contracts.run_directory import RunDirectory, State
from launch import pricing, runs
from launch.hosts import HostError, in_thread
from launch.output import printable, say, terminal
from launch.runs import Run

Kind = Literal["done", "failed", "preempted", "recovered", "out of budget", "idle", "test"]
KINDS: tuple[Kind, ...] = ("done", "failed", "preempted", "recovered", "out of budget", "idle")
LIMIT_S = 10.0
"""For all channels together, the reading of their secrets included."""
VARIABLES = {
    "slack": "TPU_STACK_SLACK_WEBHOOK",
    "webhook": "TPU_STACK_WEBHOOK",
    "e-mail": "TPU_STACK_SMTP",
}
"""Channel → the variable with its address, or with SECRET and the secret's name: secret:projects/P/secrets/NAME."""
KINDS_VARIABLE = "TPU_STACK_NOTIFY"
"""The variable with the kinds that are sent, separated by commas; without it all are."""
SECRET = "secret:"
SECRET_NAME = re.compile(r"projects/[^/\s]+/secrets/[\w-]+(/versions/\w+)?")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
NONE = (
    "no channel is set; put the address of one into "
    f"{', '.join(f'${variable}' for variable in VARIABLES.values())} (docs/monitoring.md)"
)

KIND_OF_STATE: dict[str, Kind] = {
    "done": "done",
    "failed": "failed",
    "hung": "failed",
    "lost": "failed",
    "preempted": "preempted",
    "recovered": "recovered",
}
LONGEST_TEXT = 1000

type ReadSecret = Callable[[str], str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """What happened. text: a sentence or two. run, name, attempt: of the run that it is about. cost_usd: so far."""

    kind: Kind
    text: str
    run: str = ""
    name: str | None = None
    attempt: int | None = None
    stack: str = ""
    cost_usd: float | None = None

    @property
    def subject(self) -> str:
        """One line: the run and what became of it."""
        return " ".join(printable(part) for part in (self.name or self.run or "tpu-stack", "-", self.kind))


class Undelivered(Exception):
    """Why a channel did not take a message; the text has no address in it."""


def send(
    event: Event,
    environ: Mapping[str, str] | None = None,
    read_secret: ReadSecret | None = None,
    delivered: Collection[str] = (),
) -> dict[str, str]:
    """Send an event to every channel that is set, except those that have it; return by channel why it failed.

    Raises nothing.
    """
    environ = os.environ if environ is None else environ
    read_secret = read_secret or secret
    sending = {
        in_thread(functools.partial(_deliver, channel, event, environ, read_secret)): channel
        for channel in channels(environ, event.kind)
        if channel not in delivered
    }
    concurrent.futures.wait(sending, LIMIT_S)
    problems = {}
    for future, channel in sending.items():
        if not future.done():
            problems[channel] = f"{channel}: no answer within {LIMIT_S:.0f} s"
        elif error := future.exception():
            # The text of a library's error may contain the address.
            reason = error if isinstance(error, Undelivered) else type(error).__name__
            problems[channel] = f"{channel}: {reason}"
    return problems


def channels(environ: Mapping[str, str], kind: Kind = "test") -> list[str]:
    """Return the channels that are set and get events of a kind."""
    kinds = _kinds(environ)
    if kinds and kind not in (*kinds, "test"):
        return []
    return [channel for channel, variable in VARIABLES.items() if environ.get(variable)]


def _kinds(environ: Mapping[str, str]) -> list[str]:
    return [kind.strip() for kind in environ.get(KINDS_VARIABLE, "").split(",") if kind.strip()]


def about(run: Run, change: State | Literal["recovered"], say: Say) -> None:
    """Send what has become of a run's latest attempt, unless that has been sent; say what could not be sent.

    change: its state, or that it runs again after it was lost.
    """
    kind = event_kind(run, change)
    if kind is not None and channels(os.environ, kind):
        _, problems = deliver(run_event(run, kind), run.directory)
        for problem in problems:
            say(f"not notified by {problem}")


def event_kind(run: Run, change: State | Literal["recovered"]) -> Kind | None:
    """Return the kind of event that a state of a run is; None if nobody is notified, as of a stop by a person."""
    is_spent = change == "stopped" and (run.current_result() or {}).get("out_of_budget")
    return "out of budget" if is_spent else KIND_OF_STATE.get(change)


def run_event(run: Run, kind: Kind, text: str = "") -> Event:
    """Return an event about a run's latest attempt. text: what happened; "": what the run directory says of it."""
    cost = pricing.run_cost(run)
    return Event(
        kind=kind,
        text=text or _text(run, kind),
        run=run.run_id,
        name=run.described.get("name"),
        attempt=run.attempt,
        stack=str(run.described.get("target")),
        cost_usd=cost.usd if cost else None,
    )


def deliver(
    event: Event, directory: RunDirectory | None, delivered: Collection[str] = ()
) -> tuple[set[str], list[str]]:
    """Send an event of a run to the channels that do not have it yet; return those that do, and the problems.

    directory: of the run, where the channels that have taken it are noted afterwards: a sender that is killed in
    between, or a second one, may send an event twice. None: it cannot be reached. delivered: channels known to have it.
    """
    key, channels_done = f"{event.attempt}/{event.kind}/", {*delivered}

    def notices() -> dict[str, float]:
        return (directory.read_json(run_directory.NOTICES) or {}) if directory else {}

    with contextlib.suppress(HostError, OSError):
        channels_done |= {name.removeprefix(key) for name in notices() if name.startswith(key)}
    problems = send(event, delivered=channels_done)
    fresh = {*channels(os.environ, event.kind)} - {*problems} - channels_done
    with contextlib.suppress(HostError, OSError):
        if directory and fresh:
            times = dict.fromkeys((key + channel for channel in sorted(fresh)), time.time())
            directory.write_json(run_directory.NOTICES, {**notices(), **times})
    return channels_done | fresh, list(problems.values())


def _text(run: Run, kind: Kind) -> str:
    """Return what a run's directory says of its end; "" if it does not answer."""
    result = run.current_result() or {}
    if reason := result.get("reason") or result.get("error"):
        return str(reason).splitlines()[0][:LONGEST_TEXT]
    with contextlib.suppress(HostError, OSError):
        step, latest = runs.progress(run)
        saved = run.directory.newest_checkpoint()
        if kind == "recovered":
            return f"It runs again, from {'the start' if saved is None else f'step {saved}'}."
        progress = f"Step {step:,} of {run.total_steps:,}." if run.total_steps else f"Step {step:,}."
        return " ".join(part for part in (progress, runs.figure(run, latest)) if part)
    return ""


def command(*, test: bool) -> int:
    """Carry out `fab notify`: say which channels are set and, with `test`, send a message to each of them."""
    tell, configured, kinds = say(terminal()), channels(os.environ), _kinds(os.environ)
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise RequestError(
            f'${KINDS_VARIABLE}: "{unknown[0]}" is not an event; choose of {", ".join(KINDS)}, with commas between'
        )
    if not configured:
        raise RequestError(NONE)
    tell(
        f"channels: {', '.join(configured)}; events: {', '.join(kinds or ('all of ' + KINDS[0], *KINDS[1:]))}"
    )
    if not test:
        return DONE
    problems = send(Event(kind="test", text="This is a test of tpu-stack's notifications."))
    for problem in problems.values():
        tell(f"not sent by {problem}")
    tell(f"sent by {len(configured) - len(problems)} of {len(configured)}")
    return FAILED if problems else DONE


def _deliver(channel: str, event: Event, environ: Mapping[str, str], read_secret: ReadSecret) -> None:
    variable = VARIABLES[channel]
    address = environ[variable].strip()
    if address.startswith(SECRET):
        name = address.removeprefix(SECRET)
        if not SECRET_NAME.fullmatch(name):
            raise Undelivered(f"${variable} must name a secret as {SECRET}projects/PROJECT/secrets/NAME")
        address = read_secret(name).strip()
    try:
        url = urllib.parse.urlsplit(address)
        host, _ = url.hostname or "", url.port
    except ValueError:
        host = ""
    if channel == "e-mail":
        if not host or url.scheme not in ("smtp", "smtps"):
            raise Undelivered(
                f"${variable} must be smtp:// or smtps://USER:PASSWORD@HOST:PORT?from=A@B&to=C@D"
            )
        _mail(url, event)
    elif not host or not (url.scheme == "https" or (url.scheme == "http" and host in LOOPBACK)):
        raise Undelivered(f"${variable} must be an https:// address, or http:// on this machine")
    else:
        _post(address, host, slack_message(event) if channel == "slack" else message(event))


def message(event: Event) -> dict[str, Any]:
    """Return the event as a webhook gets it; what is not known is left out."""
    fields = {**dataclasses.asdict(event), "event": event.kind, "time": round(time.time(), 3)}
    return {name: value for name, value in fields.items() if name != "kind" and value not in (None, "")}


def slack_message(event: Event) -> dict[str, Any]:
    """Return the event as Slack takes it: https://api.slack.com/messaging/webhooks."""
    subject, newline, text = html.escape(plain(event), quote=False).partition("\n")
    return {"text": f"*{subject}*{newline}{text}"}


def plain(event: Event) -> str:
    """Return the event as a person reads it, the subject first."""
    place = f" on {event.stack}" if event.stack else ""
    about = f"{event.run}{place}" if event.run else ""
    cost = None if event.cost_usd is None else f"{event.cost_usd:,.2f} USD at list prices so far"
    return "\n".join(part for part in (event.subject, event.text, about, cost) if part)


def _post(address: str, host: str, content: Mapping[str, Any]) -> None:
    import requests  # slow to import, and few users have a channel

    try:  # not redirected: only the server that the user has named gets the message
        response = requests.post(address, json=content, timeout=LIMIT_S, allow_redirects=False)
    except requests.RequestException as error:
        raise Undelivered(f"{host} cannot be reached ({type(error).__name__})") from None
    if not 200 <= response.status_code < 300:
        raise Undelivered(f"{host} answers HTTP {response.status_code}")


def _mail(url: urllib.parse.SplitResult, event: Event) -> None:
    query = urllib.parse.parse_qs(url.query)
    to, host = ", ".join(query.get("to", [])), url.hostname or ""
    sender = query.get("from", [to])[0]
    if not to:
        raise Undelivered(f"${VARIABLES['e-mail']} must end in ?to=NAME@HOST")
    mail = email.message.EmailMessage()
    mail["Subject"], mail["From"], mail["To"] = f"[tpu-stack] {event.subject}", sender, to
    mail.set_content(plain(event) + "\n")
    context = ssl.create_default_context()
    try:
        if url.scheme == "smtps":
            server: smtplib.SMTP = smtplib.SMTP_SSL(host, url.port or 465, timeout=LIMIT_S, context=context)
        else:
            server = smtplib.SMTP(host, url.port or 587, timeout=LIMIT_S)
        with server:
            if url.scheme == "smtp" and host not in LOOPBACK:
                server.starttls(context=context)  # neither a password nor a message goes in the clear
            if url.username:
                server.login(urllib.parse.unquote(url.username), urllib.parse.unquote(url.password or ""))
            server.send_message(mail)
    except smtplib.SMTPException as error:
        code = getattr(error, "smtp_code", None)
        raise Undelivered(f"{host} refuses ({type(error).__name__}{f' {code}' if code else ''})") from None
    except OSError as error:
        raise Undelivered(f"{host} cannot be reached ({error.strerror or type(error).__name__})") from None


def secret(name: str) -> str:
    """Return what a secret of Secret Manager holds, with the credentials that this machine has.

    Raises:
        Undelivered: there are none, or it may not be read with them.
    """
    from jobs.runtime.ranks import secret_values  # few users have one

    project, secret_name, *version = name.split("/")[1::2]
    try:
        return secret_values.read(name, "/".join(["sm:/", project, secret_name, *version]), os.environ)
    except (RequestError, Unreachable) as error:
        raise Undelivered(str(error)) from None
