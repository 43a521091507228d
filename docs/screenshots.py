"""Make the pictures of README and docs/dashboard.md from the sample traces: `python docs/screenshots.py`."""

import re
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
#: Picture: page, theme, height.
PICTURES = {
    "jobs": ("/", "light", 800),
    "job": ("/job?job=slow-worker", "light", 800),
    "timeline": ("/timeline?job=slow-worker&critical=yes", "light", 800),
}


def main() -> None:
    traces = sorted(map(str, (ROOT / "sample_traces").glob("*.parquet")))
    command = [sys.executable, "-m", "tracekit.cli", "dashboard", *traces, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as playwright:
        assert server.stdout is not None
        found = re.search(r"http://\S+/", server.stdout.readline())
        assert found is not None
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium-headless-shell", args=["--no-sandbox", "--disable-gpu", "--disable-sync"]
        )
        for name, (path, theme, height) in PICTURES.items():
            context = browser.new_context(viewport={"width": 1280, "height": height})
            context.add_cookies([{"name": "theme", "value": theme, "url": found[0]}])
            page = context.new_page()
            page.goto(found[0].rstrip("/") + path)
            page.wait_for_selector("#page > *")
            page.wait_for_load_state("networkidle")
            page.screenshot(path=ROOT / "docs" / "images" / f"{name}.png")
            print(f"Wrote docs/images/{name}.png")
        browser.close()
        server.terminate()


if __name__ == "__main__":
    main()
