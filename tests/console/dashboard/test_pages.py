"""The dashboard's pages in a real browser: what they show, by keyboard, on a narrow screen, and from hostile runs."""

import json
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from jobs.runtime.report.render import read_and_render
from tests.console.dashboard.conftest import Serve
from tests.console.dashboard.run_directories import line, make_run, run_id

pytestmark = pytest.mark.slow
SOON_MS = 15_000
POLICY = "Content Security Policy"
Open = Callable[..., Page]


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens an address in a window of its own. At the end no page may have had an error, or tried to load from
    elsewhere."""
    expect.set_options(timeout=SOON_MS)
    mishaps: list[str] = []
    contexts = []

    def begin(url: str, *, width: int = 1200, scheme: str = "light") -> Page:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme="dark" if scheme == "dark" else "light"
        )
        context.set_default_timeout(SOON_MS)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: mishaps.append(str(error)))
        page.on("console", lambda said: mishaps.append(said.text) if POLICY in said.text else None)
        page.on("dialog", lambda dialog: mishaps.append(f"dialog {dialog.message}"))
        page.goto(url)
        return page

    yield begin
    for context in contexts:
        context.close()
    assert mishaps == []


def rows(page: Page) -> list[str]:
    return page.locator("table.runs td.run a").all_inner_texts()


def test_all_runs_are_listed_filtered_and_sorted_and_two_are_compared_by_keyboard_only(
    tmp_path: Path, serve: Serve, open_page: Open
) -> None:
    for number, rate in enumerate((1e-3, 3e-3, 5e-3)):
        make_run(tmp_path / "here", run_id(number), seed=number, settings={"learning_rate": rate})
    priced = {
        "accelerator_type": "v5litepod-16",
        "zone": "us-central1-a",
        "capacity": "on-demand",
        "count": 1,
    }
    make_run(
        tmp_path / "there",
        run_id(3),
        state="failed",
        more={"name": "priced", "platform": "tpu", "slice": priced},
    )
    page = open_page(serve(tmp_path / "here", tmp_path / "there") + "/")
    expect(page.locator("table.runs tbody tr")).to_have_count(4)
    text = page.locator("table.runs tbody").inner_text()
    assert "failed" in text and "eval loss" in text and "400 / 400" in text
    assert re.search(r"\$\d\.\d\d", text), "the run on a TPU has a cost"
    keys = page.keyboard
    keys.press("/")
    keys.type("flax done")
    expect(page.locator("table.runs tbody tr")).to_have_count(3)
    page.locator("th.run button").focus()
    keys.press("Enter")
    assert rows(page) == [run_id(number) for number in range(3)]
    keys.press("Enter")
    assert rows(page) == [run_id(number) for number in (2, 1, 0)]
    page.locator("tbody input").first.focus()
    keys.press("Space")
    keys.press("Tab")
    keys.press("Tab")
    keys.press("Space")
    expect(page.get_by_text("Compare 2 runs")).to_be_visible()
    page.get_by_text("Compare 2 runs").focus()
    keys.press("Enter")
    expect(page).to_have_url(re.compile(r"/compare\?run="))
    expect(page.locator(".charts figure").first.locator(".u-legend tr:not(.quiet)")).to_have_count(3)
    differing = page.get_by_role("region", name="Settings that differ")
    assert "learning_rate" in differing.inner_text() and "model" not in differing.inner_text()
    assert page.get_by_role("region", name="Measured").locator("b.good").count() >= 1
    page.get_by_role("button", name="tokens").click()
    expect(page.locator(".u-legend").first).to_contain_text("tokens")


def test_a_runs_curves_hosts_and_log_go_on_while_it_runs_and_say_so_when_it_is_killed_or_removed(
    tmp_path: Path, serve: Serve, open_page: Open
) -> None:
    run = make_run(tmp_path / "here", run_id(0), points=20, state="stepping", more={"name": "mine"})
    base, chance = serve(tmp_path / "here"), random.Random(1)
    page = open_page(f"{base}/run/here/{run.name}")
    grid = page.locator(".charts").first
    expect(grid).to_have_attribute("data-lines", "20")
    expect(page.locator("h1")).to_have_text(re.compile("mine running"))
    expect(page.get_by_role("log")).to_have_text(re.compile("a line of host 0"))
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            "".join(json.dumps(line(10 * step, 400, chance)) + "\n" for step in range(21, 31)) + '{"step": 31'
        )
    with (run / "logs" / "0" / "host-0.log").open("a") as file:
        file.write("a later line\n")
    expect(grid).to_have_attribute("data-lines", "30")
    expect(page.get_by_role("log")).to_have_text(re.compile("a later line"))
    page.locator("select[aria-label=Host]").select_option("1")
    expect(page.get_by_role("log")).to_have_text(re.compile("a line of host 1"))
    page.locator(".plot").first.focus()
    page.keyboard.press("Home")
    expect(page.locator(".u-legend").first).to_contain_text("10")
    page.keyboard.press("+")
    expect(page.get_by_role("button", name="Show all").first).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Show all").first).to_be_hidden()
    for host in range(2):
        path = run / "heartbeats" / f"host-{host}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "time": time.time() - 999}))
    expect(page.locator("h1")).to_have_text(re.compile("mine lost"))
    shutil.rmtree(run)
    expect(page.locator("#notice")).to_have_text(re.compile("it may have been removed"))
    expect(page.locator("h1")).to_have_text(re.compile("mine"))
    page.goto(base)
    expect(page.get_by_text("No runs yet")).to_be_visible()


HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"


def test_nothing_that_a_run_says_becomes_markup_on_any_page(
    tmp_path: Path, serve: Serve, open_page: Open
) -> None:
    metrics = {"headline": "loss", "progress": ["loss"], "metrics": [
        {"name": name, "title": HOSTILE, "unit": HOSTILE, "chart": None} for name in ("loss", "eval_loss")
    ]}  # fmt: skip
    said = {
        "name": HOSTILE, "job": HOSTILE, "target": HOSTILE, "metric_definitions": metrics,
        "hosts": [{"index": 0, "name": HOSTILE}], "slice": {"accelerator_type": HOSTILE},
    }  # fmt: skip
    folder = tmp_path / "here"
    for number in range(2):
        run = make_run(
            folder, run_id(number), state="failed", more=said, settings={HOSTILE: HOSTILE, "seed": number}
        )
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 500, HOSTILE: 1.0}) + "\n")
        (run / "logs" / "0" / "host-0.log").write_text(HOSTILE + "\n")
        for name, field in (("result.json", "error"), ("heartbeats/host-0.json", "message")):
            content = json.loads((run / name).read_text())
            (run / name).write_text(json.dumps({**content, field: HOSTILE, "warnings": [HOSTILE]}))
        (run / "samples.json").write_text(json.dumps({"pictures": [{"png": HOSTILE, "truth": HOSTILE}]}))
        (run / "report.html").write_text(read_and_render(str(run)))
    (folder / "<b>no run").mkdir()
    base = serve(folder)
    both = "&".join(f"run=here/{run_id(number)}" for number in range(2))
    report = f"file://{folder / run_id(0)}/report.html"
    for url in (f"{base}/", f"{base}/run/here/{run_id(0)}", f"{base}/compare?{both}", report):
        page = open_page(url)
        expect(page.get_by_text("<img src=x").first).to_be_visible()
        if url != f"{base}/":
            expect(page.locator(".u-legend").first).to_be_visible()
        assert page.locator("main script, main img, main b:has-text('no run')").count() == 0
