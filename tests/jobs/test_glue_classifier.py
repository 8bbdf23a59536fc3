"""What a fine-tuning job says of texts: answers of an export, and the held-out rows that the report shows."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contracts.errors import RequestError
from contracts.run_directory import RunDirectory
from jobs.glue.batches import Encoded
from jobs.glue.classifier import Batch, Classifier
from jobs.glue.data import Dataset, Rows
from jobs.glue.predictions import write_predictions
from jobs.glue.pretrained import KEY
from jobs.glue.tokenizer import open_tokenizer, train_tokenizer
from jobs.runtime.prediction import Answer, answer

VOCABULARY = ("one", "two", "three", "four")
CONFIG: dict[str, Any] = {
    "model_type": "roberta",
    "pad_token_id": 1,
    "max_position_embeddings": 34,
    "problem_type": "single_label_classification",
    "id2label": {"0": "odd", "1": "even"},
    KEY: {"pairs": False, "max_length": 16},
}
type Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """An export without weights."""
    train_tokenizer([*VOCABULARY, " ".join(VOCABULARY * 2)] * 9, tmp_path)

    def write(**changed: Any) -> Path:
        (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **changed}))
        return tmp_path

    return write


def logits(batch: Batch) -> np.ndarray[Any, Any]:
    """Of a model of which the second logit is the number of a row's tokens, less 5."""
    assert len(batch.ids_BS) <= 32 and batch.ids_BS.shape[1] <= 32
    lengths_B = batch.mask_BS.sum(axis=1) - 5.0
    return np.stack([np.zeros_like(lengths_B), lengths_B], axis=1)


def ask(export: Path, *inputs: str, second: str | None = None) -> list[Answer]:
    return answer(Classifier(export, logits), inputs, second)


def test_each_text_has_its_own_answer_however_many_there_are_with_all_classes_the_best_first(
    write: Write,
) -> None:
    inputs = [" ".join(VOCABULARY[:1] * (1 + n % 7)) for n in range(75)]
    actual = ask(write(), *inputs)
    assert [value.input for value in actual] == inputs
    for text, value in zip(inputs, actual, strict=True):
        tokens = 2 + len(text.split())
        share = 1 / (1 + np.exp(5.0 - tokens))
        first, second = ("even", share), ("odd", 1 - share)
        expected = [first, second] if share > 0.5 else [second, first]
        if tokens != 5:
            assert [guess.text for guess in value.best] == [name for name, _ in expected]
            assert [guess.probability for guess in value.best] == pytest.approx(
                [value for _, value in expected]
            )


def test_a_text_that_the_model_reads_in_part_says_so_and_a_number_has_no_probability(write: Write) -> None:
    fits, cut = ask(write(), "one " * 13 + "one", "one " * 14 + "one")
    assert fits.heading is None
    assert cut.heading is not None and cut.heading.endswith(" one (the model reads 16 tokens of it)")
    (number,) = ask(write(problem_type="regression"), "one")
    assert [(guess.text, guess.probability) for guess in number.best] == [("0", None)]


def test_special_tokens_in_a_row_or_a_question_are_text(write: Write) -> None:
    text, export = "one </s></s> two <mask> <pad><s>", write(**{KEY: {"pairs": False, "max_length": 64}})
    tokenizer = open_tokenizer(export)
    tokenizer.encode_special_tokens = False  # as transformers opens it for torch_glue
    row = Rows(texts_a=(text,), texts_b=(), labels=(0.0,))
    encoded = Encoded(row, tokenizer, pad_id=1, max_length=64, is_regression=False)
    learned = encoded.packed(np.array([0]), ((1, int(encoded.lengths_N[0])),), 1).ids_GT[0].tolist()
    request = Classifier(export, logits).encode(text, None).rows[0].values.ids
    assert learned == request == [0, *(token for token in request if token > 4), 2]
    assert open_tokenizer(export).decode(request) == text


def test_a_model_of_pairs_wants_a_second_text_and_one_of_single_texts_refuses_it(write: Write) -> None:
    with pytest.raises(RequestError, match="single texts takes no second text; leave it out"):
        ask(write(), "one", second="two")
    pairs = write(**{KEY: {"pairs": True, "max_length": 16}})
    with pytest.raises(RequestError, match="pairs of texts; give the second text with --second"):
        ask(pairs, "one")
    (first,), (older,) = ask(pairs, "one", second="two"), ask(write(**{KEY: {}}), "one")
    assert first.best[0].text == "even" and older.best[0].text == "odd"


def dataset(labels: tuple[str, ...], values: tuple[float, ...]) -> Dataset:
    rows = Rows(texts_a=tuple(f"row {n}" for n in range(len(values))), texts_b=(), labels=values)
    return Dataset(
        source="rows",
        task="classification" if labels else "regression",
        metric_set=None,
        labels=labels,
        train=rows,
        eval=rows,
        fingerprint="",
        baseline=0.0,
    )


def read_samples(tmp_path: Path, rows: Dataset, logits: list[list[float]]) -> dict[str, Any]:
    directory = RunDirectory(str(tmp_path))
    write_predictions(directory, rows, np.array(logits))
    return directory.read_json("samples.json") or {}


def test_the_matrix_counts_truth_by_prediction_and_the_surest_mistakes_come_first(tmp_path: Path) -> None:
    logits = [[2.0, 0.0, 0.0]] * 20
    logits[3], logits[7], logits[9] = [0.0, 1.0, 0.0], [0.0, 0.0, 5.0], [0.0, 5.0, 0.0]
    truth = (*(0.0,) * 9, 1.0, *(0.0,) * 10)
    actual = read_samples(tmp_path, dataset(("a", "b", "c"), truth), logits)
    assert actual["confusion"] == {"labels": ["a", "b", "c"], "counts": [[17, 1, 1], [0, 1, 0], [0, 0, 0]]}
    assert len(actual["texts"]) == 12
    first, second, third, *_ = actual["texts"]
    assert first == {"texts": ["row 7"], "truth": "a", "prediction": "c", "probability": 0.9867}
    assert (second["texts"], third["truth"]) == (["row 3"], third["prediction"])
    numbers = read_samples(tmp_path, dataset((), (1.0, 2.5)), [[1.25], [0.5]])
    assert [(value["truth"], value["prediction"], value["probability"]) for value in numbers["texts"]] == [
        ("2.5", "0.5", None),
        ("1", "1.25", None),
    ]
    assert "confusion" not in numbers
