"""Word to a person: what became of a run, sent to a Slack channel, a webhook or by e-mail.

Where to is a secret: whoever knows a webhook's address can write there. So the addresses come from the environment, as
they are or as the name of a secret in Secret Manager, and no message, log or state has any of them. Whatever goes wrong
with a channel is a line for the user; it raises nothing and holds nothing up for longer than LIMIT_S.
"""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import dataclasses
import email.message
import http.client
import json
import os
import re
import smtplib
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from contracts import run_directory
from contracts.errors import DONE, FAILED, RequestError
from contracts.run_directory import RunDirectory, State
from launch import costs, runs
from launch.hosts import HostError, in_thread
from launch.output import printable, say, terminal
from launch.runs import Run

Kind = Literal["done", "failed", "preempted", "recovered", "out of budget", "test"]
KINDS: tuple[Kind, ...] = ("done", "failed", "preempted", "recovered", "out of budget")
LIMIT_S = 10.0
"""For all channels together, the reading of their secrets included."""
VARIABLES = {
    "slack": "TPU_STACK_SLACK_WEBHOOK",
    "webhook": "TPU_STACK_WEBHOOK",
    "e-mail": "TPU_STACK_SMTP",
}
"""Channel → the variable with its address, or with SECRET and the secret's name: secret:projects/P/secrets/NAME."""
WANTED = "TPU_STACK_NOTIFY"
"""The variable with the kinds that are sent, with commas between; without it all are."""
SECRET = "secret:"
SECRET_NAME = re.compile(r"projects/[^/\s]+/secrets/[\w-]+(/versions/\w+)?")
SECRET_MANAGER = "https://secretmanager.googleapis.com/v1"
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
    told: Collection[str] = (),
) -> dict[str, str]:
    """Send an event to every channel that is set, but for those that were `told`; return by channel why it failed.

    Raises nothing.
    """
    found = os.environ if environ is None else environ
    sending = {
        in_thread(lambda channel=channel: _deliver(channel, event, found, read_secret or secret)): channel  # type: ignore[misc]
        for channel in channels(found, event.kind)
        if channel not in told
    }
    concurrent.futures.wait(sending, LIMIT_S)
    problems = {}
    for future, channel in sending.items():
        if not future.done():
            problems[channel] = f"{channel}: no answer within {LIMIT_S:.0f} s"
        elif error := future.exception():
            # Of what is not ours only the kind is told: its text may have the address.
            said = error if isinstance(error, Undelivered) else type(error).__name__
            problems[channel] = f"{channel}: {said}"
    return problems


def channels(environ: Mapping[str, str], kind: Kind = "test") -> list[str]:
    """Return the channels that are set and get events of a kind."""
    wanted = [each.strip() for each in environ.get(WANTED, "").split(",") if each.strip()]
    if wanted and kind not in (*wanted, "test"):
        return []
    return [channel for channel, variable in VARIABLES.items() if environ.get(variable)]


def about(run: Run, what: State | Literal["recovered"], say: Callable[[str], None]) -> None:
    """Send what has become of a run's latest attempt, unless somebody has done so; say what could not be sent.

    what: its state, or that it runs again after it was lost.
    """
    kind = kind_of(run, what)
    if kind is not None and channels(os.environ, kind):
        _, problems = deliver(event_of(run, kind), run.directory)
        for problem in problems:
            say(f"not notified by {problem}")


def kind_of(run: Run, what: State | Literal["recovered"]) -> Kind | None:
    """Return which event a state of a run is; None if it is no news, such as a stop that somebody asked for."""
    is_spent = what == "stopped" and (run.current_result() or {}).get("out_of_budget")
    return "out of budget" if is_spent else KIND_OF_STATE.get(what)


def event_of(run: Run, kind: Kind, text: str = "") -> Event:
    """Return an event about a run's latest attempt. text: what happened; "": what the run directory says of it."""
    cost = costs.of_run(run)
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
    event: Event, directory: RunDirectory | None, told: Collection[str] = ()
) -> tuple[set[str], list[str]]:
    """Send an event of a run to the channels that have not taken it yet; return those that have, and the problems.

    directory: of the run, where it is noted which channels have taken it, once they have: whoever is killed between
    the two, or meets another sender, lets an event come twice. None: it cannot be reached. told: channels that are
    known to have it.
    """
    key, known = f"{event.attempt}/{event.kind}/", {*told}

    def noted() -> dict[str, float]:
        return (directory.read_json(run_directory.NOTICES) or {}) if directory else {}

    with contextlib.suppress(HostError, OSError):
        known |= {name.removeprefix(key) for name in noted() if name.startswith(key)}
    problems = send(event, told=known)
    fresh = {*channels(os.environ, event.kind)} - {*problems} - known
    with contextlib.suppress(HostError, OSError):
        if directory and fresh:
            marks = dict.fromkeys((key + channel for channel in sorted(fresh)), time.time())
            directory.write_json(run_directory.NOTICES, {**noted(), **marks})
    return known | fresh, list(problems.values())


