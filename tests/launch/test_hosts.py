"""Hosts and their agents as the launcher sees them."""

import threading
from typing import Any

import pytest

from launch.hosts import Completed, HostError, HostsError, all_or_error, ask_all
from tests.launch.slices import MakeAgent


def answered(make_agent: MakeAgent, answer: Any) -> str:
    def give(verb: str, request: dict[str, Any]) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(HostError) as error:
        make_agent(give, host="w-3").ask("start", {}, timeout_s=7)
    return str(error.value)


def said(stdout: str, stderr: str = "", exit_code: int | None = 1) -> Completed:
    return Completed(exit_code=exit_code, stdout=stdout, stderr=stderr)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (OSError(2, "No such file"), "w-3: cannot run the agent: [Errno 2] No such file"),
        (said("", exit_code=None), "w-3: no answer to start within 7 s"),
        (said("", "a\nbash: python3: not found\n", 127), "(exit code 127): bash: python3: not found"),
        (said(""), "w-3: start was not answered by an agent (exit code 1): "),
        (said("5"), "w-3: start was not answered by an agent (exit code 1): 5"),
        (said("[]"), "w-3: start was not answered by an agent (exit code 1): []"),
        (said("welcome\n{}"), "w-3: start was not answered by an agent (exit code 1): {}"),
        ({"ok": False, "error": {"message": "m", "remedy": "r"}}, "w-3: m → r"),
        ({"ok": False, "error": {"message": "m", "remedy": None}}, "w-3: m"),
        ({"ok": False}, "w-3: unknown error"),
    ],
)
def test_what_is_no_good_answer_is_an_error_that_names_the_host(
    make_agent: MakeAgent, answer: Any, message: str
) -> None:
    assert message in answered(make_agent, answer)


def test_hosts_are_asked_all_at_once_in_their_order_and_one_hosts_error_hides_no_others(
    make_agent: MakeAgent,
) -> None:
    everyone = threading.Barrier(4)

    def give(verb: str, request: dict[str, Any]) -> dict[str, Any]:
        everyone.wait(timeout=30)  # would break if one were asked after another
        error = {"message": f"reason {request['index']}", "remedy": "mend it"}
        return {"ok": request["index"] % 2 == 1, "error": error, "asked": (verb, request)}

    agents = [make_agent(give, host=f"w-{index}", root="/var/agent") for index in range(4)]
    answers = ask_all(agents, "status", [{"index": index} for index in range(4)])
    assert [answer["asked"] for answer in all_or_error("odd:", answers[1::2])] == [
        ["status", {"version": 1, "root": "/var/agent", "index": index}] for index in (1, 3)
    ]
    with pytest.raises(HostsError) as error:
        all_or_error("not started:", answers)
    assert str(error.value).splitlines() == [
        "not started:",
        "  w-0: reason 0 → mend it",
        "  w-2: reason 2 → mend it",
    ]


def test_an_error_of_a_file_is_said_with_its_path_and_what_to_do() -> None:
    error = OSError(28, "No space left on device", "/from", None, "/there/.x.part")
    said = "w-3: /there/.x.part: No space left on device → free some space on that disk"
    assert str(HostError.from_error("w-3", error)) == said
