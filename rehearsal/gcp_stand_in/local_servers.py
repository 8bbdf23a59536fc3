"""Requests to the servers on this machine that stand for Google's, whatever proxy leads out of it."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request

from rehearsal.gcp_stand_in.stand_in_world import WorldError

ANSWER_LIMIT_S = 10.0
CONFLICT, NOT_FOUND = 409, 404


class RefusalError(Exception):
    """An answer that is no success."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"googleapi: Error {code}: {message}")
        self.code = code


def ask(method: str, url: str, data: bytes | None, limit_s: float) -> bytes:
    """The answer. Raises RefusalError; OSError where there is none."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url, data=data, method=method, headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=limit_s) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            raise RefusalError(error.code, error_message(error.read())) from None


def send(method: str, url: str, data: bytes | None, *, server: str, patience_s: float = 0.0) -> bytes:
    """The answer; nothing where the server has the thing already, or no such thing. server: its name in messages.
    patience_s: for how long one that does not answer is asked again.

    Raises WorldError."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return ask(method, url, data, ANSWER_LIMIT_S)
        except RefusalError as refusal:
            if refusal.code == (CONFLICT if method == "POST" else NOT_FOUND):
                return b""
            raise WorldError(str(refusal)) from None
        except OSError as error:
            if time.monotonic() >= deadline:
                raise WorldError(f"the {server} {url} does not answer: {error}") from None
            time.sleep(1.0)


def error_message(content: bytes) -> str:
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return content[:300].decode(errors="replace").strip() or "(no answer)"
