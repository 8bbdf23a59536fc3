"""What Google does not offer is warned of in a preview, what cannot be asked is said once, and neither stops it."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from infra.config import Config
from infra.policy import offered
from infra.policy.offered import Offered, Organisation
from rehearsal.simulated_cloud import SimulatedCloud
from tests.infra.conftest import Configure
from tests.infra.policy.stacks import a_slice, a_stack, an_nfs
from tests.servers import Handler, serving

DISABLED = "Compute Engine API has not been used in project 1 before or it is disabled."


@pytest.fixture(scope="module")
def tpu_api() -> Iterator[SimulatedCloud]:
    with SimulatedCloud() as api:
        yield api


class Google:
    """Compute and Resource Manager on loopback: path → status and answer; one that is not there is a 404."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, Any]] = {}
        self.hangs = threading.Event()
        self.hangs.set()
        self.url = ""


@pytest.fixture
def google() -> Iterator[Google]:
    made = Google()

    class Answering(Handler):
        def do_GET(self) -> None:
            made.hangs.wait(20)
            missing = (404, {"error": {"status": "NOT_FOUND", "message": "was not found"}})
            status, content = made.answers.get(self.path, missing)
            self.reply(content, status)

        def do_POST(self) -> None:
            self.body()
            self.do_GET()

    with serving(Answering) as address:
        made.url = f"http://{address}"
        yield made
        made.hangs.set()


def settings(tpu_api: SimulatedCloud, google: Google | None = None) -> dict[str, str]:
    found = {"gcp:tpuV2CustomEndpoint": tpu_api.url}
    if google is None:
        return found
    manager = {"gcp:resourceManagerCustomEndpoint": f"{google.url}/v1/"}
    return found | manager | {"gcp:computeCustomEndpoint": f"{google.url}/compute/v1/"}


def ask(config: Config, settings: dict[str, str]) -> Offered:
    """With time enough for a machine that is busy."""
    return offered.ask(config, settings.get, limit_s=60)


MACHINE = "/compute/v1/projects/my-project/zones/us-central1-a/machineTypes/e2-small"
ANCESTRY = "/v1/projects/my-project:getAncestry"


def test_what_the_zone_offers_is_no_finding(tpu_api: SimulatedCloud, google: Google) -> None:
    google.answers = {MACHINE: (200, {"name": "e2-small"}), ANCESTRY: (200, {"ancestor": []})}
    config = a_stack()
    asked = ask(config, settings(tpu_api, google))
    assert asked.machine_types == {"us-central1-a/e2-small": True}
    assert (asked.organisation, asked.not_asked) == (Organisation(id=None), None)
    assert {"v5litepod-16", "v5p-8"} <= asked.accelerators["us-central1-a"]
    assert list(offered.findings(config, asked)) == []


def test_what_the_zone_does_not_offer_is_a_warning_each(tpu_api: SimulatedCloud, google: Google) -> None:
    # The pages of a long list are all read: v5p-12288 is far behind the first hundred.
    config = a_stack(
        a_slice("a", accelerator="v6e-8", runtime_version="v2-alpha-tpuv6f"),
        a_slice("b", accelerator="v5p-12288"),
        # Of the Cloud TPU API nothing is asked for it.
        a_slice("c", accelerator="v6e-8", runtime_version="", provisioning="compute"),
    )
    found = list(offered.findings(config, ask(config, settings(tpu_api, google))))
    assert [(each.severity, each.path) for each in found] == [
        ("warning", "tpu-stack:slices[0].accelerator"),
        ("warning", "tpu-stack:slices[0].runtime-version"),
        ("warning", "tpu-stack:slices[2].accelerator"),
        ("warning", "tpu-stack:storage.nfs.machine-type"),
    ]
    assert "lists no v6e-8 in us-central1-a for my-project" in found[0].message
    assert found[1].message.endswith("did you mean v2-alpha-tpuv6e?")
    assert "no ct6e-standard-8t in us-central1-a" in found[2].message
    assert "no e2-small in us-central1-a" in found[3].message


