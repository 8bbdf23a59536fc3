"""Word to a person, over real sockets: what each channel gets, and channels that are away, slow, wrong or lying."""

import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from console import notify
from console.notify import Event, Undelivered, send
from contracts.errors import RequestError
from launch.runs import Run
from tests.servers import Handler, serving

SECRET_PART = "T00/B11/kcRe7s"
FIELDS: dict[str, Any] = {
    "run": "r-20261120-214500-abcd",
    "name": "my run",
    "stack": "dev",
    "cost_usd": 12.345,
}
EVENT = Event(kind="failed", text="host 1 was killed <by & by>", **FIELDS)


class Web(Handler):
    """Keeps what it is sent; /slow answers after a while, /CODE with that code, /away sends elsewhere."""

    got: list[tuple[str, Any]]

    def do_POST(self) -> None:
        self.got.append((self.path, json.loads(self.body())))
        last = self.path.rpartition("/")[2]
        if last == "slow":
            time.sleep(2)
        status = 302 if last == "away" else int(last) if last.isdigit() else 200
        self.reply(status=status, Location="/elsewhere")

    do_GET = do_POST


class Mail(socketserver.StreamRequestHandler):
    """As much of SMTP as a client needs to hand over one message."""

    got: list[str]

    def handle(self) -> None:
        self.wfile.write(b"220 here\r\n")
        while line := self.rfile.readline().decode().strip().upper():
            if line.startswith("EHLO"):
                self.wfile.write(b"250-here\r\n250 AUTH PLAIN\r\n")
            elif line.startswith("AUTH"):
                self.wfile.write(b"535 no\r\n")
            elif line == "DATA":
                self.wfile.write(b"354 go on\r\n")
                lines = iter(lambda: self.rfile.readline().decode().rstrip("\r\n"), ".")
                self.got.append("\n".join(lines))
                self.wfile.write(b"250 taken\r\n")
            elif line == "QUIT":
                self.wfile.write(b"221 bye\r\n")
                return
            else:
                self.wfile.write(b"250 well\r\n")


@pytest.fixture
def web() -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    handler: Any = type("Here", (Web,), {"got": []})
    with serving(handler) as address:
        yield f"http://{address}/{SECRET_PART}", handler.got


@pytest.fixture
def mail() -> Iterator[tuple[int, list[str]]]:
    handler: Any = type("Here", (Mail,), {"got": []})
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1], handler.got
        server.shutdown()


def test_every_channel_gets_the_event_in_its_own_form(
    web: tuple[str, list[Any]], mail: tuple[int, list[str]]
) -> None:
    url, got = web
    port, mails = mail
    environ = {
        "TPU_STACK_SLACK_WEBHOOK": f"{url}/slack",
        "TPU_STACK_WEBHOOK": "secret:projects/p/secrets/hook",
        "TPU_STACK_SMTP": f"smtp://127.0.0.1:{port}?from=a%40b.c&to=d%40e.f&to=g%40h.i",
    }
    assert (
        send(EVENT, environ, lambda name: f"{url}/json\n" if name == "projects/p/secrets/hook" else "") == {}
    )
    sent = {path.rpartition("/")[2]: body for path, body in got}
    assert sent["slack"] == {
        "text": "*my run - failed*\nhost 1 was killed &lt;by &amp; by&gt;\nr-20261120-214500-abcd on dev\n"
        "12.35 USD at list prices so far"
    }
    assert sent["json"].pop("time") == pytest.approx(time.time(), abs=60)
    assert sent["json"] == {"event": "failed", "text": "host 1 was killed <by & by>", **FIELDS}
    (mailed,) = mails
    assert "Subject: [tpu-stack] my run - failed" in mailed
    assert "From: a@b.c\nTo: d@e.f, g@h.i" in mailed
    assert "host 1 was killed <by & by>" in mailed


