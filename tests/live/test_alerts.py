"""From a slow rank of a real job to the message that a person gets, through the real Prometheus and Alertmanager.

What is set up is what docs/live.md says.
"""

from __future__ import annotations

import json
import queue
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from tests.collectors.conftest import environment, forks
from tests.handmade import command, run
from tests.live.alert_tools import PATIENCE_S, alertmanager, prometheus, promtool
from tests.live.test_notify import Receiver, receiving
from tracekit.live.exposition import exposition
from tracekit.live.metrics import StoreMetrics, remembered
from tracekit.store import Store

DOCUMENT = (Path(__file__).parents[2] / "docs" / "live.md").read_text()
RULES_TEST = Path(__file__).parent / "tracekit.rules.test.yml"


def block(section: str, **replaced: str) -> str:
    """The first block of a section of docs/live.md, with other words put in for words of it."""
    (text,) = re.findall(rf"^## {section}\n.*?```\w+\n(.*?)```", DOCUMENT, re.DOTALL | re.MULTILINE)
    for word, other in replaced.items():
        assert word in text
        text = text.replace(word, other)
    return str(text)


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    """What `tracekit alerts` writes."""
    assert run("alerts", tmp_path / "tracekit").code == 0
    return tmp_path / "tracekit"


def test_rules_and_the_configuration_of_the_document_are_what_prometheus_reads(tmp_path: Path, rules: Path) -> None:
    (tmp_path / "prometheus.yml").write_text(block("Prometheus", **{"/etc/prometheus/tracekit": str(rules)}))
    checked = promtool("check", "config", tmp_path / "prometheus.yml")
    assert (checked.returncode, "9 rules found" in checked.stdout) == (0, True), checked.stdout + checked.stderr


def test_rules_fire_when_they_should_with_what_a_person_needs(rules: Path) -> None:
    (rules / RULES_TEST.name).write_text(RULES_TEST.read_text())
    tested = promtool("test", "rules", rules / RULES_TEST.name)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_every_alert_is_in_the_runbook() -> None:
    rules = (files("tracekit.live") / "alerts" / "tracekit.rules.yml").read_text()
    alerts = re.findall(r"- alert: (\w+)", rules)
    assert sorted(re.findall(r"^\| `(Tracekit\w+)` \|", DOCUMENT, re.MULTILINE)) == sorted(alerts)


