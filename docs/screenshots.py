"""Make the pictures of README and docs/ from the sample traces: `python docs/screenshots.py`.

In: the samples, and the simulated windows of a job, of which a rank is slow in some. Out: docs/images/*.png, of 128
colours each.
"""

import re
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import polars as pl
from PIL import Image
from playwright.sync_api import sync_playwright

from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.dashboards.documents.card import card
from tracekit.sources.load import load
from tracekit.store import Incoming, Store
from tracekit.synth import SynthSpec, parse_cause, synthesize
from tracekit.trace.model import Layout

ROOT = Path(__file__).parents[1]
IMAGES, SAMPLES = ROOT / "docs" / "images", ROOT / "sample_traces"
#: The job of several windows of so many steps, one right after another, and the slow ones among them.
JOB, WINDOWS, STEPS, SLOW = "llama-70b", 13, 30, (3, 4, 5, 10, 11, 12)
#: Picture: page, theme, width, height.
PICTURES = {
    "jobs": ("/", "light", 1280, 800),
    "job": ("/job?job=slow-worker", "light", 1280, 800),
    "timeline": ("/timeline?job=slow-worker&critical=yes", "light", 1280, 800),
    "gpu_job": ("/job?job=gpu_slow_input", "light", 1280, 900),
    "gpu_timeline": ("/timeline?job=gpu_slow_input", "light", 1280, 640),
    "whatif": ("/whatif?job=gpu_slow_input", "light", 1280, 700),
    "time": (f"/time?job={JOB}", "light", 1280, 900),
    "incidents": ("/incidents", "light", 1280, 700),
}
#: The card of a notebook, which is dark where the notebook is.
CARD_WIDTH, CARD_HEIGHT = 900, 700


def main() -> None:
    """Fill a store, serve it, and take the pictures."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        store = Path(folder) / "jobs.store"
        _fill(Store(store))
        command = [sys.executable, "-m", "tracekit.cli", "dashboard", str(store), "--port", "0"]
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium-headless-shell", args=["--no-sandbox", "--disable-gpu", "--disable-sync"]
        )
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            address = re.search(r"http://\S+/", server.stdout.readline())
            assert address is not None
            for name, (path, theme, width, height) in PICTURES.items():
                context = browser.new_context(viewport={"width": width, "height": height})
                context.add_cookies([{"name": "theme", "value": theme, "url": address[0]}])
                page = context.new_page()
                page.goto(address[0].rstrip("/") + path)
                page.wait_for_selector("#page > *")
                page.wait_for_load_state("networkidle")
                page.wait_for_function("() => !document.querySelector('#page').innerText.includes(' ...')")
                _keep(name, page.screenshot())
            server.terminate()
        page = browser.new_page(viewport={"width": CARD_WIDTH, "height": CARD_HEIGHT}, color_scheme="dark")
        page.set_content(f'<body style="background: #111">{card(load(SAMPLES / "slow_worker.parquet"))}')
        _keep("card", page.screenshot())
        browser.close()


def _fill(store: Store) -> None:
    """The samples, and a job of windows whose incident is open."""
    for path in (*sorted(SAMPLES.glob("*.parquet")), SAMPLES / "gpu_slow_input"):
        job = load(path)
        store.add([Incoming(job.trace, job.trace.name, str(path), job.stored())])
    store.begin_watch(JOB, "torchrun")
    begin_s = time.time() - WINDOWS * STEPS
    for number in range(WINDOWS):
        causes = (parse_cause("slow-worker:dp=1,pp=2,factor=1.6"),) if number in SLOW else ()
        ran = synthesize(SynthSpec(Layout(dp=4, pp=4), steps=STEPS, seed=number, name=JOB, causes=causes))
        ops = ran.ops.with_columns(step=ran.ops["step"].rank("dense").cast(pl.Int32) - 1 + STEPS * number)
        end_s = pl.col("start") + pl.col("duration")
        spans = ops.group_by("step").agg(span_s=end_s.max() - pl.col("start").min()).sort("step")
        starts = {}
        for step, span_s in spans.iter_rows():
            starts[step], begin_s = begin_s, begin_s + span_s
        hosts = {str(rank): f"node-{rank // 8:02d}" for rank in range(16)}
        ran = replace(ran, ops=ops, step_starts=starts, metadata={"hosts": hosts, "tokens_per_step": 4_000_000})
        store.append(Incoming(ran, JOB, "collect", PipelineJob(ran).stored()))


def _keep(name: str, png: bytes) -> None:
    """Write a picture with few colours, which is a third as large."""
    path = IMAGES / f"{name}.png"
    path.write_bytes(png)
    with Image.open(path) as image:
        image.convert("RGB").quantize(128).save(path, optimize=True)
    print(f"Wrote docs/images/{name}.png")


if __name__ == "__main__":
    main()
