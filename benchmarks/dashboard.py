"""The dashboard in a real browser: how long until a page can be used, cold and warm, and many browsers at once."""

import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

from playwright.sync_api import Browser, Page, sync_playwright

from benchmarks.measure import table, tracekit
from tracekit.findings import Findings, Unanalysed
from tracekit.job import Job
from tracekit.model import Layout
from tracekit.store import Incoming, Store
from tracekit.synth import SynthSpec, parse_cause, synthesize
from tracekit.trace import Trace

JOBS, DIFFERENT = 1200, 24
RUNS = 5
CAUSES = ("slow-worker:factor=1.4", "python-gc", "slow-last-stage", "sequence-length-imbalance", None, None)
#: Large jobs: DP ranks, stages, microbatches, steps.
LARGE = {"512x16": (512, 16, 16, 6), "1024x64": (1024, 64, 2, 3)}
PAGES = ("/job", "/workers", "/attribution", "/time", "/whatif", "/timeline", "/compare")
#: A page can be used when its content is there, every figure is drawn and every grid has its rows.
READY = """() => document.querySelector("#page > *") && !document.querySelector("[data-dash-is-loading]")
  && [...document.querySelectorAll(".chart")].every(chart => chart.querySelector("svg"))
  && [...document.querySelectorAll(".ag-root-wrapper")].every(grid => grid.querySelector(".ag-row"))"""
#: Zooms and pans the timeline; how long each frame took to draw, ms.
FRAMES = """async () => {
  const timeline = tracekitTimeline.current(), drawn = [];
  const frame = () => new Promise((done) => requestAnimationFrame(done));
  const move = async (act) => { act(); await frame(); await frame(); drawn.push(timeline.frame_ms); };
  for (let i = 0; i < 40; i++) await move(() => timeline.zoom(0.93, 800));
  for (let i = 0; i < 40; i++) await move(() => timeline.pan(i % 2 ? 0.02 : 0.03));
  for (let i = 0; i < 40; i++) await move(() => timeline.zoom(1 / 0.93, 800));
  return drawn;
}"""

INTRO = f"""## Dashboard

A store of {JOBS:,} jobs and two large ones. Time until a page can be used: its content there, figures drawn, grids
filled; in Chromium on the same machine. Cold: a new browser profile, a job nobody has looked at; warm: the same page
again."""


def section() -> str:
    """The Markdown of this section."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "jobs.store"
        _fill(store)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path="/usr/bin/chromium-headless-shell",
                args=["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"],
            )
            parts = [
                INTRO,
                _pages(browser, store),
                _wire(browser, store),
                _large(browser, store),
                _timeline(browser, store),
                _crowd(store),
            ]
            browser.close()
    return "\n\n".join(parts)


def _fill(store: Path) -> None:
    """Many small jobs of few kinds, and the large ones."""
    different: list[tuple[Trace, Findings | Unanalysed]] = []
    for number in range(DIFFERENT):
        cause = CAUSES[number % len(CAUSES)]
        trace = synthesize(
            SynthSpec(
                layout=Layout(dp=4, pp=4),
                microbatches=8,
                steps=10,
                seed=number,
                name="job",
                causes=() if cause is None else (parse_cause(cause),),
            )
        )
        different.append((trace, Job(trace).findings()))
    small = [
        Incoming(trace, f"job-{number:04d}", "synth", found)
        for number in range(JOBS)
        for trace, found in [different[number % DIFFERENT]]
    ]
    large = []
    for name, (dp, pp, microbatches, steps) in LARGE.items():
        trace = synthesize(
            SynthSpec(
                layout=Layout(dp=dp, pp=pp),
                microbatches=microbatches,
                steps=steps,
                name=name,
                causes=(parse_cause("slow-worker:factor=1.5"),),
            )
        )
        large.append(Incoming(trace, name, "synth", Job(trace).findings()))
    Store(store).add(small + large)


@contextmanager
def _serving(store: Path) -> Iterator[str]:
    """`tracekit dashboard` as it is used; yields its address."""
    with subprocess.Popen(
        tracekit("dashboard", str(store), "--port", "0"), stdout=subprocess.PIPE, stderr=sys.stderr, text=True
    ) as process:
        assert process.stdout is not None
        found = re.search(r"http://\S+/", process.stdout.readline())
        assert found is not None
        url = found[0].rstrip("/")
        with urlopen(f"{url}/readyz") as answer:
            answer.read()
        yield url
        process.terminate()


def _until_ready(page: Page, url: str) -> float:
    began = time.perf_counter()
    page.goto(url)
    page.wait_for_function(READY)
    return time.perf_counter() - began


def _cold_and_warm(browser: Browser, url: str) -> tuple[float, float]:
    """Seconds until ready in a new profile, and again in the same."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    cold = _until_ready(page, url)
    warm = statistics.median(_until_ready(page, url) for _ in range(RUNS))
    context.close()
    return cold, warm


