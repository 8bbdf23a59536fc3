"""What a file system behind a URL says, told apart: away for now, or refused."""

import errno
import socket

import aiohttp
import pytest
import requests
from fsspec.exceptions import FSTimeoutError
from gcsfs.retry import HttpError
from google.auth.exceptions import DefaultCredentialsError, TransportError

from contracts.errors import UNAVAILABLE, WRONG_REQUEST, Unreachable, exit_code_for
from jobs.runtime.storage.bucket_files import open_url, place_error


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (HttpError({"code": 503, "message": "busy"}), UNAVAILABLE),
        (HttpError({"code": 429, "message": "too many"}), UNAVAILABLE),
        (HttpError({"code": 401, "message": "who are you"}), WRONG_REQUEST),
        (HttpError({"code": 400, "message": "odd"}), WRONG_REQUEST),
        (OSError("Forbidden: bucket"), WRONG_REQUEST),  # what gcsfs makes of 403
        (OSError("Forbidden: bucket\nRate Limit Exceeded"), UNAVAILABLE),
        (HttpError({"code": 403, "message": "no access"}), WRONG_REQUEST),
        (HttpError({"code": 403, "message": "userRateLimitExceeded"}), UNAVAILABLE),
        (FileNotFoundError("gs://bucket/x"), WRONG_REQUEST),
        (PermissionError(errno.EACCES, "Permission denied"), WRONG_REQUEST),
        (OSError(errno.ENOSPC, "No space left on device"), WRONG_REQUEST),
        (ValueError("Bad Request"), WRONG_REQUEST),
        (DefaultCredentialsError("none"), WRONG_REQUEST),  # type: ignore[no-untyped-call]
        (TransportError("no token"), UNAVAILABLE),  # type: ignore[no-untyped-call]
        (aiohttp.ServerDisconnectedError(), UNAVAILABLE),
        (aiohttp.ClientPayloadError("half"), UNAVAILABLE),
        (requests.exceptions.ProxyError(), UNAVAILABLE),
        (FSTimeoutError(), UNAVAILABLE),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), UNAVAILABLE),
        (socket.gaierror(-3, "Temporary failure in name resolution"), UNAVAILABLE),
        (OSError(errno.EHOSTUNREACH, "No route to host"), UNAVAILABLE),
        # As fsspec's HTTP file system has it.
        (caused(FileNotFoundError("http://x"), aiohttp.ServerDisconnectedError()), UNAVAILABLE),
    ],
    ids=repr,
)
def test_only_a_place_that_is_away_may_be_tried_again(error: Exception, code: int) -> None:
    assert exit_code_for(place_error(error, "--data gs://bucket/x", "check it")) == code


def test_a_server_that_a_driver_asks_at_once_and_is_away_is_named_with_the_option() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen
        url = f"ftp://127.0.0.1:{silent.getsockname()[1]}/text"
        with pytest.raises(Unreachable, match=f"--data {url}: does not answer now .*; try again later"):
            open_url(url, option="--data")
