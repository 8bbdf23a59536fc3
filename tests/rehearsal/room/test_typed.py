"""What is typed behind the rehearsal's `pulumi` is what the real one would make of it."""

import pytest

from rehearsal.room.typed import understood
from rehearsal.state import RehearsalError


def test_up_with_refresh_is_one_operation() -> None:
    typed = understood(["up", "--refresh", "--yes", "--skip-preview", "--stack", "rehearsal"])
    assert (typed.kind, dict(typed.options)) == ("up", {"refresh": True})


def test_a_resource_can_be_replaced_by_its_urn() -> None:
    typed = understood(["up", "--yes", "--replace", "urn:a", "--replace", "urn:b"])
    assert dict(typed.options) == {"replace": ["urn:a", "urn:b"]}


@pytest.mark.parametrize("kind", ["up", "destroy", "refresh"])
def test_what_changes_something_has_to_be_confirmed(kind: str) -> None:
    with pytest.raises(RehearsalError, match="--yes"):
        understood([kind])
    assert understood([kind, "--yes"]).kind == kind


def test_a_preview_needs_no_yes() -> None:
    assert understood(["preview", "--diff"]).options == {"diff": True}


@pytest.mark.parametrize("line", ["up --yes --stack dev", "stack output --json --stack dev"])
def test_another_stack_than_the_rehearsals_is_not_found(line: str) -> None:
    with pytest.raises(RehearsalError, match="no stack named 'dev' found"):
        understood(line.split())


def test_a_flag_that_is_not_known_is_refused_and_not_left_out() -> None:
    with pytest.raises(RehearsalError, match="--parallel"):
        understood(["up", "--yes", "--parallel", "4"])
    with pytest.raises(RehearsalError, match="--replace"):
        understood(["destroy", "--yes", "--replace", "urn:a"])


def test_outputs_are_told_without_the_command_line() -> None:
    assert understood(["stack", "output", "--json", "-s", "rehearsal"]).options == {
        "json": True,
        "name": None,
    }
    assert understood(["stack", "output", "inventory"]).options == {"json": False, "name": "inventory"}


def test_what_needs_no_program_goes_to_the_command_line_as_it_is() -> None:
    assert understood(["stack", "--show-urns"]).words == ("stack", "--show-urns")
    assert understood(["version"]).kind == "other"
