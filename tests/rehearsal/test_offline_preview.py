"""`make preview` up to the engine: what of a file the engine gets, and how what it says is laid out."""

import re
from pathlib import Path

import pytest

from rehearsal import offline_preview
from rehearsal.engine import ROOT
from rehearsal.offline_preview import PreviewError, for_the_engine, stack_name, without_account
from tools import pulumi_cli


def written(folder: Path, text: str) -> Path:
    path = folder / "Pulumi.dev.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        # What needs the user's account goes, and every other line stays where it was.
        ("config:\n  gcp:accessToken: t\n  a: 1\n", ["config:", "", "  a: 1"]),
        ("encryptionsalt: v1:a\nconfig:\n  a:\n    - b\n  gcp:credentials:\n    secure: v1:b\n  # more\n  d: e\n",
         ["", "config:", "  a:", "    - b", "", "", "", "  d: e"]),
        ("config:\n    a: 1\n    gcp:config:tpuV2CustomEndpoint: x\nsecretsprovider: gcpkms://k",
         ["config:", "    a: 1", ""]),
        ("config: {gcp:credentials: c, a: 1}\n", ["config: {a: 1}"]),
        ("config: {a: 1, gcp:credentials: c}\n", ["config: {a: 1, }"]),
    ],
)  # fmt: skip
def test_the_engine_gets_the_file_line_by_line_but_for_what_needs_an_account(
    text: str, lines: list[str]
) -> None:
    assert [line.rstrip() for line in without_account(text)[0].splitlines()] == lines


@pytest.mark.parametrize(
    "text",
    [
        "config:\n  a: 1\n  a: 2\n",
        "config: # of dev\n  a: no # or yes\n  b: 1:30\n  c: 2026-13-45",
        *("config:\n", "a: 1\n", "# nothing\n", "config: [\n", "- config\n", "config: text\n"),
    ],
)
def test_all_else_is_the_engines_to_judge(text: str) -> None:
    assert without_account(text) == (text, [])


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ("\n    secure: v1:abc", "tpu-stack:storage"),
        ("\n    nfs: {mount: {secure: v1:abc}}", "tpu-stack:storage.nfs.mount"),
        ("\n    - secure: v1:abc", "tpu-stack:storage[0]"),
    ],
)
def test_a_value_that_only_its_stack_can_read_is_refused_with_its_path(
    tmp_path: Path, value: str, path: str
) -> None:
    file = written(tmp_path, f"config:\n  gcp:credentials:\n    secure: v1:a\n  tpu-stack:storage:{value}\n")
    with pytest.raises(PreviewError, match=f": {re.escape(path)} is encrypted.*without --secret"):
        for_the_engine(file)


def test_a_file_that_is_not_there_is_refused_and_one_that_is_no_text_is_the_engines_to_refuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(PreviewError, match=r"No such file.*make preview CONFIG="):
        for_the_engine(tmp_path / "Pulumi.dev.yaml")
    assert offline_preview.main([str(tmp_path / "Pulumi.dev.yaml")], {"PATH": "/nonexistent"}) == 2
    assert capsys.readouterr().err.startswith("preview: ")  # before anything is started
    names = ("Pulumi.dev.yaml", "Pulumi.a-b.yml", "stack.yaml")  # the stack is called as Pulumi would call it
    assert [stack_name(tmp_path / name) for name in names] == ["dev", "a-b", "preview"]
    for content in (b"\xff\xfe\x00", b"config: &a {b: *a}\n", b"config: " + b"[" * 2000 + b"]" * 2000):
        (tmp_path / "Pulumi.dev.yaml").write_bytes(content)
        assert for_the_engine(tmp_path / "Pulumi.dev.yaml") == content


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("config: [\n", ["is not YAML: while parsing", "line 2, column 1"]),
        ("config:\n\ta: 1\n", ["line 2: has a tab before its text"]),
        (
            "config:\n  gcp:project: my-project\n  tpu-stack:slices:\n    - {name: a, accelerator: v6e-12}\nconfg: 1\n",
            ['tpu-stack:slices[0].accelerator: "v6e-12"', "confg: nothing reads it; did you mean config:?"],
        ),
        (
            "config:\n  gcp:project: {secure: a}\n  keeper: {secure: b}\n",
            ["tpu-stack:keeper: is kept as a secret"],
        ),
        (b"\xff\xfe\x00", ["is no text in UTF-8"]),
    ],
)
def test_a_mistake_is_told_before_pulumi_is_built(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    text: str | bytes,
    words: list[str],
) -> None:
    (path := tmp_path / "Pulumi.dev.yaml").write_bytes(text.encode() if isinstance(text, str) else text)
    monkeypatch.setattr(pulumi_cli, "build", lambda *_: pytest.fail("it is built"))
    nothing = {"PATH": "/nonexistent", "XDG_CACHE_HOME": str(tmp_path)}
    assert offline_preview.main([str(path)], nothing) == 2
    said = capsys.readouterr().out
    assert [part for part in words if f"error: {path}: " not in said or part not in said] == [], said


def test_a_configuration_without_a_mistake_has_pulumi_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever YAML 1.1 takes for something else: on, and dates."""

    class BuiltError(Exception):
        pass

    def build(*_: object) -> None:
        raise BuiltError

    monkeypatch.setattr(pulumi_cli, "build", build)
    labels = "{a: on, b: 2026-13-45}"
    one = f"{{name: a, accelerator: v5litepod-4, zone: us-west4-a, labels: {labels}}}"
    merged = "    - &a {name: a, accelerator: v5litepod-4, zone: us-west4-a, count: 0x2}\n    - {<<: *a, name: b}\n"
    for text in (
        (ROOT / "Pulumi.example.yaml").read_text(),
        f"config:\n  gcp:project: my-project\n  tpu-stack:slices: [{one}]\n",
        f"config:\n  gcp:project: my-project\n  tpu-stack:slices:\n{merged}",
    ):
        path = written(tmp_path, text)
        with pytest.raises(BuiltError):
            offline_preview.main([str(path)], {"PATH": "/nonexistent", "XDG_CACHE_HOME": str(tmp_path)})