def _pages(browser: Browser, store: Path) -> str:
    rows = []
    with _serving(store) as url:
        for path in ("/", *PAGES):
            times = []
            for number in range(RUNS):
                asked = "" if path == "/" else f"?job=job-{100 + number:04d}"
                if path == "/compare":
                    asked += f"&with=job-{200 + number:04d}"
                times.append(_cold_and_warm(browser, url + path + asked))
            cold, warm = (statistics.median(column) for column in zip(*times, strict=True))
            rows.append([path, f"{cold:.2f}", f"{warm:.2f}"])
    return table(["page", "cold s", "warm s"], rows)


def _wire(browser: Browser, store: Path) -> str:
    """Bytes of each page as they come over the wire: first of a visit, and after another page."""
    rows = []
    with _serving(store) as url:
        for path in ("/", *PAGES):
            asked = path if path == "/" else f"{path}?job=job-0100"
            asked += "&with=job-0101" if path == "/compare" else ""
            first, requests = _bytes(browser, [url + asked])
            both, _ = _bytes(browser, [f"{url}/nowhere", url + asked])
            other, _ = _bytes(browser, [f"{url}/nowhere"])
            rows.append([path, f"{first / 1e3:.0f}", str(requests), f"{(both - other) / 1e3:.0f}"])
    return "Bytes over the wire, compressed:\n\n" + table(["page", "first kB", "requests", "later kB"], rows)


def _bytes(browser: Browser, addresses: list[str]) -> tuple[int, int]:
    """Bytes and requests of these pages one after the other in a new profile."""
    context = browser.new_context()
    page, sizes = context.new_page(), dict[str, int]()
    watching = context.new_cdp_session(page)
    watching.send("Network.enable")
    watching.on("Network.loadingFinished", lambda one: sizes.update({one["requestId"]: int(one["encodedDataLength"])}))
    for address in addresses:
        page.goto(address)
        page.wait_for_selector("#page > *")
        page.wait_for_load_state("networkidle")
    context.close()
    return sum(sizes.values()), len(sizes)


def _large(browser: Browser, store: Path) -> str:
    rows = []
    for name in LARGE:
        times = []
        for _ in range(3):
            with _serving(store) as url:
                times.append(_cold_and_warm(browser, f"{url}/workers?job={name}"))
        cold, warm = (statistics.median(column) for column in zip(*times, strict=True))
        rows.append([name, f"{cold:.2f}", f"{warm:.2f}"])
    return "Worker map of a large job, the server just started:\n\n" + table(["dp x pp", "cold s", "warm s"], rows)


def _timeline(browser: Browser, store: Path) -> str:
    """All ops of a step of the largest jobs on the canvas."""
    rows = []
    for name in LARGE:
        painted, frames = [], []
        for _ in range(3):
            with _serving(store) as url:
                context = browser.new_context(viewport={"width": 1920, "height": 1080})
                page = context.new_page()
                path = f"{url}/timeline?job={name}&view=recorded&streams=all"
                painted.append([_until_painted(page, path) for _ in range(2)])
                spans = page.evaluate("() => tracekitTimeline.current().scene.spans")
                frames += page.evaluate(FRAMES)
                context.close()
        cold, warm = (statistics.median(column) for column in zip(*painted, strict=True))
        frames.sort()
        late = frames[int(len(frames) * 0.95)]
        rows.append(
            [name, f"{spans:,}", f"{cold:.2f}", f"{warm:.2f}", f"{statistics.median(frames):.1f}", f"{late:.1f}"]
        )
    heads = ["dp x pp", "spans", "cold s", "warm s", "frame ms, median", "frame ms, 95th percentile"]
    return "Timeline of one step, until it is painted; frames while zooming and panning:\n\n" + table(heads, rows)


def _until_painted(page: Page, url: str) -> float:
    began = time.perf_counter()
    page.goto(url)
    page.wait_for_selector("#timeline-host[data-painted]", timeout=120_000)
    return time.perf_counter() - began


def _crowd(store: Path) -> str:
    """Twenty browsers' worth of requests at once: the page's own request for each page."""
    with _serving(store) as url:

        def ask(number: int) -> tuple[int, float]:
            began = time.perf_counter()
            paths = (
                "/",
                "/_dash-layout",
                "/download/jobs.csv",
                "/metrics",
                f"/download/by_worker.csv?job=job-{number:04d}",
            )
            with urlopen(url + paths[number % len(paths)]) as answer:
                answer.read()
                return answer.status, time.perf_counter() - began

        with ThreadPoolExecutor(20) as pool:
            answers = list(pool.map(ask, range(400)))
    errors = sum(status != 200 for status, _ in answers)
    times = sorted(took for _, took in answers)
    return (
        f"20 clients at once, 400 requests of five kinds: {errors} errors, median {times[200] * 1e3:.0f} ms,"
        f" 99th percentile {times[395] * 1e3:.0f} ms."
    )
