"""Requests to the servers on this machine that stand for Google's, whatever proxy leads out of it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

ANSWER_LIMIT_S = 10.0
CONFLICT, NOT_FOUND = 409, 404


class RefusalError(Exception):
    """An answer that is no success."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"googleapi: Error {code}: {message}")
        self.code = code


def ask(method: str, url: str, data: bytes | None = None, limit_s: float = ANSWER_LIMIT_S) -> bytes:
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


def error_message(content: bytes) -> str:
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return content[:300].decode(errors="replace").strip() or "(no answer)"
