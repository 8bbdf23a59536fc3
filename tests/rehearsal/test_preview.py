"""`make preview` up to the engine: which configurations are tried, and how what the engine says is laid out."""

from pathlib import Path

import pytest

from rehearsal import preview
from rehearsal.engine_report import Report, Step
from rehearsal.preview import PreviewError, read_configuration, remarks, stack_of, tree


def written(folder: Path, text: str) -> Path:
    path = folder / "Pulumi.dev.yaml"
    path.write_text(text)
    return path


def report(*lines: str) -> Report:
    return Report(kind="preview", ok=True, lines=lines, changes={}, steps=(), diagnostics=(), outputs={})


def test_the_keys_are_read_and_what_is_only_for_google_is_left_out(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "config:\n  gcp:project: p\n  tpu-stack:slices:\n    - name: main\n  gcp:credentials:\n    secure: v1:abc\n"
        "  gcp:accessToken: t\n  gcp:computeCustomEndpoint: x\nencryptionsalt: v1:abc\n",
    )
    assert read_configuration(path) == {"gcp:project": "p", "tpu-stack:slices": [{"name": "main"}]}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("config: [", "is no YAML"),
        ("", 'has no "config:"'),
        ("config:\n", 'has no "config:"'),
        ("- config\n", 'has no "config:"'),
        ("config: text\n", 'has no "config:"'),
        ("config:\n  tpu-stack:zone:\n    secure: v1:abc\n", "tpu-stack:zone is encrypted"),
    ],
)
def test_a_file_that_cannot_be_tried_is_refused_with_the_reason(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(PreviewError, match=said):
        read_configuration(written(tmp_path, text))


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PreviewError, match=r"No such file.*make preview CONFIG="):
        read_configuration(tmp_path / "Pulumi.dev.yaml")
    (tmp_path / "Pulumi.dev.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PreviewError, match="is no YAML"):
        read_configuration(tmp_path / "Pulumi.dev.yaml")


def test_a_wrong_file_ends_with_exit_code_2_before_anything_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert preview.main([str(tmp_path / "Pulumi.dev.yaml")], {"PATH": "/nonexistent"}) == 2
    assert capsys.readouterr().err.startswith("preview: ")


@pytest.mark.parametrize(
    ("name", "stack"), [("Pulumi.dev.yaml", "dev"), ("Pulumi.a-b.yml", "a-b"), ("stack.yaml", "preview")]
)
def test_the_stack_is_called_as_pulumi_would_call_it(name: str, stack: str) -> None:
    assert stack_of(Path("somewhere") / name) == stack


def step(name: str, parent: str = "", op: str = "create", type_token: str = "a:b/c:C") -> Step:
    return Step(op=op, type=type_token, name=name, urn=name, parent=parent)


def test_resources_stand_below_what_they_belong_to_whatever_the_order() -> None:
    steps = [step("leaf", "branch"), step("other", "root"), step("branch", "root", "update"), step("root")]
    lines = [
        (line.split()[-2], len(line) - len(line.lstrip(" +~")), line.split()[-1]) for line in tree(steps)
    ]
    assert lines == [
        ("root", 4, "create"),
        ("other", 7, "create"),
        ("branch", 7, "update"),
        ("leaf", 10, "create"),
    ]


def test_a_resource_whose_parent_is_not_shown_is_shown_and_providers_are_not() -> None:
    lines = tree([step("orphan", "gone"), step("gcp", type_token="pulumi:providers:gcp")])
    assert [line.split() for line in lines] == [["+", "a:b:C", "orphan", "create"]]


def test_of_what_the_engine_says_the_part_below_its_own_list_is_kept_in_colour() -> None:
    coloured = "\x1b[34mDiagnostics:\x1b[0m"
    assert remarks(report("Previewing (dev):", " + x create", coloured, "  error: no")) == [
        coloured,
        "  error: no",
    ]
    assert remarks(report("Previewing (dev):", "", "Resources:", "    + 1 to create"))[0] == "Resources:"
    assert remarks(report("something else broke")) == ["something else broke"]
