"""Secrets on a host: where they come from, and that no byte of them is printed."""

import base64
import json
import urllib.parse
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import google.auth
import google.auth.exceptions
import google.auth.transport.requests
import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import RequestError, Unreachable
from jobs.runtime.ranks.secret_values import Masker, masked, take

REFERENCE = "sm://my-project/my_secret"
SECRETS = st.lists(
    st.text(st.sampled_from('ab\n"/ é'), min_size=6, max_size=9).filter(lambda text: len(text.strip()) > 5)
)
"""Of few characters, so that they contain and overlap each other."""


def printed(value: str) -> list[str]:
    return [
        *([value] if "\n" not in value else value.splitlines()),
        json.dumps(value),
        repr(value),
        urllib.parse.quote(value, safe=""),
        base64.b64encode(value.encode()).decode(),
    ]


@given(SECRETS, st.data())
def test_a_secret_is_masked_wherever_the_stream_is_cut(secrets: Sequence[str], data: st.DataObject) -> None:
    forms = [form for value in secrets for form in printed(value)]
    words = st.text(st.sampled_from('ab\n"/ é'), max_size=5)
    parts = data.draw(st.lists(st.one_of(words, st.sampled_from(forms)) if forms else words, max_size=6))
    stream = "".join(parts).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    masker = Masker(secrets)
    shown = b"".join([*map(masker.mask, pieces), masker.flush()])
    for value in secrets:
        for form in printed(value):
            if len(form.strip()) >= 6:
                assert form.encode() not in shown
    if not any(form.encode() in stream for form in forms):
        assert shown == stream


def test_what_is_no_secret_is_written_at_once() -> None:
    masker = Masker(["hunter2!"])
    assert masker.mask(b"step 1 h") == b"step 1 "
    assert masker.mask(b"alf") == b"half"
    assert masker.mask(b"hunter") == b""
    assert masker.mask(b"2! done\n") == b"*** done\n"
    assert masker.flush() == b""


def test_an_errors_message_shows_no_secret_of_its_process() -> None:
    environ = {"RUN_SECRETS": "TOKEN,OTHER", "TOKEN": "hunter2!", "HOME": "/root/home"}
    assert masked("https://me:hunter2!@host of /root/home", environ) == "https://me:***@host of /root/home"


def test_the_file_of_the_secrets_is_gone_once_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "values.json"
    path.write_text(json.dumps({"TOKEN": "hunter2!"}))
    assert take({}, {"RUN_SECRETS_FILE": str(path)}) == {"TOKEN": "hunter2!"}
    assert not path.exists()
    assert take({}, {}) == {}


class Session:
    """Answers as Secret Manager would; by Google's discovery document."""

    def __init__(self, _credentials: object, answer: Any) -> None:
        self._answer = answer

    def get(self, url: str, timeout: float) -> Any:
        assert timeout < 60
        document = json.loads(
            (
                resources.files("googleapiclient.discovery_cache") / "documents/secretmanager.v1.json"
            ).read_text()
        )
        versions = document["resources"]["projects"]["resources"]["secrets"]["resources"]["versions"]
        path = versions["methods"]["access"]["flatPath"]
        for name, value in {
            "projectsId": "my-project",
            "secretsId": "my_secret",
            "versionsId": "latest",
        }.items():
            path = path.replace(f"{{{name}}}", value)
        assert url == document["rootUrl"] + path
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


def answer(status: int, value: str = "") -> SimpleNamespace:
    data = {"payload": {"data": base64.b64encode(value.encode()).decode()}}
    return SimpleNamespace(status_code=status, json=lambda: data)


AWAY: Exception = google.auth.exceptions.TransportError("no")  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("given_answer", "error", "message"),
    [
        (
            answer(403),
            RequestError,
            "let me@project.iam read it: gcloud secrets add-iam-policy-binding my_secret",
        ),
        (answer(404), RequestError, "answers 404"),
        (answer(503), Unreachable, "answers 503; try again"),
        (answer(429), Unreachable, "answers 429"),
        (requests.ConnectionError("refused"), Unreachable, "ConnectionError: refused"),
        (AWAY, Unreachable, "TransportError"),
        (answer(200, "short\n"), RequestError, "fewer than 6 characters"),
        (answer(200, "hunter2!\n"), None, ""),
    ],
)
def test_what_secret_manager_answers(
    monkeypatch: pytest.MonkeyPatch, given_answer: Any, error: type[Exception] | None, message: str
) -> None:
    account = SimpleNamespace(service_account_email="me@project.iam")
    monkeypatch.setattr(google.auth, "default", lambda scopes: (account, None))
    monkeypatch.setattr(
        google.auth.transport.requests, "AuthorizedSession", lambda account: Session(account, given_answer)
    )
    if error is None:
        assert take({"TOKEN": REFERENCE}, {}) == {"TOKEN": "hunter2!"}
        return
    with pytest.raises(error, match=message) as refused:
        take({"TOKEN": REFERENCE}, {})
    assert type(refused.value) is error
