"""Every mistake in a configuration has its own message, which names the place, the value, the rule and the remedy.

`mistakes.txt` has what a user wrote and what is answered, to be read as a table of the rules.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.config import ConfigError, reader, settings_file

TABLE = Path(__file__).with_name("mistakes.txt")
SLICE = {"name": "main", "accelerator": "v5litepod-8", "zone": "us-central1-a"}


def cases() -> list[tuple[str, str, tuple[str, ...]]]:
    """Where it is written, what, and what is answered."""
    found: list[tuple[str, str, tuple[str, ...]]] = []
    for line in TABLE.read_text().splitlines():
        if line.startswith(("slice  ", "stack  ")):
            where, _, written = line.partition("  ")
            found.append((where, written, ()))
        elif line.startswith("    "):
            where, written, said = found[-1]
            found[-1] = (where, written, (*said, line.strip()))
    return found


def problems(
    values: dict[str, object], *, project: str | None = "my-project", stack: str = "dev", **more: Any
) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as error:
        reader.read(values, project=project, stack=stack, **more)
    assert str(error.value) == "\n".join(error.value.problems)
    return error.value.problems


def written_over(right: dict[str, object], written: str) -> dict[str, object]:
    changed = dict(right)
    for key, value in yaml.safe_load(written).items():
        if str(key).startswith("-"):
            del changed[key.removeprefix("-")]
        else:
            changed[key] = value
    return changed


@pytest.mark.parametrize(("where", "written", "said"), [pytest.param(*case, id=case[1]) for case in cases()])
def test_a_mistake_is_answered_with_place_value_rule_and_remedy(
    where: str, written: str, said: tuple[str, ...]
) -> None:
    if where == "slice":
        values: dict[str, object] = {"slices": [written_over(dict(SLICE), written)]}
    else:
        values = written_over({"slices": [SLICE]}, written)
    assert problems(values) == said


@pytest.mark.parametrize(
    ("project", "stack", "said"),
    [
        (None, "dev", "gcp:project: missing; name your project: `pulumi config set gcp:project PROJECT-ID`"),
        ("123456789012", "dev", ('gcp:project: "123456789012" is a project number; write the project id, as `gcloud '
         "projects list` shows it")),
        ("My Project", "dev", ('gcp:project: "My Project" is not a project id; write 6 to 30 of lower-case letters, '
         "digits and hyphens, a letter first")),
        ("my-project", "._.", ('stack: "._." is no name for a stack; write letters, digits, hyphens, underscores and '
         "dots; `pulumi stack rename NAME` changes it")),
        ("my-project", "google", ('tpu-stack:storage.bucket.name: missing, and the default "my-project-google-'
         'tpu-stack" is no name for a bucket: none may begin with "goog" or contain "google"')),
    ],
)  # fmt: skip
def test_a_project_is_named_by_its_id_and_a_stack_by_what_names_can_be_made_of(
    project: str | None, stack: str, said: str
) -> None:
    assert problems({"slices": [SLICE]}, project=project, stack=stack) == (said,)


def test_the_providers_own_keys_are_no_place_of_slices_and_an_unknown_one_is_a_mistake() -> None:
    nowhere: dict[str, object] = {"slices": [{"name": "main", "accelerator": "v6e-8"}]}
    assert problems(
        nowhere, provider={"gcp:project": "p", "gcp:zone": "us-central1-a", "gcp:region": None}
    ) == (
        (
            "tpu-stack:slices[0].zone: missing; write it here, or tpu-stack:zone for all slices "
            "(gcp:zone and gcp:region are the provider's own and not read for this)"
        ),
    )
    fine = ["project", "zone", "billingProject", "tpuV2CustomEndpoint", "accessToken", "version"]
    keys: dict[str, object] = {f"gcp:{name}": None for name in (*fine, "projct", "nonsense")}
    assert problems({"slices": [SLICE]}, provider=keys) == (
        "gcp:nonsense: unknown key of Pulumi's gcp provider; remove it",
        "gcp:projct: unknown key of Pulumi's gcp provider; did you mean gcp:project?",
    )
    wrong = {"gcp:zone": "xx", "gcp:region": "5", "gcp:userProjectOverride": "maybe", "gcp:batching": "{}"}
    assert problems({"slices": [SLICE]}, provider=wrong) == (
        'gcp:zone: "xx" is not a zone; write it as us-central1-a',
        "gcp:region: 5 is not a region; write it as us-central1",
        'gcp:userProjectOverride: "maybe" is not true or false',
    )


def test_a_key_of_another_namespace_that_seems_to_be_a_slip_is_a_mistake_and_names_what_was_meant() -> None:
    slips = {
        "tpustack:budget-usd-per-hour": "tpu-stack:budget-usd-per-hour",
        "tpu_stack:keeper": "tpu-stack:keeper",
        "TPU-stack:Keeper": "tpu-stack:keeper",
        "tpu-stak:kepeer": "tpu-stack:keeper",
        "stack:slices": "tpu-stack:slices",
        "training:budget-usd-per-hour": "tpu-stack:budget-usd-per-hour",
        "GCP:projct": "gcp:project",
    }
    assert problems({"slices": [SLICE]}, other_keys=slips) == tuple(
        f"{written}: nothing reads it; did you mean {meant}?" for written, meant in slips.items()
    )
    foreign = [
        "aws:region",
        "google-native:project",
        "azure-native:location",
        "kubernetes:context",
        "docker:host",
    ]
    reader.read({"slices": [SLICE]}, project="my-project", stack="dev", other_keys=foreign)


PLACE = "write it in digits, or remove the key"


@pytest.mark.parametrize(
    ("text", "unread", "refused"),
    [
        ("config: {gcp:project: p}\nencryptionsalt: v1:x\nenvironment: [e]\nsecretsprovider: x\n", [], []),
        ("", [], []),
        ("# nothing\n", [], []),
        ("config: {a: b}\n---\n", [], []),
        ("config: [\n", [], []),
        ("confg:\n  gcp:project: p\n", ["line 1: confg: nothing reads it; did you mean config:?"], []),
        ("Config: {}\n", ["line 1: Config: nothing reads it; did you mean config:?"], []),
        (
            "config: {}\ntpu-stack:keeper: true\n",
            [
                "line 2: tpu-stack:keeper: stands outside config, where nothing reads it; indent it below config:"
            ],
            [],
        ),
        (
            "config:\n  null: 2\n  gcp:project: p\n  gcp:config:project: q\n  zone: a\n  tpu-stack:zone: b\n",
            [
                "line 2: null: names no key; put it in quotes, or remove it",
                "line 4: gcp:config:project: is the same key as gcp:project in line 3; remove one",
                "line 6: tpu-stack:zone: is the same key as zone in line 5; remove one",
            ],
            [],
        ),
        ("config: {}\nslices: []\n", ["line 2: slices: nothing reads it; move it below config:"], []),
        (
            "config: {}\n---\nconfig:\n  tpu-stack:keeper: true\n",
            [
                (
                    "line 3: is in another document of the file, and only the first is read; move it there, and remove "
                    "the line ---"
                )
            ],
            [],
        ),
        (
            "config:\n  a: .inf\n  b: [1, {c: -.INF, d: .nan}]\n  e: '.inf'\n  f: 1.0e+999\n",
            [],
            [
                f"a: .inf is not a number that a configuration can have; {PLACE}",
                f"b[1].c: -.INF is not a number that a configuration can have; {PLACE}",
                f"b[1].d: .nan is not a number that a configuration can have; {PLACE}",
                f"f: 1.0e+999 is not a number that a configuration can have; {PLACE}",
            ],
        ),
        ("config: &a\n  b: *a\n  c: !!float x\n  1: {2: 3}\n", [], []),
        ("config:\n  a: 1\n\tb: 2\n", [], ["line 3: has a tab before its text; indent with spaces"]),
        ("config:\n  a: [1,\n", [], []),
    ],
)
def test_what_the_engine_reads_past_in_a_file_or_refuses_without_its_place_is_named(
    text: str, unread: list[str], refused: list[str]
) -> None:
    assert settings_file.unread(text) == unread
    assert settings_file.refused(text) == refused


def test_a_slice_has_no_more_labels_and_disks_than_a_resource_and_its_generation_take() -> None:
    labels = {f"l{number}": "x" for number in range(60)}
    disks = [{"name": f"d{number}", "size-gib": 10} for number in range(32)]
    v6e = {**SLICE, "accelerator": "v6e-8", "zone": "us-central1-b"}
    most = {**v6e, "labels": dict(list(labels.items())[1:]), "data-disks": disks[1:]}
    assert (
        reader.read({"slices": [most]}, project="my-project", stack="dev").slices[0].labels == most["labels"]
    )
    assert problems({"slices": [{**v6e, "labels": labels, "data-disks": disks}]}) == (
        "tpu-stack:slices[0].labels: 60 labels; Google takes 64, and 59 beside ours; remove some",
        "tpu-stack:slices[0].data-disks: 32 disks; a v6e VM takes 31; remove some",
    )


def test_a_secret_is_refused_its_value_shown_nowhere_and_it_is_not_said_to_be_missing_too() -> None:
    keys = ["budget-usd-per-hour", "slices", "zone"]
    hidden: dict[str, object] = dict.fromkeys(keys, "hunter2")
    assert problems(hidden, secrets=keys) == tuple(
        f"tpu-stack:{key}: is kept as a secret, nothing here is one; set it anew without --secret"
        for key in keys
    )


def test_all_mistakes_are_said_at_once_in_the_order_of_reading() -> None:
    wrong: dict[str, object] = {
        "zone": "here",
        "slices": [
            {"nam": "main", "accelerator": "v6e-12", "count": 0, "labels": {"Team": 1}},
            {"name": "two", "accelerator": "v6e-8", "zone": "us-central1-b", "data-disks": [{"name": "d"}]},
        ],
        "storage": {"bucket": {"region": "EU"}, "nfs": {"mount": "/"}},
        "network": {"subnetwork": "mine"},
        "access": {"members": ["allUsers", "ada@example.com"]},
        "images": {"references": {"jax": "jax"}},
        "grant": [{"type": "v5e"}],
        "protect": "no",
        "allow_billable": True,
    }
    found = [
        each.split(": ")[0].removeprefix("tpu-stack:") for each in problems(wrong, project=None, stack="a/b")
    ]
    assert found == [
        "gcp:project", "stack", "zone", "grant[0].zone", "grant[0].chips", "grant[0].capacity",
        "slices[0].accelerator", "slices[0].count",
        "slices[0].labels", "slices[0].nam", "slices[1].data-disks[0].size-gib", "storage.bucket.region",
        "storage.nfs.mount", "network.subnetwork", "access.members[0]", "access.members[1]", "images.references.jax",
        "protect", "allow_billable",
    ]  # fmt: skip
