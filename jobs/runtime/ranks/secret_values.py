"""The secrets of a run on a host: taken from where the launcher has put them, and masked in what the ranks print."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import urllib.parse
from collections.abc import Iterable, Mapping
from typing import Any

from contracts.errors import RequestError, Unreachable, first_line
from contracts.host_interface import SECRET_MANAGER, SECRET_NAMES, SECRETS_FILE, SHORTEST_SECRET

MASK = b"***"
ANSWER_LIMIT_S = 20.0
GOOGLE = "https://secretmanager.googleapis.com"
NOT_FOUND = 404


def take(references: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the secrets by name: of the file that SECRETS_FILE names, which is removed, and of Secret Manager.

    references: name → sm://PROJECT/SECRET or sm://PROJECT/SECRET/VERSION.

    Raises:
        RequestError: this host's account may not read one, or there is none.
        Unreachable: Secret Manager does not answer.
    """
    values: dict[str, str] = {}
    if path := environ.get(SECRETS_FILE):
        with open(path, encoding="utf-8") as file:
            values = json.load(file)
        with contextlib.suppress(OSError):  # that of a pod is read-only, and in its memory
            os.remove(path)
    for name, reference in references.items():
        values[name] = read(f"--secret {name}={reference}", reference, environ)
    return values


def is_missing(reference: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether Secret Manager says that there is no such version of a secret; False too where it does not say.

    The caller's account need not be able to read the secret.
    """
    try:
        response, _ = _ask(reference, "", environ)
    except (RequestError, Unreachable):
        return False
    return bool(response.status_code == NOT_FOUND)


def _ask(reference: str, method: str, environ: Mapping[str, str]) -> tuple[Any, str]:
    """Return the response of Secret Manager, and the account that asked.
    https://cloud.google.com/secret-manager/docs/reference/rest/v1/projects.secrets.versions

    Raises:
        RequestError: this machine has no account. Unreachable: Secret Manager does not answer.
    """
    import google.auth
    import google.auth.credentials
    import google.auth.exceptions
    from google.auth.transport.requests import AuthorizedSession

    project, secret, version = (*reference.removeprefix("sm://").split("/"), "latest")[:3]
    stand_in = environ.get(SECRET_MANAGER)
    url = f"{stand_in or GOOGLE}/v1/projects/{project}/secrets/{secret}/versions/{version}{method}"
    try:
        if stand_in:
            credentials: Any = google.auth.credentials.AnonymousCredentials()  # type: ignore[no-untyped-call]
        else:
            credentials, _ = google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])
        account = getattr(credentials, "service_account_email", "this host's account")
        session = AuthorizedSession(credentials)  # type: ignore[no-untyped-call]
        if stand_in:
            session.trust_env = False  # it is on this machine, whatever proxy leads to the world
        return session.get(url, timeout=ANSWER_LIMIT_S), account
    except google.auth.exceptions.DefaultCredentialsError:
        raise RequestError(
            "this host has no Google account; `gcloud auth application-default login`"
        ) from None
    except (google.auth.exceptions.GoogleAuthError, OSError) as error:  # as which requests has its own errors
        raise Unreachable(first_line(error)) from None


def read(given: str, reference: str, environ: Mapping[str, str]) -> str:
    """Return what a secret of Secret Manager holds. given: what named it, for messages.

    Raises:
        RequestError: this machine's account may not read it, there is none, or it is too short to be one.
        Unreachable: Secret Manager does not answer.
    """
    try:
        response, account = _ask(reference, ":access", environ)
    except (RequestError, Unreachable) as error:
        raise type(error)(f"{given}: {error}") from None
    if response.status_code >= 500 or response.status_code == 429:
        raise Unreachable(f"{given}: Secret Manager answers {response.status_code}; try again")
    if response.status_code != 200:
        project, secret = reference.removeprefix("sm://").split("/")[:2]
        raise RequestError(
            f"{given}: Secret Manager answers {response.status_code}; let {account} read it: "
            f"gcloud secrets add-iam-policy-binding {secret} --project {project} "
            f"--member serviceAccount:{account} --role roles/secretmanager.secretAccessor"
        )
    value = base64.b64decode(response.json()["payload"]["data"]).decode().rstrip("\n")
    if len(value) < SHORTEST_SECRET:
        raise RequestError(
            f"{given}: has fewer than {SHORTEST_SECRET} characters, which cannot be masked in logs"
        )
    return value


class Masker:
    """Replaces secrets in a stream of bytes, also where one is split between two pieces."""

    def __init__(self, values: Iterable[str]) -> None:
        self._forms = sorted({form for value in values for form in _forms(value)}, key=len, reverse=True)
        self._pattern = re.compile(b"|".join(map(re.escape, self._forms))) if self._forms else None
        self._unprinted = b""

    def mask(self, piece: bytes) -> bytes:
        """Return what can be written now; what may be the beginning of a secret is kept for the next piece."""
        if self._pattern is None:
            return piece
        data, self._unprinted = self._unprinted + piece, b""
        end = len(data) - max(
            (
                length
                for form in self._forms
                for length in range(min(len(form) - 1, len(data)), 0, -1)
                if data.endswith(form[:length])
            ),
            default=0,
        )
        for match in self._pattern.finditer(data):
            if match.start() < end < match.end():
                end = match.end()
        data, self._unprinted = data[:end], data[end:]
        return self._pattern.sub(MASK, data)

    def flush(self) -> bytes:
        """Return what was kept, at the end of the stream."""
        unprinted, self._unprinted = self._unprinted, b""
        return unprinted if self._pattern is None else self._pattern.sub(MASK, unprinted)


def masked(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return a text of a job without the secrets that its environment has."""
    names = environ.get(SECRET_NAMES, "").split(",")
    masker = Masker(environ[name] for name in names if name in environ)
    data = text.encode(errors="surrogateescape")
    return (masker.mask(data) + masker.flush()).decode(errors="surrogateescape")


def _forms(value: str) -> set[bytes]:
    """Return a secret as programs print it: as it is, by lines, and quoted for Python, JSON, URLs and Kubernetes."""
    lines = [line for line in value.splitlines() if len(line.strip()) >= SHORTEST_SECRET]
    quoted = [
        *(lines or [value]),
        repr(value)[1:-1],
        json.dumps(value)[1:-1],
        urllib.parse.quote(value, safe=""),
        urllib.parse.quote_plus(value),
        base64.b64encode(value.encode(errors="surrogateescape")).decode(),
    ]
    return {form.encode(errors="surrogateescape") for form in quoted}
