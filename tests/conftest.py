"""What all tests share: the hand-made slow job as a file, which tests run where, and which only on request."""

from __future__ import annotations

import atexit
import gc
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings

from tests.handmade import slow_trace
from tests.properties import examples

ROOT = Path(__file__).parent
# A property without settings of its own, too, has no deadline: on a busy machine an example may take long.
settings.register_profile("tests", examples(100))
settings.load_profile("tests")
#: Folders that run where another does, with its browser and its dashboards.
TOGETHER = {"tests/dashboards/ui": "tests/dashboards/pages", "tests/dashboards/web": "tests/dashboards"}
#: Folders whose files run in one process, so that one only imports torch.
WITH_TORCH = {"tests/collectors/record"}
#: The units that take longest: what waits for jobs and browsers begins first, and what only computes fills the rest.
LONGEST = (
    "tests/collectors/launch/test_fault_injection.py",  # makes the trainings of every push, for which others would wait
    "tests/dashboards/pages",
    "tests/dashboards",
    "tests/live/test_alerts.py",
    *(f"tests/collectors/launch/test_{name}.py" for name in ("nodes", "hang", "doctor")),
    *(f"tests/collectors/launch/test_{name}.py" for name in ("around_a_command", "other_python")),
    *(f"tests/test_{name}.py" for name in ("killed_import", "suggestions", "site", "packaging")),
    "tests/live/test_run.py",
    "tests/fleet/test_run.py",
    *(f"tests/collectors/{name}.py" for name in ("test_job_shapes", "test_framework_rows", "launch/test_faults")),
    *(f"tests/collectors/launch/test_{name}.py" for name in ("terminal", "standalone", "long_runs", "gone")),
    *(f"tests/test_{name}.py" for name in ("store_windows", "first_minutes", "docs", "approved")),
    *(f"tests/collectors/launch/test_{name}.py" for name in ("attach", "profiler")),
    "tests/analysis/plans/test_live_ddp.py",
    "tests/collectors/nccl/test_launching.py",
    "tests/collectors/nccl",
    "tests/fleet/test_sources.py",
    *(f"tests/test_{name}.py" for name in ("absurd_sizes", "bad_input", "cli", "in_the_way")),
    "tests/fuzz/test_requests.py",
)
#: Fixtures that take longer are listed by `make durations`.
SLOW_FIXTURE_S = 0.2
STARTED_CPU = pytest.StashKey[float]()
#: Imported where a test needs them only.
HEAVY = {"mcp", "pandas", "scipy.stats", "torch"}
#: Folders whose tests only compute: behind all others.
COMPUTED = ("tests/analysis/", "tests/benchmarks/", "tests/fuzz/", "tests/judges/", "tests/synth/")


