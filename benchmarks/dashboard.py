"""The dashboard in a real browser: time until a page can be used, CPU time of server and browser, many clients."""

import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

from playwright.sync_api import Browser, Page, sync_playwright

from benchmarks import many_jobs
from benchmarks.measure import table, tracekit, tree_cpu_s
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.report.findings import Findings, Unanalysed
from tracekit.store import Incoming, Store
from tracekit.synth import SynthSpec, parse_cause, synthesize
from tracekit.trace.canonical import Trace
from tracekit.trace.model import Layout

JOBS, DIFFERENT = 62, 24
#: Jobs of 8,192 workers each in the other store.
MANY_JOBS = 10_000
RUNS = 5
QUICK = {"JOBS": 30, "MANY_JOBS": 150, "RUNS": 1, "LARGE": {"32x4": (32, 4, 4, 3)}}
CAUSES = ("slow-worker:factor=1.4", "python-gc", "slow-last-stage", "sequence-length-imbalance", None, None)
#: Large jobs: DP ranks, stages, microbatches, steps.
LARGE: dict[str, tuple[int, int, int, int]] = {"512x16": (512, 16, 16, 6), "1024x64": (1024, 64, 2, 3)}
PAGES = ("/job", "/time", "/workers", "/whatif", "/timeline", "/compare")
#: Pages about all jobs.
OF_ALL = ("/", "/incidents", "/hosts")
#: What slow clients send before they stop: part of a head, part of a body, or requests whose answers they do not read.
UNFINISHED = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\nX-",
    b"POST /_dash-update-component HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000\r\n\r\n{",
    b"GET /assets/tracekit.css HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100,
)
SLOW_CLIENTS = 200
#: A page can be used once its content is there, every figure is drawn.
READY = """() => document.querySelector("#page > *") && !document.querySelector("[data-dash-is-loading]")
  && [...document.querySelectorAll(".chart")].every(chart => chart.querySelector("svg"))"""
#: Zooms and pans the timeline; returns the drawing time of each frame, ms.
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

