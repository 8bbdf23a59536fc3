"""Makes docs/dashboard-*.png of real runs: the pages of `fab dashboard` in Chromium, with as few colours as they need.

The two newest runs of flax_mlm that are done are compared; one that is active is shown, else the newest.

python -m tools.screenshots RUNS   (the folder where they are)"""

import io
import json
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parent.parent
COLOURS = 96
"""Text stays sharp with so many, and a picture has a third of the bytes."""


def main() -> None:
    (runs,) = sys.argv[1:]
    command = [str(Path(sys.executable).with_name("fab")), "dashboard", "--port", "0", "--runs", runs]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        base = server.stdout.readline().split()[-1]
        try:
            _take_all(base)
        finally:
            server.terminate()


def _take_all(base: str) -> None:
    with urllib.request.urlopen(f"{base}api/runs") as answer:
        runs = json.load(answer)["runs"]
    done = [
        f"{run['place']}/{run['id']}" for run in runs if run["state"] == "done" and run["job"] == "flax_mlm"
    ]
    active = [f"{run['place']}/{run['id']}" for run in runs if run["state"] == "running"]
    compared = "&".join(f"run={run}" for run in done[:2])
    _take(base, "runs", width=1060, height=400, scheme="light")
    _take(f"{base}run/{(active or done)[0]}", "run", width=1060, height=1240, scheme="dark")
    _take(f"{base}compare?{compared}", "compare", width=1060, height=1180, scheme="light")


def _take(url: str, name: str, *, width: int, height: int, scheme: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        page = browser.new_page(
            viewport={"width": width, "height": height}, color_scheme="dark" if scheme == "dark" else "light"
        )
        page.goto(url)
        page.wait_for_selector("table.runs tbody tr" if name == "runs" else ".u-legend")
        page.wait_for_load_state("networkidle")
        if name != "runs":  # as somebody does who reads a curve
            box = page.locator(".plot .u-over").first.bounding_box()
            assert box is not None
            page.mouse.move(box["x"] + 0.62 * box["width"], box["y"] + box["height"] / 2)
        picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        browser.close()
    path = ROOT / "docs" / f"dashboard-{name}.png"
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()
