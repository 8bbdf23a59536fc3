"""A task ends with an exit code, and what a user did wrong is a message, never a traceback."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import RequestError
from fabfile.terminal import reported, whole
from launch.hosts import HostError, HostsError

WRONG = HostError(host="w-0", reason="gone", remedy="start it")


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        (0, 0, ""),
        (1, 1, ""),
        (RequestError("no such thing"), 2, "error: no such thing\n"),
        (WRONG, 2, "error: w-0: gone → start it\n"),
        (HostsError("preflight failed:", [WRONG]), 2, "error: preflight failed:\n  w-0: gone → start it\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_every_known_ending_has_its_exit_code_and_its_message(
    ending: int | BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    @reported
    def task(c: object) -> int:
        if isinstance(ending, BaseException):
            raise ending
        return ending

    if code == 0:
        task(None)
    else:
        with pytest.raises(SystemExit) as stop:
            task(None)
        assert stop.value.code == code
    assert capsys.readouterr().err == said


def test_a_bug_is_not_hidden_behind_a_message() -> None:
    @reported
    def task(c: object) -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        task(None)


def test_a_reported_task_keeps_the_name_and_the_words_that_fab_lists() -> None:
    @reported
    def task(c: object, run: str = "") -> int:
        """Do it."""
        return 0

    assert (task.__name__, task.__doc__) == ("task", "Do it.")


@given(st.integers(0, 10**8), st.integers(0, 10))
def test_a_number_of_at_least_the_least_is_read_and_a_smaller_one_refused(number: int, least: int) -> None:
    if number >= least:
        assert whole("--hosts", str(number), least=least) == number
    else:
        with pytest.raises(
            RequestError, match=f"--hosts {number}: must be a whole number of at least {least}"
        ):
            whole("--hosts", str(number), least=least)


@pytest.mark.parametrize("text", ["-1", "two", "1.5", "²", " 1", "1_0", "9" * 5000])
def test_what_is_no_whole_number_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="must be a whole number of at least 0"):
        whole("--lines", text, least=0)


def test_an_option_that_was_not_given_is_none() -> None:
    assert whole("--hosts", "", least=1) is None