Time until a page can be used (content there, figures drawn), in Chromium on the same machine. Cold: a
new browser profile and a job not opened before; warm: the same page reloaded. CPU: CPU seconds of the cold page. Two
stores: {JOBS:,} jobs of 16 workers with two
large ones, and {MANY_JOBS:,} jobs of {many_jobs.LARGE.dp * many_jobs.LARGE.pp:,} workers on {many_jobs.HOSTS:,} hosts
each."""


def section() -> str:
    """The Markdown of this section."""
    with tempfile.TemporaryDirectory() as folder:
        store, many = Path(folder) / "jobs.store", Path(folder) / "many.store"
        _fill(store)
        many_jobs.fill(many, MANY_JOBS)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path="/usr/bin/chromium-headless-shell",
                args=["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"],
            )
            parts = [
                INTRO,
                _pages(browser, store, [f"job-{number:04d}" for number in range(JOBS)], f"{JOBS:,} jobs"),
                _pages(
                    browser, many, [many_jobs.name(number) for number in range(1, 100)], f"{MANY_JOBS:,} large jobs"
                ),
                _table(browser, many),
                _wire(browser, store),
                _large(browser, store),
                _timeline(browser, store),
                _crowd(store),
                _slow(store),
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
        different.append((trace, PipelineJob(trace).stored()))
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
        large.append(Incoming(trace, name, "synth", PipelineJob(trace).stored()))
    Store(store).add(small + large)


@dataclass(frozen=True)
class Server:
    """A running dashboard."""

    url: str
    process: int

    def cpu_s(self) -> float:
        """CPU seconds of the server and its workers so far."""
        return tree_cpu_s(self.process)


@contextmanager
def _serving(store: Path) -> Iterator[Server]:
    """Run `tracekit dashboard`."""
    with subprocess.Popen(
        tracekit("dashboard", str(store), "--port", "0"), stdout=subprocess.PIPE, stderr=sys.stderr, text=True
    ) as process:
        assert process.stdout is not None
        address = re.search(r"http://\S+/", process.stdout.readline())
        assert address is not None
        url = address[0].rstrip("/")
        with urlopen(f"{url}/readyz") as answer:
            answer.read()
        yield Server(url, process.pid)
        process.terminate()


def _until_ready(page: Page, url: str) -> float:
    began = time.perf_counter()
    page.goto(url)
    page.wait_for_function(READY)
    return time.perf_counter() - began


@dataclass(frozen=True)
class Visit:
    """Seconds until a page can be used: in a new profile, and reloaded; CPU seconds of the first load."""

    cold_s: float
    warm_s: float
    server_s: float
    browser_s: float


def _visit(browser: Browser, server: Server, address: str) -> Visit:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    before, all_before = server.cpu_s(), _children_cpu_s()
    cold = _until_ready(page, server.url + address)
    spent = server.cpu_s() - before
    browsing = _children_cpu_s() - all_before - spent
    page.wait_for_load_state("networkidle")
    warm = _until_ready(page, server.url + address)
    context.close()
    return Visit(cold, warm, spent, browsing)


def _children_cpu_s() -> float:
    """CPU seconds of server and browser."""
    return tree_cpu_s(os.getpid()) - time.process_time()


def _middle(visits: list[Visit]) -> list[str]:
    """Medians as cells of a row."""
    return [
        f"{statistics.median(getattr(visit, name) for visit in visits):.2f}"
        for name in ("cold_s", "warm_s", "server_s", "browser_s")
    ]


def _pages(browser: Browser, store: Path, jobs: list[str], title: str) -> str:
    rows = []
    with _serving(store) as server:
        for path in (*OF_ALL, *PAGES):
            visits = []
            for number in range(RUNS):
                asked = path if path in OF_ALL else f"{path}?job={jobs[10 + number]}"
                asked += f"&with={jobs[20 + number]}" if path == "/compare" else ""
                visits.append(_visit(browser, server, asked))
            rows.append([path, *_middle(visits)])
    return f"{title}:\n\n" + table(["page", "cold s", "warm s", "server CPU s", "browser CPU s"], rows)


#: Views of the table of all jobs.
VIEWS = ("/?sort=job", "/?q=00077", "/?verdict=straggler", "/?at=100")


def _table(browser: Browser, store: Path) -> str:
    """The views of the table of all jobs, and all of it as a file."""
    with _serving(store) as server:
        rows = [[view, *_middle([_visit(browser, server, view) for _ in range(RUNS)])] for view in VIEWS]
        before = server.cpu_s()
        with urlopen(f"{server.url}/download/jobs.csv") as answer:
            size = len(answer.read())
        spent = server.cpu_s() - before
    heads = ["view", "cold s", "warm s", "server CPU s", "browser CPU s"]
    return (
        f"The table of all jobs, sorted, searched, narrowed, and its hundredth part:\n\n{table(heads, rows)}\n\n"
        f"All of it as a file of the server: {size / 1e6:.1f} MB, {spent:.2f} CPU seconds."
    )


def _wire(browser: Browser, store: Path) -> str:
    """Compressed bytes of each page as the first of a visit, and after another page."""
    rows = []
    with _serving(store) as server:
        for path in (*OF_ALL, *PAGES):
            asked = path if path in OF_ALL else f"{path}?job=job-0010"
            asked += "&with=job-0011" if path == "/compare" else ""
            first, requests = _bytes(browser, [server.url + asked])
            both, _ = _bytes(browser, [f"{server.url}/nowhere", server.url + asked])
            other, _ = _bytes(browser, [f"{server.url}/nowhere"])
            rows.append([path, f"{first / 1e3:.0f}", str(requests), f"{(both - other) / 1e3:.0f}"])
    return "Bytes over the wire, compressed:\n\n" + table(["page", "first kB", "requests", "later kB"], rows)


def _bytes(browser: Browser, addresses: list[str]) -> tuple[int, int]:
    """Bytes and requests of these pages in turn, in a new profile."""
    context = browser.new_context()
    page, sizes = context.new_page(), dict[str, int]()
    watching = context.new_cdp_session(page)
    watching.send("Network.enable")
    watching.on(
        "Network.loadingFinished", lambda event: sizes.update({event["requestId"]: int(event["encodedDataLength"])})
    )
    for address in addresses:
        page.goto(address)
        page.wait_for_selector("#page > *")
        page.wait_for_load_state("networkidle")
    context.close()
    return sum(sizes.values()), len(sizes)


def _large(browser: Browser, store: Path) -> str:
    rows = []
    for name in LARGE:
        visits = []
        for _ in range(3):
            with _serving(store) as server:
                visits.append(_visit(browser, server, f"/workers?job={name}"))
        rows.append([name, *_middle(visits)])
    heads = ["dp x pp", "cold s", "warm s", "server CPU s", "browser CPU s"]
    return "Worker map of a large job, the server just started:\n\n" + table(heads, rows)


def _timeline(browser: Browser, store: Path) -> str:
    """All ops of a step of the largest jobs on the canvas."""
    rows = []
    for name in LARGE:
        painted, frames = [], []
        for _ in range(3):
            with _serving(store) as server:
                context = browser.new_context(viewport={"width": 1920, "height": 1080})
                page = context.new_page()
                path = f"{server.url}/timeline?job={name}&view=recorded&streams=all"
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
    """Twenty clients at once."""
    with _serving(store) as server:

        def ask(number: int) -> tuple[int, float]:
            began = time.perf_counter()
            paths = (
                "/",
                "/_dash-layout",
                "/download/jobs.csv",
                "/metrics",
                f"/download/by_worker.csv?job=job-{number % JOBS:04d}",
            )
            with urlopen(server.url + paths[number % len(paths)]) as answer:
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


def _slow(store: Path) -> str:
    """Health check and page while slow clients hold their connections."""
    times: dict[str, list[float]] = {"/healthz": [], "/_dash-layout": []}
    with _serving(store) as server, ExitStack() as stack:
        for number in range(SLOW_CLIENTS):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", urlsplit(server.url).port or 0)))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(UNFINISHED[number % len(UNFINISHED)])
        for path in list(times) * 100:
            began = time.perf_counter()
            with urlopen(server.url + path) as answer:
                answer.read()
            times[path].append(time.perf_counter() - began)
    said = (
        f"`{path}` in {statistics.median(took) * 1e3:.0f} ms, at most {max(took) * 1e3:.0f} ms"
        for path, took in times.items()
    )
    return f"{SLOW_CLIENTS} slow clients, of heads, bodies and answers, meanwhile: {'; '.join(said)}."
