"""What Docker says while it builds."""

from __future__ import annotations

from collections.abc import Mapping

from launch.images.answers import LINES_OF_ERROR, Answers, failure


def told(*answers: Mapping[str, object]) -> Answers:
    made = Answers()
    for answer in answers:
        made.take(answer)
    return made


def test_the_step_and_what_it_does_are_read_and_labels_are_no_news() -> None:
    made = Answers()
    assert made.take({"stream": "Step 3/12 : RUN  python3 -m venv   /opt/venv\n"})
    assert (made.step, made.steps, made.doing) == (3, 12, "RUN python3 -m venv /opt/venv")
    assert not made.take({"stream": "Step 4/12 : LABEL a=b\n"})


def test_what_has_to_be_cleaned_up_is_known_at_every_moment() -> None:
    made = told({"stream": " ---> aaaaaaaaaaaa\n"}, {"stream": " ---> Running in cccccccccccc\n"})
    assert (made.last_image, made.container) == ("aaaaaaaaaaaa", "cccccccccccc")
    made.take({"stream": "Step 4/5 : COPY a b\n"})
    assert made.container is None
    made.take({"aux": {"ID": "sha256:dd"}})
    assert made.image == "sha256:dd"


def test_an_error_shows_the_step_and_the_last_lines_without_what_moves_a_cursor() -> None:
    made = told(
        {"stream": "Step 2/3 : RUN make\n"},
        *({"stream": f"line {number}\n"} for number in range(40)),
        {"stream": "\x1b[31mred\x1b[0m\n"},
        {"error": "returned a non-zero code: 7"},
    )
    said = failure("tpu-stack/one:cpu-1", made, "/var/lib/docker")
    assert "was not built at step 2/3, RUN make: returned a non-zero code: 7" in said
    assert "\n  red\n" in said
    assert said.count("line ") == LINES_OF_ERROR - 1


def test_a_full_disk_is_told_from_other_failures_with_what_to_remove() -> None:
    made = told({"error": "write /var/lib/docker/x: no space left on device"})
    said = failure("tpu-stack/one:cpu-1", made, "/data/docker")
    assert "(/data/docker) is full" in said
    assert "fab images --prune" in said


def test_a_base_that_cannot_be_had_leads_to_another_base() -> None:
    made = told({"error": "pull access denied for python, repository does not exist"})
    assert "TPU_STACK_BASE_IMAGE" in failure("t", made, "/d")
