"""The rehearsal's engine runs alone with the program: it sees nothing of the user's accounts."""

import os
import sys
from pathlib import Path
from typing import Any

import pulumi
import pytest
from pulumi import dynamic

from tests.engine.conftest import EngineFactory


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
