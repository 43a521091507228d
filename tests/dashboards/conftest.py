"""A real server over a store of the sample traces, and a real browser that tolerates no error."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from werkzeug.serving import make_server

from tests.dashboards.tabs import PATIENCE_MS, Tabs
from tests.dashboards.watched import analysed
from tests.handmade import LAYOUT, healthy_frame, run, slow_frame
from tests.made_once import made_once
from tracekit.dashboards.browser.web.access import Access
from tracekit.dashboards.browser.web.app import make_app
from tracekit.store import Store
from tracekit.trace.canonical import Trace

SAMPLES = Path(__file__).parents[2] / "sample_traces"
CHROMIUM = Path("/usr/bin/chromium-headless-shell")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # Told by a profile to accept a certificate of its own, Chromium opens each connection twice, and under load gives a
    # request up in the end: ERR_TOO_MANY_RETRIES.
    "--ignore-certificate-errors",
]


@dataclass(frozen=True)
class Serving:
    """A running dashboard: where it answers, and the store it shows."""

    url: str
    store: Path


@pytest.fixture(scope="session")
def sample_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with every sample trace, analysed; each process has a copy."""

    def make(folder: Path) -> Path:
        store = folder / "jobs.duckdb"
        ran = run("import", SAMPLES / "gpu_slow_input", *sorted(SAMPLES.glob("*.parquet")), "--store", store)
        assert ran.code == 0, ran.message
        return store

    made = made_once(tmp_path_factory, "sample-store", make)
    return Path(shutil.copytree(made, tmp_path_factory.mktemp("store") / made.name))


@pytest.fixture(scope="session")
def odd_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a job of one worker, one in which workers were not traced, and one with many workers."""
    folder = tmp_path_factory.mktemp("odd")
    for name, options in {
        "single": ("--dp", "1", "--pp", "1", "--steps", "3"),
        "missing": ("--dp", "4", "--pp", "2", "--steps", "6", "--cause", "missing-ranks"),
        "wide": ("--dp", "12", "--pp", "4", "--steps", "3", "--microbatches", "4"),
    }.items():
        ran = run("synth", *options, "--name", name, "--out", folder / f"{name}.parquet")
        assert ran.code == 0, ran.message
    store = folder / "odd.duckdb"
    ran = run("import", *sorted(folder.glob("*.parquet")), "--store", store)
    assert ran.code == 0, ran.message
    return store


@pytest.fixture(scope="session")
def handmade_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a slow job and a healthy one of two steps, and one that is repaired from step 4 of 8 on; rank 1, the
    slow one, is alone on b.
    """
    store = Store(tmp_path_factory.mktemp("handmade") / "s.store")
    jobs = {
        "slow": slow_frame(range(2)),
        "repaired": pl.concat([slow_frame(range(4)), healthy_frame(range(4, 8))]),
        "fine": healthy_frame(range(2)),
    }
    hosts = {"hosts": {"0": "a", "1": "b", "2": "a", "3": "c"}}
    for name, ops in jobs.items():
        store.append(analysed(replace(Trace.from_frame(ops, LAYOUT, name=name), metadata=hosts)))
    return store.path


@pytest.fixture(scope="session")
def serve() -> Iterator[Callable[..., Serving]]:
    """Starts a dashboard over a store on a free port; all end with the tests."""
    servers = []

    def start(store: Path, access: Access | None = None, study: Path | None = None) -> Serving:
        server = make_server("127.0.0.1", 0, make_app(store, access, study).server, threaded=True)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return Serving(f"http://127.0.0.1:{server.server_port}", store)

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


class Shown:
    """The dashboard that answers at an address for now."""

    app: Callable[..., Any]

    def __call__(self, *request: Any) -> Any:
        return self.app(*request)


@pytest.fixture(scope="session")
def one_address() -> Iterator[tuple[str, Shown]]:
    """An address and what is to answer there."""
    shown = Shown()
    server = make_server("127.0.0.1", 0, shown, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", shown
    server.shutdown()
    server.server_close()


@pytest.fixture
def show(one_address: tuple[str, Shown]) -> Callable[[Path], Serving]:
    """Puts a store of the test's own at the one address where tabs stay open between tests: a new one takes seconds."""

    def put(store: Path) -> Serving:
        url, shown = one_address
        shown.app = make_app(store).server
        return Serving(url, store)

    return put


@pytest.fixture(scope="session")
def serving(sample_store: Path, serve: Callable[[Path], Serving]) -> Serving:
    """The dashboard over the sample traces."""
    return serve(sample_store)


@pytest.fixture(scope="session")
def odd(odd_store: Path, serve: Callable[[Path], Serving]) -> Serving:
    """The dashboard over the odd jobs."""
    return serve(odd_store)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if not CHROMIUM.exists():
        pytest.fail("no Chromium: apt-get install -y --no-install-recommends chromium-headless-shell fonts-dejavu-core")
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        yield started
        started.close()


@pytest.fixture(scope="session")
def tabs(browser: Browser) -> Tabs:
    return Tabs(browser)


@pytest.fixture
def browser_noise(tabs: Tabs) -> list[str]:
    """What the console said, and requests to other hosts; a test that provokes some clears it."""
    tabs.noise.clear()
    return tabs.noise


@pytest.fixture
def visit(tabs: Tabs, serving: Serving, browser_noise: list[str]) -> Iterator[Callable[..., Page]]:
    """Opens a page of the dashboard in a tab that no other visit of the test uses, and waits until it is there.

    `within`: in the tab of that page instead. `anew`: load the whole document, in a fresh profile. At the end of the
    test the console must have stayed silent and nothing may have been asked of another host.
    """

    def open_page(
        path: str,
        *,
        theme: str = "light",
        width: int = 1280,
        base: str = serving.url,
        within: Page | None = None,
        anew: bool = False,
    ) -> Page:
        return tabs.visit(path, theme=theme, width=width, base=base, within=within, anew=anew)

    yield open_page
    tabs.release()
    assert browser_noise == []
