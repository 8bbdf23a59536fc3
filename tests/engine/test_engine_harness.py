"""The rehearsal's engine is the real one, and is alone with the program: the tests beside this one build on it."""

import os
import sys
from pathlib import Path
from typing import Any

import pulumi
import pytest
from pulumi import dynamic
from pulumi_gcp import compute, pubsub

from tests.engine.conftest import EngineFactory


def test_what_the_real_provider_would_not_know_and_what_the_program_refuses_fails_the_preview(
    new_engine: EngineFactory,
) -> None:
    def unknown_property() -> None:
        allows: Any = [{"protocol": "tcp", "portz": ["22"]}]
        compute.Firewall("ssh", network="n", allows=allows)

    def refusing() -> None:
        raise pulumi.RunError("the first thing\nthe second thing")

    engine = new_engine(unknown_property)
    report = engine.preview()
    assert not report.ok and "allows[0].portz" in report.text
    engine.program = lambda: pulumi.export("id", pubsub.Topic("t").id)
    report = engine.preview()
    assert not report.ok and "gcp:pubsub/topic:Topic: the stand-in cannot make this type" in report.text
    engine.program = refusing
    report = engine.preview()
    assert not report.ok and "the second thing" in report.text and "Traceback" not in report.text


class Witness(dynamic.ResourceProvider):
    """Tells what a dynamic provider finds around it."""

    def create(self, props: Any) -> dynamic.CreateResult:
        import contracts.inventory

        found = {
            "python": sys.executable,
            "variables": sorted(os.environ),
            "infra": contracts.inventory.__file__,
        }
        return dynamic.CreateResult(id_="witness", outs=found)


class FoundAround(dynamic.Resource):
    python: pulumi.Output[str]
    variables: pulumi.Output[list[str]]
    infra: pulumi.Output[str]

    def __init__(self, name: str) -> None:
        super().__init__(Witness(), name, {"python": None, "variables": None, "infra": None})


THEIRS = ("GOOGLE_APPLICATION_CREDENTIALS", "PULUMI_ACCESS_TOKEN", "CLOUDSDK_CORE_PROJECT", "PYTHONSTARTUP")


def test_a_dynamic_provider_runs_in_this_environment_and_sees_nothing_of_the_users_accounts(
    new_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in THEIRS:
        monkeypatch.setenv(name, "the-users")

    def program() -> None:
        found = FoundAround("found")
        for name in ("python", "variables", "infra"):
            pulumi.export(name, getattr(found, name))

    report = new_engine(program).up()
    assert report.ok, report.text
    assert report.outputs["python"] == sys.executable
    assert Path(report.outputs["infra"]).is_file()
    assert set(THEIRS).isdisjoint(report.outputs["variables"])