@pytest.mark.parametrize(
    ("variable", "address", "said"),
    [
        ("TPU_STACK_SLACK_WEBHOOK", "WEB/404", "slack: 127.0.0.1 answers HTTP 404"),
        ("TPU_STACK_WEBHOOK", "WEB/away", "webhook: 127.0.0.1 answers HTTP 302"),
        ("TPU_STACK_WEBHOOK", f"http://127.0.0.1:1/{SECRET_PART}", "webhook: 127.0.0.1 cannot be reached"),
        ("TPU_STACK_WEBHOOK", f"http://10.0.0.1/{SECRET_PART}", "webhook: $TPU_STACK_WEBHOOK must be an https://"),
        ("TPU_STACK_WEBHOOK", f"http://127.0.0.1:x/{SECRET_PART}", "webhook: $TPU_STACK_WEBHOOK must be an"),
        ("TPU_STACK_WEBHOOK", f"https://127.0.0.1:9/{SECRET_PART} \x01", "webhook: 127.0.0.1 cannot be"),
        ("TPU_STACK_WEBHOOK", f"secret:{SECRET_PART}", "webhook: $TPU_STACK_WEBHOOK must name a secret as"),
        ("TPU_STACK_WEBHOOK", "secret:projects/p/secrets/none", "webhook: none to be had"),
        ("TPU_STACK_WEBHOOK", "secret:projects/p/secrets/bug", "webhook: KeyError"),
        ("TPU_STACK_SMTP", "smtp://u:kcRe7s@127.0.0.1:MAIL?to=a%40b", "e-mail: 127.0.0.1 refuses (SMTPAuth"),
        ("TPU_STACK_SMTP", f"smtp://u:{SECRET_PART}@127.0.0.1:1?to=a%40b", "e-mail: $TPU_STACK_SMTP must be smtp"),
        ("TPU_STACK_SMTP", "smtp://127.0.0.1:MAIL", "e-mail: $TPU_STACK_SMTP must end in ?to="),
        ("TPU_STACK_SMTP", "http://127.0.0.1", "e-mail: $TPU_STACK_SMTP must be smtp"),
    ],
)  # fmt: skip
def test_a_channel_that_does_not_take_it_is_told_of_without_its_address(
    web: tuple[str, list[Any]], mail: tuple[int, list[str]], variable: str, address: str, said: str
) -> None:
    def read_secret(name: str) -> str:
        if name.endswith("bug"):
            raise KeyError(SECRET_PART)
        raise Undelivered("none to be had")

    given = address.replace("WEB", web[0]).replace("MAIL", str(mail[0]))
    (problem,) = send(EVENT, {variable: given}, read_secret).values()
    assert problem.startswith(said)
    assert SECRET_PART not in problem and "kcRe7s" not in problem
    assert not any(path == "/elsewhere" for path, _ in web[1])


def test_an_end_is_told_once_by_whoever_sees_it_first_and_a_stop_that_was_asked_for_is_not(
    write_run: Callable[..., Run], web: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TPU_STACK_WEBHOOK", web[0])
    said: list[str] = []
    spent = "the budget of 5.00 USD is spent"
    run = write_run(result={"outcome": "stopped", "out_of_budget": True, "reason": spent})
    for _ in range(2):
        notify.about(run, "stopped", said.append)
    notify.about(write_run(result={"outcome": "stopped"}), "stopped", said.append)
    run = write_run(metrics=[{"step": 7, "loss": 2.5}])
    notify.about(run, "running", said.append)
    notify.about(run, "preempted", said.append)
    run.directory.write_text("checkpoints/5/x", "")
    notify.about(run, "recovered", said.append)
    failed = write_run(
        "flax_mlm-20261120-214500-else",
        result={"outcome": "failed", "error": "host 1: exit code 3\nits last lines"},
    )
    notify.about(failed, "failed", said.append)
    told = [(body["event"], body["text"]) for _, body in web[1]]
    assert told == [
        ("out of budget", spent),
        ("preempted", "Step 7 of 100. loss 2.500 nats"),
        ("recovered", "It runs again, from step 5."),
        ("failed", "host 1: exit code 3"),
    ]
    monkeypatch.setenv("TPU_STACK_WEBHOOK", f"{web[0]}/500")
    notify.about(run, "hung", said.append)
    assert said == ["not notified by webhook: 127.0.0.1 answers HTTP 500"]


def test_fab_notify_says_what_is_set_and_tries_it(
    web: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable in notify.VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(RequestError, match="no channel is set"):
        notify.command(test=True)
    monkeypatch.setenv("TPU_STACK_WEBHOOK", web[0])
    assert notify.command(test=False) == 0 and not web[1]
    assert notify.command(test=True) == 0
    assert [body["event"] for _, body in web[1]] == ["test"]
    monkeypatch.setenv("TPU_STACK_SLACK_WEBHOOK", f"{web[0]}/500")
    assert notify.command(test=True) == 1
    monkeypatch.setenv("TPU_STACK_NOTIFY", "done,everything")
    with pytest.raises(RequestError, match='"everything" is not an event'):
        notify.command(test=True)
    assert SECRET_PART not in capsys.readouterr().out
