"""`make preview` with the real engine."""

from pathlib import Path

import pulumi
import pytest
from pulumi_gcp import compute

from rehearsal.offline_preview import preview
from tools.pulumi_cli import PulumiCli


@pytest.fixture
def project_file(tmp_path: Path) -> Path:
    path = tmp_path / "Pulumi.yaml"
    path.write_text(
        "name: tpu-stack\nruntime:\n  name: python\n  options:\n    virtualenv: .venv\nmain: infra/\n"
    )
    return path


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "Pulumi.trial.yaml"
    path.write_text("config:\n  gcp:project: my-project\n  tpu-stack:name: lan\n")
    return path


def test_a_preview_shows_resources_messages_outputs_and_what_was_simulated_of_a_file_that_the_engine_reads(
    cli: PulumiCli, project_file: Path, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another reader of YAML takes the last of two keys, no for false, 1:30 for 90, and fails at a date like this."""

    def program() -> None:
        config = pulumi.Config("tpu-stack")
        network = compute.Network("network", name=config.require("name"))
        compute.Router("router", network=network.id, region="us-central1")
        pulumi.log.warn("it costs something")
        pulumi.export("name", network.name)
        pulumi.export("read", [config.require(key) for key in ("flag", "days", "until")])

    config_file.write_text(
        config_file.read_text()
        + "  tpu-stack:flag: no\n  tpu-stack:days: 1:30\n  tpu-stack:until: 2026-13-45\n"
    )
    assert preview(config_file, program=program, cli=cli, project_file=project_file) == 0
    said = capsys.readouterr().out
    parts = [
        "tpu-stack-trial",
        "gcp:compute:Network",
        "gcp:compute:Router",
        "warning: it costs something",
        '"lan"',
    ]
    positions = [said.index(part) for part in [*parts, "3 to create", "Simulated: Google Cloud"]]
    assert positions == sorted(positions)
    assert all(f': "{text}"' in said for text in ("no", "1:30", "2026-13-45")), said


def test_what_the_program_or_the_engine_refuses_ends_with_exit_code_2_and_the_reasons(
    cli: PulumiCli, project_file: Path, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def program() -> None:
        raise pulumi.RunError("tpu-stack:slices: required")

    assert preview(config_file, program=program, cli=cli, project_file=project_file) == 2
    said = capsys.readouterr().out
    assert said.count("tpu-stack:slices: required") == 1 and "Traceback" not in said

    right = config_file.read_text()
    config_file.write_text(right + "  tpu-stack:budget: [.inf]\nconfg: {}\n")
    assert preview(config_file, program=lambda: None, cli=cli, project_file=project_file) == 2
    said = capsys.readouterr().out
    assert f"error: {config_file}: tpu-stack:budget[0]: .inf is not a number" in said, said
    assert "confg: nothing reads it; did you mean config:?" in said, said

    config_file.write_text(right + "confg: {}\n")
    assert preview(config_file, program=lambda: None, cli=cli, project_file=project_file) == 2
    said = capsys.readouterr().out
    assert "confg: nothing reads it" in said and "create" not in said, said

    config_file.write_text(right + "  tpu-stack:name: wan\n")
    assert preview(config_file, program=program, cli=cli, project_file=project_file) == 2
    said = capsys.readouterr().out
    assert 'line 4: mapping key "tpu-stack:name" already defined at line 3' in said, said
