"""The labelled rows: from files, from GLUE's own folders, and from Python's standard library."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from contracts.errors import RequestError
from jobs.glue import docstrings
from jobs.glue.data import read
from jobs.glue.options import Options
from jobs.glue.pretrained import problems
from jobs.runtime.storage.model_folder import require_unchanged

# A file with NUL is taken for UTF-16.
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1).filter(
    lambda text: not text.isspace()
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


def write(path: Path, content: str | bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def many(row: str, count: int = 40, head: str = "text,label\n") -> str:
    """`row` with {0} the number of the row, {1} 0 or 1."""
    return head + "".join(row.format(number, number % 2) + "\n" for number in range(count))


def said(**options: Any) -> list[str]:
    return problems(Options(**options), Path("unused"))


# --- files --------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(text=TEXT)
@example(text='a, "b"\r\nc\rd\ne')
def test_a_field_in_quotes_keeps_commas_quotes_and_line_ends_and_mistakes_after_it_have_their_line(
    folder: Path, text: str
) -> None:
    quoted = '"' + text.replace('"', '""') + '"'
    path = write(folder / "a.csv", f"text,label\n{quoted},1\nb,0\n")
    assert read(Options(data=path, eval_data=path)).train.texts_a == (text, "b")
    # csv counts \r, \n and \r\n as ends of lines.
    line = 3 + len((text + "x").replace("\r\n", "\n").replace("\r", "\n").split("\n")) - 1
    path = write(folder / "b.csv", f"text,label\n{quoted},1\nb\n")
    assert said(data=path) == [
        f"--data {path}:{line}: 1 columns, and the first line has 2; mend or remove what is wrong"
    ]


def test_columns_have_usual_names_or_those_that_are_asked_for(tmp_path: Path) -> None:
    head = "Premise,id,HYPOTHESIS,Class,stars,title\n"
    path = write(tmp_path / "a.csv", many("p{0},{0},h{0},{1},{0},t{0}", head=head))
    actual = read(Options(data=path, eval_data=path))
    assert (actual.train.texts_a[1], actual.train.texts_b[1], actual.train.labels[1]) == ("p1", "h1", 1)
    actual = read(
        Options(data=path, eval_data=path, text_field="title", label_field="stars", task="regression")
    )
    assert (actual.train.texts_a[7], actual.train.texts_b, actual.train.labels[7]) == ("t7", (), 7)
    actual = read(Options(data=path, eval_data=path, text_field="title", pair_field="id"))
    assert (actual.train.texts_a[7], actual.train.texts_b[7]) == ("t7", "7")
    (wrong,) = said(data=path, text_field="headline", label_field="x")
    assert wrong == (
        f"--data {path}: no column 'headline' (--text-field) and no column 'x' (--label-field); the columns are "
        "'Premise', 'id', 'HYPOTHESIS', 'Class', 'stars', 'title': name them with these options"
    )


@pytest.mark.parametrize(
    ("labels", "task", "names", "values"),
    [
        (["10", "2", "10.0", "2"], "classification", ("10", "10.0", "2"), [0, 2, 1, 2]),
        (
            ["10", "2", "+2", "0101", "101"],
            "classification",
            ("+2", "2", "10", "0101", "101"),
            [2, 1, 0, 3, 4],
        ),
        (["1_1", "11", "1_1"], "classification", ("11", "1_1"), [1, 0, 1]),
        (
            [9007199254740993, 9007199254740992],
            "classification",
            ("9007199254740992", "9007199254740993"),
            [1, 0],
        ),
        (["9" * 5_000, "1e400"], "classification", ("1e400", "9" * 5_000), [1, 0]),
        (["b", "a", "10", "2"], "classification", ("10", "2", "a", "b"), [3, 2, 0, 1]),
        ([0.5, 1.5, 2.5, 3.5, 1], "classification", ("0.5", "1", "1.5", "2.5", "3.5"), [0, 2, 3, 4, 1]),
        ([0.5, 1.5, 2.5, 3.5, 4.5, 1], "regression", (), [0.5, 1.5, 2.5, 3.5, 4.5, 1]),
        ([10**400, -1], "classification", ("-1", str(10**400)), [1, 0]),
        ([True, False], "classification", ("false", "true"), [1, 0]),
        ([*range(30)] * 2, "classification", tuple(map(str, range(30))), [*range(30)] * 2),
    ],
)
def test_labels_are_numbers_where_many_are_not_whole_and_else_names_in_their_order(
    tmp_path: Path, labels: list[Any], task: str, names: tuple[str, ...], values: list[float]
) -> None:
    rows = [{"text": f"text {number}", "label": label} for number, label in enumerate(labels)]
    path = write(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    actual = read(Options(data=path, eval_data=path))
    assert (actual.task, actual.labels, list(actual.train.labels)) == (task, names, values)
    assert actual.baseline == (max(map(values.count, values)) / len(values) if names else 0)


@pytest.mark.parametrize("other", ["a ", "\uff41", "a\u00a0"])
def test_labels_that_look_the_same_are_different_classes_and_warned_of(tmp_path: Path, other: str) -> None:
    path = write(tmp_path / "a.csv", f"text,label\nx,a\ny,{other}\n")
    actual = read(Options(data=path, eval_data=path))
    assert actual.labels == ("a", other)
    assert "labels that differ only in blanks or in the form of a character" in actual.warnings[0]


FEW, IDS = many("t{0},{1}"), many("t{0},id-{0}")
GLUE_FILE = many("t{0}\t{1}", head="sentence\tlabel\n")
MISTAKES: list[tuple[str, str | bytes, dict[str, Any], str]] = [
    ("none.csv", "", {}, "none.csv: holds no rows; name a file with texts and labels"),
    ("head.csv", "text,label\n", {}, "head.csv: holds no rows"),
    ("a.txt", "text\nprose\n", {}, "a.txt: no column with a usual name for --label-field; the columns are 'text'"),
    ("long.csv", 'text,label\na,0\n"b,1\n' + "c,0\n" * 400_000, {}, "long.csv:3: a quote that opens in this row"),
    ("sep.csv", "sep=;\ntext;label\na;1\nb;0\n", {}, "no column with a usual name for --text-field and no column with"),
    ("latin.csv", "text,label\na,0\né,1\n".encode("latin-1"), {}, "latin.csv:3: 'text' is not UTF-8; convert the"),
    ("one.csv", many("t{0},yes"), {}, "one.csv: every row to train on has the label 'yes'; bring rows of another"),
    ("ids.csv", many("t{0},id-{0}", 15), {"eval_fraction": 0.5}, "is in no row to train on; mend or remove the rows"),
    ("ids.csv", IDS, {"eval_data": "ids.csv"}, "40 different labels in 40 rows, as 'id-0', 'id-1', 'id-10'; name the"),
    ("same.csv", many("t,{1}"), {}, "same.csv: no row of 40 falls into the held-out share; raise --eval-fraction 0.1"),
    ("few.csv", FEW, {"eval_data": "ids.csv"}, "--eval-data ids.csv:2: the label 'id-0' is in no row to train on"),
    ("few.csv", FEW, {"eval_data": "no.csv"}, "--eval-data no.csv: No such file or directory; name a file that can"),
    ("few.csv", FEW, {"eval_data": "x.jsonl"}, "x.jsonl:1: no column 'text'; the columns are 'words', 'label'"),
    ("no.csv", many("t{0},0.{0}1") + "t,much\n", {}, "no.csv:42: the label 'much' is no number; mend or remove the"),
    (".", "", {"data": "docstrings", "text_field": "a", "task": "regression"}, "leave out --text-field, --task"),
    ("glue/train.tsv", "a\tb\n1\t2\n", {"data": "glue"}, "glue/train.tsv: no columns of a GLUE task: 'a', 'b'; of"),
    ("glue/train.tsv", GLUE_FILE, {"data": "glue"}, "glue/dev.tsv: No such file"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "options", "says"), MISTAKES, ids=[value[3][:40] for value in MISTAKES]
)
def test_data_that_cannot_be_trained_on_is_refused_before_anything_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    content: str | bytes,
    options: dict[str, Any],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "ids.csv", many("t{0},id-{0}"))
    write(tmp_path / "x.jsonl", '{"words": "a", "label": 1}\n')
    if name != ".":
        write(tmp_path / name, content)
    assert says in "\n".join(said(**{"data": name, **options}))


def test_every_row_that_is_wrong_is_named_with_its_line(tmp_path: Path) -> None:
    lines = [
        '{"text": "a", "label": true}',
        '{"text": "b"',
        "[1]",
        '{"text": null, "label": 1}',
        "",
        '{"label": 1}',
    ]
    lines += ['{"text": ["c"], "label": 1}', '{"text": "\\ud800", "label": 1}', '{"text": "d", "label": " "}']
    path = write(tmp_path / "a.jsonl", "\n".join(lines))
    assert said(data=path) == [
        f"--data {path}:2: not JSON (Expecting ',' delimiter at column 13)",
        f"--data {path}:3: JSON, but no object with columns",
        f"--data {path}:4: 'text' is empty",
        f"--data {path}:6: no column 'text'; the columns are 'label'",
        f"--data {path}:7: 'text' is no text and no number: ['c']",
        f"--data {path}:8: 'text' is not UTF-8; convert the file (`iconv -f ENCODING -t UTF-8`)",
        f"--data {path}:9: 'label' is empty; mend or remove what is wrong",
    ]
    path = write(tmp_path / "b.csv", "text,label\n" + "a,\n" * 25)
    assert [said(data=path)[index] for index in (9, -1)] == [
        f"--data {path}:11: 'label' is empty",
        "and 15 more like these; mend or remove what is wrong",
    ]


def test_a_pipe_and_a_url_that_nothing_answers_are_refused_and_one_that_answers_is_read(
    tmp_path: Path,
) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    assert (
        "pipe.csv: not a regular file, and it is read more than once; save"
        in said(data=str(tmp_path / "pipe.csv"))[0]
    )
    with fsspec.open("memory://glue/rows.csv", "w") as file:
        file.write(many("text {0},{1}"))
    assert read(Options(data="memory://glue/rows.csv")).labels == ("0", "1")
    assert "memory://glue/none.csv: " in said(data="memory://glue/none.csv")[0]
    assert "memory://glue/train.tsv: " in said(data="memory://glue")[0]
    assert "no driver for this kind of URL" in said(data="nothing://glue/rows.csv")[0]


def test_held_out_rows_stay_the_same_when_rows_are_added_and_share_no_first_text_with_the_others(
    tmp_path: Path,
) -> None:
    head = "question,sentence,label\n"
    rows = [f"q{number % 200},s{number},{number % 3}" for number in range(600)]
    before = read(Options(data=write(tmp_path / "a.csv", head + "\n".join(rows[:400]))))
    actual = read(Options(data=write(tmp_path / "b.csv", head + "\n".join(reversed(rows)))))
    assert not {*actual.train.texts_a} & {*actual.eval.texts_a}
    assert {*before.eval.texts_a} == {*actual.eval.texts_a}
    assert 0.05 < len(actual.eval.labels) / 600 < 0.15
    assert not actual.warnings
    evaluated = write(tmp_path / "c.csv", head + "q1,s1,1\nq,s,0\n")
    actual = read(Options(data=str(tmp_path / "b.csv"), eval_data=evaluated))
    assert actual.warnings == (f"--eval-data {evaluated}: rows that are trained on too: 1",)


def test_the_fingerprint_is_of_texts_labels_names_and_split(tmp_path: Path) -> None:
    def fingerprint(content: str, name: str = "a.csv", **options: Any) -> str:
        path = write(tmp_path / name, content)
        return read(Options(data=path, **options)).fingerprint

    rows = many("text {0},{1}")
    same = fingerprint(rows)
    assert same == fingerprint(rows.replace(",", "\t"), "elsewhere/b.tsv")
    changed = [
        rows.replace("text 3,1", "text 3,0"),
        rows.replace("text 3", "text c"),
        rows.replace(",1", ",2"),
    ]
    actual = {
        same,
        *map(fingerprint, changed),
        fingerprint(rows, eval_fraction=0.3),
        fingerprint(rows, task="regression"),
    }
    assert len(actual) == 6


# --- GLUE ---------------------------------------------------------------------------------------------------

NAMED = {"names": ("label 0", "label 1")}
STSB = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore"
PARSES = "sentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse"
MNLI = f"index\tpromptID\tpairID\tgenre\t{PARSES}\tsentence1\tsentence2\tlabel1\tgold_label"
GLUE: list[tuple[str, str, str, dict[str, Any]]] = [
    ("cola", "", 'gj04\t{1}\t\tSaid "{0}', {"pair": False}),
    ("sst2", "sentence\tlabel", "text {0} \t{1}", {"pair": False}),
    ("mrpc", "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String", '{1}\t1\t2\tfirst {0}\t"second', {}),
    ("stsb", STSB, "{0}\tg\tf\t2012\t1\tnone\tnone\tfirst {0}\tsecond\t3.{0}", {"task": "regression", "names": ()}),
    ("qqp", "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", "{0}\t1\t2\tfirst {0}?\tsecond?\t{1}", {}),
    ("mnli", MNLI, "{0}\t1\t1n\tfiction\t(\t(\t(\t(\tfirst {0}\tsecond\tneutral\tlabel {1}", NAMED),
    ("qnli", "index\tquestion\tsentence\tlabel", "{0}\tfirst {0}\tsecond\tlabel {1}", NAMED),
    ("rte", "index\tsentence1\tsentence2\tlabel", "{0}\tfirst {0}\tsecond\tlabel {1}", NAMED),
    ("wnli", "index\tsentence1\tsentence2\tlabel", "{0}\tfirst {0}\tsecond\t{1}", {}),
]  # fmt: skip


@pytest.mark.parametrize(("task", "head", "row", "has"), GLUE, ids=[value[0] for value in GLUE])
def test_a_folder_of_glue_is_known_by_the_columns_of_its_files(
    tmp_path: Path, task: str, head: str, row: str, has: dict[str, Any]
) -> None:
    content = many(row, head=f"{head}\n" if head else "")
    write(tmp_path / "train.tsv", content)
    write(tmp_path / ("dev_matched.tsv" if task == "mnli" else "dev.tsv"), content)
    actual = read(Options(data=str(tmp_path)))
    assert (actual.metric_set, actual.labels) == (task, has.get("names", ("0", "1")))
    assert actual.task == has.get("task", "classification")
    assert (len(actual.train.texts_a), bool(actual.train.texts_b)) == (40, has.get("pair", True))
    assert actual.train == actual.eval
    assert ("first 3" if has.get("pair", True) else "3") in actual.train.texts_a[3]


# --- docstrings ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def modules() -> dict[str, list[tuple[str, str, str]]]:
    return dict(docstrings.modules())


def test_of_the_default_task_whole_modules_are_held_out_and_no_docstring_is_there_twice(
    modules: dict[str, list[tuple[str, str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docstrings, "modules", modules.items)
    read_docstrings = read(Options())
    assert read_docstrings.labels == ("nothing", "value")
    train, held_out = read_docstrings.train, read_docstrings.eval
    assert 4_000 < len(train.labels) < 20 * len(held_out.labels) < 10 * len(train.labels)
    texts = [*train.texts_a, *held_out.texts_a]
    assert len({*texts}) == len(texts)
    module_name = {row[0]: module for module, rows in modules.items() for row in rows}
    assert not {module_name[text] for text in train.texts_a} & {
        module_name[text] for text in held_out.texts_a
    }
    assert read_docstrings.baseline == sum(held_out.labels) / len(held_out.labels) < 0.8


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (
            {"model_type": "roberta", "vocab_size": 5, "max_position_embeddings": 66},
            "--max-length 128: the model has 64 positions",
        ),
        (
            {"model_type": "bert", "vocab_size": 5, "max_position_embeddings": 100},
            "--max-length 128: the model has 100 positions",
        ),
        (
            {"model_type": "gpt2", "architectures": ["GPT2Model"]},
            "names GPT2Model, of the type gpt2; choose a model",
        ),
        ({}, "names nothing, of the type None; choose a model of the type roberta or bert"),
        ({"model_type": "bert", "vocab_size": 5}, None),
        (
            {"model_type": "bert", "vocab_size": "5"},
            "config.json has vocab_size '5', which is no size; mend it",
        ),
        (
            {"model_type": "bert", "max_position_embeddings": "many"},
            "vocab_size None, which is no size; mend it; config.json has max_position_embeddings 'many', which",
        ),
        (
            {"model_type": "bert", "vocab_size": 4},
            "its tokenizer has 5 tokens and its model 4; the two are not of one",
        ),
    ],
)
def test_a_model_of_another_kind_or_with_too_few_positions_or_tokens_is_refused_before_anything_starts(
    told: dict[str, Any], said: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(told))
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n")
    actual = problems(Options(init_from=str(tmp_path)), tmp_path)
    assert [said in text for text in actual if said] == ([True] if said else []), actual
    (tmp_path / "added_tokens.json").write_text('{"new": 5}')
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "vocab_size": 5}))
    assert (
        "its tokenizer has 6 tokens and its model 5"
        in problems(Options(init_from=str(tmp_path)), tmp_path)[0]
    )
    nowhere = problems(Options(init_from=str(tmp_path / "nowhere")), tmp_path)
    assert len(nowhere) == 1 and "No such file or directory" in nowhere[0]


def test_a_run_whose_own_tokenizer_is_another_now_says_where_it_can_go_on() -> None:
    require_unchanged(None, "a", "a")
    with pytest.raises(
        RequestError, match="Resume it with the data and in a checkout of the commit"
    ) as raised:
        require_unchanged(None, "a", "b")
    assert "--init-from" not in str(raised.value), "it was not asked for"