def test_grafana_rules_and_document_speak_of_metrics_that_there_are(rules: Path, tmp_path: Path) -> None:
    from tests.test_store_windows import window

    store = Store(tmp_path / "jobs.store")
    store.append(window(0, analysed=True))
    samples = re.findall(
        r"^(tracekit_\w+)(?:\{(.*)\})? ", exposition(StoreMetrics(remembered(store)).collect()).decode(), re.MULTILINE
    )
    labels: dict[str, set[str]] = {}
    for name, listed in samples:
        labels.setdefault(name, set()).update(re.findall(r'(\w+)="', listed))
    board = json.loads((rules / "tracekit.grafana.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked += re.findall(r"expr: (.*?)(?=\n *(?:labels|for):)", (rules / "tracekit.rules.yml").read_text(), re.DOTALL)
    assert len(asked) > 15
    counters = {name for name in labels if name.endswith("_dropped_records_total")}
    for expression in asked:
        names = re.findall(r"tracekit_\w+", expression)
        assert names
        for name in names:
            assert name in labels or name in counters, expression
            by = re.findall(r"by \(([^)]*)\)", expression)
            assert all(set(each.split(", ")) <= labels[name] | {"incident"} for each in by) or len(names) > 1, (
                expression
            )
    documented = {word for word in re.findall(r"`(tracekit_\w+)", DOCUMENT) if not word.startswith("tracekit_watch")}
    assert documented <= set(labels)


# ---- a real job


class Job:
    """`tracekit collect --live` around a real job; `line` waits for a line on its stderr."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.slow, self._stop = folder / "slow", folder / "stop"
        self.store = Store(folder / "jobs.store")
        under = ("collect", "--live", "--name", "train", "--store", self.store.path, *options, "--")
        self.process = subprocess.Popen(
            command(*under, *forks(2, "slow_on_demand.py")),
            cwd=folder,
            env=environment(SLOW=self.slow, STOP=self._stop),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self._lines.put(line.rstrip("\n"))

    def line(self, pattern: str) -> re.Match[str]:
        """The next line that matches."""
        said = []
        while True:
            try:
                said.append(self._lines.get(timeout=PATIENCE_S))
            except queue.Empty:
                raise AssertionError("\n".join([f"no line like {pattern}", *said])) from None
            if match := re.search(pattern, said[-1]):
                return match

    def forget(self) -> None:
        """Whatever it has said so far is read."""
        with suppress(queue.Empty):
            while True:
                self._lines.get_nowait()

    def end(self) -> int:
        """Let the job end by itself; its exit code."""
        self._stop.touch()
        code = self.process.wait(PATIENCE_S)
        self._reader.join()
        return code


@contextmanager
def running(folder: Path, *options: str) -> Iterator[Job]:
    job = Job(folder, *options)
    try:
        yield job
    finally:
        if job.process.poll() is None:
            job.end()


def wait_for(receiver: Receiver, found: Callable[[dict[str, Any]], Any]) -> Any:
    """What `found` finds in the next message in which it finds anything."""
    while True:
        receiver.wait_for(1)
        if result := found(receiver.got.pop(0)):
            return result


def of_rank_1(status: str) -> Callable[[dict[str, Any]], Any]:
    """The alert of Alertmanager that says that rank 1 is slow.

    On a machine so busy that three windows pass before Prometheus evaluates its rules once, `TracekitStraggling` begins
    together with `TracekitIncident` and inhibits it: either tells the person.
    """

    def find(message: dict[str, Any]) -> Any:
        return next(
            (
                alert
                for alert in message["alerts"]
                if alert["status"] == status
                and alert["labels"]["alertname"] in ("TracekitIncident", "TracekitStraggling")
                and alert["labels"]["part"] == "compute"
                and alert["annotations"]["who"].startswith("rank 1 on ")
            ),
            None,
        )

    return find


def incident_of_rank_1(status: str) -> Callable[[dict[str, Any]], Any]:
    """The same in a message of --notify."""

    def find(message: dict[str, Any]) -> Any:
        rows = message["incidents"]
        return next(
            (row for row in rows if (row["status"], row["ranks"], row["kind"]) == (status, "1", "bad-worker")), None
        )

    return find


def test_a_slow_rank_reaches_a_person_and_so_does_its_recovery(tmp_path: Path, rules: Path) -> None:
    with ExitStack() as stack:
        pager, chat = stack.enter_context(receiving()), stack.enter_context(receiving())
        manager = stack.enter_context(
            alertmanager(
                block(
                    "Alertmanager",
                    **{"http://127.0.0.1:8099/alerts": pager.url, "group_interval: 1m": "group_interval: 1s"},
                ),
                tmp_path,
            )
        )
        live = ("--window-steps", "15", "--metrics-port", "0", "--notify", chat.url, "--dashboard-url", "https://dash")
        job = stack.enter_context(running(tmp_path, *live))
        metrics = job.line(r"metrics: http://(\S+)/metrics")[1]
        settings = {
            "/etc/prometheus/tracekit": str(rules),
            "127.0.0.1:9464": metrics,
            "127.0.0.1:9093": manager,
            "15s": "1s",
        }
        stack.enter_context(prometheus(block("Prometheus", **settings), tmp_path))
        job.line(r"train, window 0, ")
        job.slow.touch()
        told, alert = wait_for(chat, incident_of_rank_1("opened")), wait_for(pager, of_rank_1("firing"))
        job.slow.unlink()
        ended, resolved = wait_for(chat, incident_of_rank_1("closed")), wait_for(pager, of_rank_1("resolved"))
        assert job.end() == 0
    said = alert["annotations"]
    assert re.fullmatch(
        r"train: rank 1 on \S+: computes \d+% slower than its peers \(costs .* a step.*\)", said["summary"]
    )
    assert re.match(r"Make rank 1 on \S+ as fast as its peers: ", said["fix"])
    assert said["check"].startswith("DCGM on its GPUs")
    assert re.fullmatch(r"https://dash/job\?job=train&window=\d+", said["page"])
    assert alert["labels"]["incident"] == resolved["labels"]["incident"] == str(told["incident"])
    assert ended["incident"] == told["incident"]
    (incident,) = [one for one in job.store.incidents("train") if one.incident_id == told["incident"]]
    assert incident.closed_window is not None
    assert job.store.incidents(only_open=True) == ()
    steps = [(window.first_step, window.last_step) for window in job.store.windows("train")]
    assert [first for first, _ in steps] == [1, *(last + 1 for _, last in steps[:-1])]