def _text(run: Run, kind: Kind) -> str:
    """What there is to say of a run, from its directory; nothing where that does not answer."""
    result = run.current_result() or {}
    if said := result.get("reason") or result.get("error"):
        return str(said).splitlines()[0][:LONGEST_TEXT]
    with contextlib.suppress(HostError, OSError):
        step, latest = runs.progress(run)
        saved = run.directory.checkpoint_steps()
        if kind == "recovered":
            return f"It runs again, from {f'step {saved[-1]}' if saved else 'the start'}."
        where = f"Step {step:,} of {run.total_steps:,}." if run.total_steps else f"Step {step:,}."
        return " ".join(part for part in (where, runs.figure(run, latest)) if part)
    return ""


def command(*, test: bool) -> int:
    """Carry out `fab notify`: say which channels are set and, with `test`, send a message to each of them."""
    tell_user = say(terminal())
    found = channels(os.environ)
    wanted = os.environ.get(WANTED) or "all of " + ", ".join(KINDS)
    if unknown := [
        each for each in os.environ.get(WANTED, "").split(",") if each and each.strip() not in KINDS
    ]:
        raise RequestError(
            f'${WANTED}: "{unknown[0]}" is not an event; choose of {", ".join(KINDS)}, with commas between'
        )
    if not found:
        raise RequestError(NONE)
    tell_user(f"channels: {', '.join(found)}; events: {wanted}")
    if not test:
        return DONE
    problems = send(Event(kind="test", text="This is a test of tpu-stack's notifications."))
    for problem in problems.values():
        tell_user(f"not sent by {problem}")
    tell_user(f"sent by {len(found) - len(problems)} of {len(found)}")
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
    """The event as a webhook gets it; what is not known is left out."""
    said = {**dataclasses.asdict(event), "event": event.kind, "time": round(time.time(), 3)}
    del said["kind"]
    return {name: value for name, value in said.items() if value not in (None, "")}


def slack_message(event: Event) -> dict[str, Any]:
    """https://api.slack.com/messaging/webhooks; three characters are written as entities."""
    safe = plain(event).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    first, _, rest = safe.partition("\n")
    return {"text": f"*{first}*\n{rest}" if rest else f"*{first}*"}


def plain(event: Event) -> str:
    """The event as a person reads it, the subject first."""
    where = f" on {event.stack}" if event.stack else ""
    about = f"{event.run}{where}" if event.run else ""
    cost = None if event.cost_usd is None else f"{event.cost_usd:,.2f} USD at list prices so far"
    return "\n".join(part for part in (event.subject, event.text, about, cost) if part)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A message is sent to nobody but whom the user has named."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _post(address: str, host: str, content: Mapping[str, Any]) -> None:
    headers = {"Content-Type": "application/json", "User-Agent": "tpu-stack"}
    request = urllib.request.Request(address, json.dumps(content).encode(), headers, method="POST")
    handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
    if host in LOOPBACK:
        handlers.append(urllib.request.ProxyHandler({}))
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=LIMIT_S):
            pass
    except urllib.error.HTTPError as error:
        error.close()
        raise Undelivered(f"{host} answers HTTP {error.code}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        cause = getattr(error, "reason", error)
        why = cause.strerror if isinstance(cause, OSError) else None
        raise Undelivered(f"{host} cannot be reached ({why or type(cause).__name__})") from None


def _mail(url: urllib.parse.SplitResult, event: Event) -> None:
    asked = urllib.parse.parse_qs(url.query)
    to, host = ", ".join(asked.get("to", [])), url.hostname or ""
    sender = asked.get("from", [to])[0]
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
    import google.auth
    import google.auth.exceptions
    import google.auth.transport.requests

    version = name if "/versions/" in name else f"{name}/versions/latest"
    try:
        credentials, _ = google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])
        session = google.auth.transport.requests.AuthorizedSession(credentials)  # type: ignore[no-untyped-call]
        answer = session.get(f"{SECRET_MANAGER}/{version}:access", timeout=LIMIT_S)
        if answer.status_code != 200:
            raise Undelivered(
                f"Secret Manager answers HTTP {answer.status_code} for {name}; "
                "roles/secretmanager.secretAccessor on it is needed"
            )
        return base64.b64decode(answer.json()["payload"]["data"]).decode()
    except google.auth.exceptions.GoogleAuthError:
        raise Undelivered(f"{name}: no credentials of Google's here") from None
    except (OSError, ValueError, LookupError) as error:
        raise Undelivered(f"{name} cannot be read ({type(error).__name__})") from None
