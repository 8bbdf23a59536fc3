"""Where an attempt's time went, as a table of the report: a row for each part of `time_s` in result.json."""

from jobs.runtime.report.fields import Json, mapping, number
from jobs.runtime.report.page import escape

MEANINGS = {
    "start": "joining, reading the data, compiling, the first step",
    "compute": "handing steps to the devices and waiting for their results",
    "input_wait": "making a batch while the devices had nothing to do",
    "evaluation": "evaluations on the way and at the end",
    "checkpoint": "held up by a checkpoint; most of it is written beside the steps",
    "logging": "writing metrics",
    "profile": "writing a trace",
    "finish": "what follows the last step: the export, a last look",
}
"""What each part of jobs.runtime.time_split is, in a few words."""
_MOST_ROWS = 32


def time_split(result: Json) -> str:
    """The parts in order of their size, with their shares; nothing where the run has not told them."""
    parts = {
        name: seconds
        for name, value in mapping(result.get("time_s")).items()
        if (seconds := number(value)) is not None and seconds >= 0
    }
    total_s = sum(parts.values())
    if not total_s:
        return ""
    lines = "".join(
        f"<tr><td>{escape(name.replace('_', ' '))}</td><td>{seconds:,.1f} s</td><td>{seconds / total_s:.1%}</td>"
        f"<td>{escape(MEANINGS.get(name, ''))}</td></tr>"
        for name, seconds in sorted(parts.items(), key=lambda part: -part[1])[:_MOST_ROWS]
    )
    return (
        '<h2>Where the time went</h2><div class="scroll"><table>'
        f"<tr><th>part</th><th>time</th><th>share</th><th>what it is</th></tr>{lines}</table></div>"
    )