@pytest.fixture
def said_at_once(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], threading.Event]:
    """The lines of `saying_if_slow`, which come at once, and what is set once the first is out."""
    from tracekit.base import stderr

    lines: list[str] = []
    first = threading.Event()

    def hear(line: str) -> None:
        lines.append(line)
        first.set()

    monkeypatch.setattr(stderr, "_SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(stderr, "say_once", cache(hear))
    return lines, first


@pytest.fixture(autouse=True)
def _analysed_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests share jobs, unless they patch the code."""
    if "monkeypatch" in request.fixturenames:
        yield
        return
    from tests.analysed_once import load_once

    with mock.patch("tracekit.sources.load.load_trace", load_once):
        yield


@pytest.fixture
def clock() -> Iterator[list[float]]:
    """The clock of a watch, in its only item."""
    now = [1000.0]
    with mock.patch("tracekit.live.run.time.monotonic", side_effect=lambda: now[0]):
        yield now


@pytest.fixture
def slow_file(tmp_path: Path) -> Path:
    """The slow job of two steps as slow.parquet in an otherwise empty folder."""
    path = tmp_path / "slow.parquet"
    slow_trace().write_parquet(path)
    return path


@pytest.fixture
def site_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder on sys.path; what tracekit knows of plug-ins is forgotten before and after."""
    from tracekit.base import plug_ins
    from tracekit.sources import load

    def forget() -> None:
        plug_ins.plug_ins.cache_clear()
        plug_ins._problems_said.clear()
        load.plugged_in.cache_clear()
        for name in [name for name, module in sys.modules.items() if _within(module, folder)]:
            del sys.modules[name]

    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    forget()
    yield folder
    forget()


def _within(module: ModuleType, folder: Path) -> bool:
    return str(getattr(module, "__file__", None)).startswith(f"{folder}{os.sep}")


@cache
def asked(file: Path) -> frozenset[str]:
    """The names of the parameters of functions in a file: pytest finds fixtures by them."""
    lists = re.findall(r"^ *def \w+\(([^)]*)\)", file.read_text(), re.MULTILINE)
    return frozenset(word for parameters in lists for word in re.findall(r"\w+", parameters))


@cache
def provided(conftest: Path) -> frozenset[str]:
    """The fixtures of a conftest.py that are set up once for a whole run."""
    found = re.findall(r'^@pytest\.fixture\(scope="session"\)\ndef (\w+)', conftest.read_text(), re.MULTILINE)
    return frozenset(found)


@cache
def unit(file: str) -> str:
    """What one process of pytest-xdist runs: a file, or the files of a folder that share what a conftest.py sets up.

    `file`: relative to the repository.
    """
    path = ROOT.parent / file
    for folder in path.parents:
        if folder == ROOT:
            break
        conftest = folder / "conftest.py"
        if conftest.exists() and asked(path) & provided(conftest):
            its_folder = str(path.parent.relative_to(ROOT.parent))
            return TOGETHER.get(its_folder, its_folder)
    return folder if (folder := str(Path(file).parent)) in WITH_TORCH else file


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(request: pytest.FixtureRequest) -> Iterator[object]:
    """Note what a slow fixture cost in the properties of the test that was first to need it."""
    wall, cpu = time.perf_counter(), _cpu_s()
    try:
        return (yield)
    finally:
        if (wall := time.perf_counter() - wall) > SLOW_FIXTURE_S:
            item = request._pyfuncitem
            item.user_properties.append((f"fixture {request.fixturename}", f"{wall:.3f} {_cpu_s() - cpu:.3f}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[object]:
    item.stash[STARTED_CPU] = _cpu_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[object]:
    """Note the CPU seconds of a test and of the processes it waited for: on a busy machine wall time says little."""
    try:
        return (yield)
    finally:
        item.user_properties.append(("cpu_s", f"{_cpu_s() - item.stash[STARTED_CPU]:.3f}"))
        item.user_properties.append(
            ("target", "test-all" if any(map(item.get_closest_marker, ("slow", "fleet"))) else "test")
        )


def _cpu_s() -> float:
    return sum(os.times()[:4])


def turn(item: pytest.Item) -> int:
    """When a test begins: what takes longest first, so that all processes end together."""
    its_unit = unit(item.nodeid.split("::")[0])
    return LONGEST.index(its_unit) if its_unit in LONGEST else len(LONGEST) + its_unit.startswith(COMPUTED)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[object]:
    """While tests are collected nothing becomes garbage, and looking for it takes a fifth of the time."""
    gc.disable()
    try:
        compile_share(getattr(session.config, "workerinput", None))
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def compile_share(worker: dict[str, Any] | None) -> None:
    """Import this process's share of the test files, so that the others find them compiled.

    All processes collect all files in the same order: in a new checkout each would compile all of them.
    """
    if worker is None:
        return
    for file in sorted(ROOT.rglob("test_*.py"))[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]:
        with suppress(Exception):  # collecting it tells
            import_module(".".join(file.relative_to(ROOT.parent).with_suffix("").parts))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[object]:
    """A file that imports one of HEAVY is an error: every process collects all files, and they take half that time."""
    before = HEAVY & sys.modules.keys()
    report: Any = yield
    if imported := (HEAVY & sys.modules.keys()) - before:
        names = ", ".join(sorted(imported))
        report.outcome, report.longrepr = "failed", f"imports {names} when it is collected: import it in the test"
    return report


# What was frozen is let go last, so that extensions find nothing left: pytest has looked for garbage before.
atexit.register(gc.unfreeze)
# A shell that runs `make test &` ignores Ctrl-C for it, and whatever a test starts would do so, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs the published traces, unless TRACEKIT_PUBLISHED says where they are; put them in order.

    Tests that use the browser are slow, unless they are marked.
    """
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("every_push"):
            item.add_marker(pytest.mark.slow)
    if "TRACEKIT_PUBLISHED" not in os.environ:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("published")])
        items[:] = [item for item in items if not item.get_closest_marker("published")]
    items.sort(key=turn)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`pytest -n 4` hands out units in order; pytest-xdist 3.8 loses its own groups under pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit(nodeid.split("::", maxsplit=1)[0])

    config.option.loadscopereorder = False
    return Units(config, log) if config.getoption("dist") == "load" else None
