"""From a rank that becomes slow to the message that a person gets: a real job, the real Prometheus and Alertmanager.

Windows of 10 s, a scrape and a rule evaluation a second, else what docs/live.md says. The rank becomes slow at moments
spread over a window: what is slow in the last tenth of a window alone shows in the next one.
"""

import statistics
import tempfile
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

from benchmarks.measure import table
from tests.handmade import run
from tests.live.alert_tools import alertmanager, prometheus
from tests.live.test_alerts import block, incident_of_rank_1, of_rank_1, running, wait_for
from tests.live.test_notify import receiving

WINDOW_S = 10
#: Into which part of a window the rank becomes slow.
PHASES = (0.1, 0.3, 0.5, 0.7, 0.9)
STAGES = ("in the store", "--notify's webhook called", "Alertmanager's webhook called")


def section() -> str:
    if find_spec("torch") is None:
        return "## From a slow rank to a person\n\nNot measured: torch is not installed (extra `torch`)."
    with tempfile.TemporaryDirectory() as folder:
        took = _measured(Path(folder))
    rows = [
        [stage, *(f"{times[at]:.1f}" for times in took), f"{statistics.median(times[at] for times in took):.1f}"]
        for at, stage in enumerate(STAGES)
    ]
    header = ["seconds from the slowdown until", *(f"{phase:.0%} into a window" for phase in PHASES), "median"]
    return (
        f"## From a slow rank to a person\n\nA torchrun job of two ranks on gloo, windows of {WINDOW_S} s, scrape and"
        f" rule interval 1 s; rank 1 takes twice as long from a moment within a window on.\n\n{table(header, rows)}"
    )


def _measured(folder: Path) -> list[tuple[float, float, float]]:
    """Seconds until each of the stages, for each phase."""
    assert run("alerts", folder / "rules").code == 0
    with ExitStack() as stack:
        pager, chat = stack.enter_context(receiving()), stack.enter_context(receiving())
        routes = {"http://127.0.0.1:8099/alerts": pager.url, "group_interval: 1m": "group_interval: 1s"}
        manager = stack.enter_context(alertmanager(block("Alertmanager", **routes), folder))
        live = ("--window-seconds", str(WINDOW_S), "--metrics-port", "0", "--notify", chat.url)
        job = stack.enter_context(running(folder, *live))
        metrics = job.line(r"metrics: http://(\S+)/metrics")[1]
        settings = {
            "/etc/prometheus/tracekit": str(folder / "rules"),
            "127.0.0.1:9464": metrics,
            "127.0.0.1:9093": manager,
            "15s": "1s",
        }
        stack.enter_context(prometheus(block("Prometheus", **settings), folder))
        took = []
        for phase in PHASES:
            for heard in (job, pager, chat):
                heard.forget()
            job.line(r"train, window \d+, ")  # a window has just ended, and the next one begun
            time.sleep(phase * WINDOW_S)
            began = time.monotonic()
            job.slow.touch()
            job.line(r"INCIDENT \d+ of train opened: rank 1 ")
            stored = time.monotonic()
            wait_for(chat, incident_of_rank_1("opened"))
            notified = time.monotonic()
            wait_for(pager, of_rank_1("firing"))
            took.append((stored - began, notified - began, time.monotonic() - began))
            print(phase, [f"{seconds:.1f}" for seconds in took[-1]], flush=True)
            job.slow.unlink()
            wait_for(chat, incident_of_rank_1("closed"))
            wait_for(pager, of_rank_1("resolved"))
        assert job.end() == 0
    return took