def test_a_cloud_on_this_machine_is_asked_alone_and_only_a_gateway_has_a_machine_type(
    tpu_api: SimulatedCloud, google: Google
) -> None:
    asked = ask(a_stack(), settings(tpu_api))
    assert (asked.machine_types, asked.organisation, asked.not_asked) == ({}, None, None)
    assert list(offered.findings(a_stack(), asked)) == []
    for nfs in (None, an_nfs("us-central1-a", kind="filestore")):
        assert ask(a_stack(nfs=nfs), settings(tpu_api, google)).machine_types == {}


def test_what_cannot_be_asked_is_said_once_and_the_rest_still_counts(
    tpu_api: SimulatedCloud, google: Google
) -> None:
    google.answers = {MACHINE: (403, {"error": {"status": "PERMISSION_DENIED", "message": DISABLED}})}
    config = a_stack(a_slice(accelerator="v6e-8", runtime_version="v2-alpha-tpuv6e"))
    found = list(offered.findings(config, ask(config, settings(tpu_api, google))))
    assert [each.severity for each in found] == ["warning", "note"]
    assert "not turned on for the project yet" in found[1].message


def test_a_google_that_does_not_answer_holds_a_preview_up_for_no_longer_than_the_limit(
    tpu_api: SimulatedCloud, google: Google
) -> None:
    google.hangs.clear()
    began_s = time.monotonic()
    asked = offered.ask(a_stack(), settings(tpu_api, google).get, limit_s=1.5)
    assert time.monotonic() - began_s < 15  # the server lets go after 20 s
    assert asked.not_asked is not None and "no answer within" in asked.not_asked
    assert [each.severity for each in offered.findings(a_stack(), asked)] == ["note"]


def test_without_credentials_it_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    asked = ask(a_stack(), {})
    assert asked.not_asked is not None and "gcloud auth application-default login" in asked.not_asked
    assert ask(a_stack(), {"gcp:tpuV2CustomEndpoint": "ftp://x"}).not_asked is not None


def test_a_member_from_outside_the_organisation_needs_a_role_that_no_project_can_give(
    configure: Configure, tpu_api: SimulatedCloud, google: Google
) -> None:
    people = {"members": ["user:ada@example.com", "user:bob@gmail.com", "group:all@elsewhere.com"]}
    config = configure(access=people)
    google.answers = {
        ANCESTRY: (200, {"ancestor": [{"resourceId": {"type": "project", "id": "my-project"}},
                                      {"resourceId": {"type": "organization", "id": "42"}}]}),
        "/v1/organizations/42": (200, {"displayName": "example.com"}),
    }  # fmt: skip
    asked = ask(config, settings(tpu_api, google))
    assert asked.organisation == Organisation(id="42", domain="example.com")
    (found,) = [each for each in offered.findings(config, asked) if each.path == "tpu-stack:access"]
    assert found.severity == "warning"
    assert (
        "`gcloud organizations add-iam-policy-binding 42 --member user:bob@gmail.com "
        "--role roles/compute.osLoginExternalUser`" in found.message
    )
    assert "ada@" not in found.message and "elsewhere" not in found.message


ROBOT = "serviceAccount:robot@other.iam.gserviceaccount.com"
EXAMPLE_COM = Organisation(id="42", domain="example.com")


@pytest.mark.parametrize(
    ("member", "organisation", "severities"),
    [
        ("user:ada@example.com", None, []),
        ("user:ada@gmail.com", None, ["note"]),
        ("user:ada@gmail.com", Organisation(id=None), []),
        ("user:ada@gmail.com", Organisation(id="42"), ["warning"]),
        ("user:ada@example.com", Organisation(id="42"), []),
        ("user:ada@example.org", EXAMPLE_COM, ["warning"]),
        (ROBOT, EXAMPLE_COM, []),
    ],
)
def test_who_is_outside_is_told_as_far_as_it_is_known(
    configure: Configure, member: str, organisation: Organisation | None, severities: list[str]
) -> None:
    config = configure(access={"members": [member]})
    found = offered.findings(config, Offered(organisation=organisation))
    assert [each.severity for each in found] == severities
