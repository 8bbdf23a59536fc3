"""Question answering in TensorFlow: a RoBERTa finds the answer's place in a text, as in SQuAD, on all devices."""

from jobs.runtime.monitoring.metric_definitions import Metric, Metrics

FRAMEWORK = "tensorflow"
PREDICTS_FROM = ("config.json", "model.safetensors", "tokenizer.json")
HUB = ("transformers", "question-answering")
METRICS = Metrics(
    headline="f1",
    progress=("loss", "windows_per_s"),
    metrics=(
        Metric(name="f1", title="F1", unit="%", better="higher", baseline="baseline", is_evaluation=True),
        Metric(name="exact_match", title="exact match", unit="%", better="higher", chart="f1"),
        Metric(name="loss", title="loss", better="lower"),
        Metric(name="eval_loss", title="eval loss", better="lower", is_evaluation=True, chart="loss"),
        Metric(name="baseline", title="most frequent place", unit="%"),
        Metric(name="has_answer_f1", title="F1, with an answer", unit="%", better="higher", is_detail=True),
        Metric(
            name="has_answer_exact_match",
            title="exact match, with an answer",
            unit="%",
            better="higher",
            is_detail=True,
        ),
        Metric(
            name="no_answer_exact_match",
            title="exact match, without an answer",
            unit="%",
            better="higher",
            is_detail=True,
        ),
        Metric(name="windows_per_s", title="speed", unit="windows/s", better="higher"),
        Metric(name="learning_rate", title="learning rate"),
        Metric(name="grad_norm", title="gradient norm"),
    ),
)
