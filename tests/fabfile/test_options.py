"""A task ends with an exit code, and what a user did wrong is a message, never a traceback."""

from __future__ import annotations

import pytest

from contracts.errors import RequestError
from fabfile.options import reported, whole
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
        """Do it."""
        raise ZeroDivisionError

    assert (task.__name__, task.__doc__) == ("task", "Do it."), "as `fab` lists it"
    with pytest.raises(ZeroDivisionError):
        task(None)


@pytest.mark.parametrize("text", ["-1", "2", "two", "3.5", "³", " 3", "3_0", "9" * 5000])
def test_a_whole_number_of_at_least_the_least_is_read_and_nothing_else(text: str) -> None:
    assert (whole("--lines", "", least=3), whole("--lines", "3", least=3)) == (None, 3)
    with pytest.raises(RequestError, match=f"--lines {text}: must be a whole number of at least 3"):
        whole("--lines", text, least=3)
