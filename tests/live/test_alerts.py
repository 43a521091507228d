"""From a slow rank of a real job to the message that a person gets, through the real Prometheus and Alertmanager.

What is set up is what docs/live.md says.
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from tests.collectors.conftest import environment, forks
from tests.handmade import POLL_S, command, run
from tests.live.alert_tools import PATIENCE_S, alertmanager, prometheus, promtool
from tests.live.test_notify import Receiver, receiving
from tracekit.live.metrics import StoreMetrics, remembered
from tracekit.store import Store

DOCUMENT = (Path(__file__).parents[2] / "docs" / "live.md").read_text()
RULES_TESTS = sorted(Path(__file__).parent.glob("tracekit.*.test.yml"))


def block(section: str, **replaced: str) -> str:
    """The first block of a section of docs/live.md, with other words put in for words of it."""
    (text,) = re.findall(rf"^## {section}\n.*?```\w+\n(.*?)```", DOCUMENT, re.DOTALL | re.MULTILINE)
    for word, other in replaced.items():
        assert word in text
        text = text.replace(word, other)
    return str(text)


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    """What `tracekit metrics alerts` writes."""
    assert run("metrics", "alerts", tmp_path / "tracekit").code == 0
    return tmp_path / "tracekit"


@pytest.mark.slow
def test_rules_and_the_configuration_of_the_document_are_what_prometheus_reads(tmp_path: Path, rules: Path) -> None:
    (tmp_path / "prometheus.yml").write_text(block("Prometheus", **{"/etc/prometheus/tracekit": str(rules)}))
    checked = promtool("check", "config", tmp_path / "prometheus.yml")
    assert (checked.returncode, "15 rules found" in checked.stdout) == (0, True), checked.stdout + checked.stderr


@pytest.mark.slow
@pytest.mark.parametrize("tests", RULES_TESTS, ids=lambda path: path.name)
def test_rules_fire_when_they_should_with_what_a_person_needs(rules: Path, tests: Path) -> None:
    (rules / tests.name).write_text(tests.read_text())
    tested = promtool("test", "rules", rules / tests.name)
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
        r"^(tracekit_\w+)(?:\{(.*)\})? ", generate_latest(StoreMetrics(remembered(store))).decode(), re.MULTILINE
    )
    labels: dict[str, set[str]] = {}
    for name, listed in samples:
        labels.setdefault(name, set()).update(re.findall(r'(\w+)="', listed))
    board = json.loads((rules / "tracekit.grafana.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    recorded = r"\w+:\w+:kept"
    rules_text = re.sub(recorded, "", (rules / "tracekit.rules.yml").read_text())
    asked += re.findall(r"expr: (.*?)(?=\n *(?:labels:|for:|- record|- alert|#|\n))", rules_text, re.DOTALL)
    asked = [expression for expression in asked if "tracekit_" in expression]
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


def answer(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as response:
        return json.load(response)


def until(holds: Callable[[], bool]) -> bool:
    """Whether something comes to hold."""
    deadline = time.monotonic() + PATIENCE_S
    while not (held := holds()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return held


class Metrics(HTTPServer):
    """What a watch would serve: one job; `incident`: its incident, windows that show it; None: it is over."""

    def __init__(self, port: int = 0, *, watched: int = 1, incident: int | None = None) -> None:
        self.watched, self.incident = watched, incident
        super().__init__(("127.0.0.1", port), _Answer)

    def text(self) -> str:
        lines = [
            f'tracekit_job_watched{{training_job="job"}} {self.watched}',
            f'tracekit_job_last_window_timestamp_seconds{{training_job="job"}} {time.time()}',
            'tracekit_job_window_seconds{training_job="job"} 10',
        ]
        if self.incident is not None:
            lines += [
                'tracekit_incident_lost_ratio{training_job="job",incident="7",cause="bad-worker",part="compute"} 0.24',
                f'tracekit_incident_windows{{training_job="job",incident="7",cause="bad-worker"}} {self.incident}',
                'tracekit_incident_info{training_job="job",incident="7",what="rank 3 is slow"} 1',
            ]
        return "".join(f"{line}\n" for line in lines)


class _Answer(BaseHTTPRequestHandler):
    server: Metrics

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.server.text().encode())

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def served(metrics: Metrics) -> Iterator[Metrics]:
    thread = threading.Thread(target=metrics.serve_forever, args=(POLL_S,))
    thread.start()
    try:
        yield metrics
    finally:
        metrics.shutdown()
        thread.join()
        metrics.server_close()


@pytest.mark.slow
def test_one_incident_is_one_message_and_its_end_another_though_the_watch_dies_between(
    tmp_path: Path, rules: Path
) -> None:
    written = rules / "tracekit.rules.yml"
    assert "time() - 120" in written.read_text()
    written.write_text(written.read_text().replace("time() - 120", "time() - 3"))
    with ExitStack() as stack:
        pager = stack.enter_context(receiving())
        receiver = {"http://127.0.0.1:8099/alerts": pager.url, "group_interval: 1m": "group_interval: 1s"}
        manager = stack.enter_context(alertmanager(block("Alertmanager", **receiver), tmp_path))
        watch = stack.enter_context(ExitStack())
        metrics = watch.enter_context(served(Metrics(incident=1)))
        port = metrics.server_port
        settings = {
            "/etc/prometheus/tracekit": str(rules),
            "127.0.0.1:9464": f"127.0.0.1:{port}",
            "127.0.0.1:9093": manager,
            "15s": "1s",
        }
        stack.enter_context(prometheus(block("Prometheus", **settings), tmp_path))
        messages: list[tuple[str, str]] = []

        def heard(name: str, status: str) -> bool:
            while (name, status) not in messages:
                alerts = wait_for(pager, lambda message: message)["alerts"]
                messages.extend((alert["labels"]["alertname"], alert["status"]) for alert in alerts)
            return True

        assert heard("TracekitIncident", "firing")
        metrics.incident = 3
        grave = f'http://{manager}/api/v2/alerts?filter=alertname="TracekitStraggling"'
        assert until(lambda: [bool(one["status"]["inhibitedBy"]) for one in answer(grave)] == [True])
        watch.close()
        assert heard("TracekitStoppedReporting", "firing")
        stack.enter_context(served(Metrics(port, watched=0)))
        assert heard("TracekitIncident", "resolved")
        assert heard("TracekitStoppedReporting", "resolved")
    with_the_end = ("TracekitStraggling", "resolved")  # in the message that the incident is over
    assert sorted(message for message in messages if message != with_the_end) == [
        ("TracekitIncident", "firing"),
        ("TracekitIncident", "resolved"),
        ("TracekitStoppedReporting", "firing"),
        ("TracekitStoppedReporting", "resolved"),
    ]


# ---- a real job


class Job:
    """`tracekit collect --live` around a real job, or another command that goes on until its input ends; `line` waits
    for a line on its stderr.
    """

    def __init__(self, folder: Path, *options: str, around: list[str] | None = None) -> None:
        self.slow, self._stop = folder / "slow", folder / "stop"
        self.store = Store(folder / "jobs.store")
        under = ("collect", "--live", "--name", "train", "--store", self.store.path, *options, "--")
        self.process = subprocess.Popen(
            command(*under, *(around or forks(2, "slow_on_demand.py"))),
            cwd=folder,
            env=environment(SLOW=self.slow, STOP=self._stop),
            stdin=subprocess.PIPE,
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
        assert self.process.stdin is not None
        self.process.stdin.close()
        code = self.process.wait(PATIENCE_S)
        self._reader.join()
        return code


@contextmanager
def running(folder: Path, *options: str, around: list[str] | None = None) -> Iterator[Job]:
    job = Job(folder, *options, around=around)
    try:
        yield job
    finally:
        if job.process.poll() is None:
            job.end()
        assert job.process.stdin is not None
        job.process.stdin.close()


def wait_for(receiver: Receiver, found: Callable[[dict[str, Any]], Any]) -> Any:
    """What `found` finds in the next message in which it finds anything."""
    while True:
        receiver.wait_for(1)
        if result := found(receiver.got.pop(0)):
            return result


def of_rank_1(status: str) -> Callable[[dict[str, Any]], Any]:
    """The alert of Alertmanager that says that rank 1 is slow.

    `TracekitStraggling` is the same incident: `TracekitIncident` inhibits it.
    """

    def find(message: dict[str, Any]) -> Any:
        return next(
            (
                alert
                for alert in message["alerts"]
                if alert["status"] == status
                and alert["labels"]["alertname"] == "TracekitIncident"
                and alert["annotations"]["cause"] == "bad-worker"
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


@pytest.mark.slow
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
        asking = stack.enter_context(prometheus(block("Prometheus", **settings), tmp_path))
        job.line(r"train, window 0, ")
        job.slow.touch()
        told, alert = wait_for(chat, incident_of_rank_1("opened")), wait_for(pager, of_rank_1("firing"))
        job.slow.unlink()
        ended, resolved = wait_for(chat, incident_of_rank_1("closed")), wait_for(pager, of_rank_1("resolved"))
        assert job.end() == 0
        # Prometheus has been told that the job has ended: it cannot take that for the death of the watch.
        ask = f"http://{asking}/api/v1/query?query=last_over_time(tracekit_job_watched[1h])"
        assert until(lambda: [one["value"][1] for one in answer(ask)["data"]["result"]] == ["0"])
    said = alert["annotations"]
    assert re.fullmatch(
        r"train: rank 1 on \S+: computes \d+% slower than its peers \(costs .* a step.*\)", said["summary"]
    )
    assert re.match(r"Check the cores of rank 1 on \S+ for other processes .*; saves ", said["fix"])
    assert said["check"].startswith("its cores: clocks (turbostat)")
    assert re.fullmatch(r"https://dash/job\?job=train&window=\d+", said["page"])
    assert alert["labels"]["incident"] == resolved["labels"]["incident"] == str(told["incident"])
    assert ended["incident"] == told["incident"]
    (incident,) = [one for one in job.store.incidents("train") if one.incident_id == told["incident"]]
    assert incident.closed_window is not None
    assert job.store.incidents(only_open=True) == ()
    steps = [(window.first_step, window.last_step) for window in job.store.windows("train")]
    assert [first for first, _ in steps] == [1, *(last + 1 for _, last in steps[:-1])]


@pytest.mark.slow
def test_collect_says_that_its_watch_was_killed_and_starts_it_again_once(tmp_path: Path) -> None:
    """What the next watch makes of the run is in `test_run.py`."""
    with running(tmp_path, "--metrics-port", "0", around=["cat"]) as job:
        job.line(r"metrics: http")
        os.kill(watch_of(job), signal.SIGKILL)
        job.line(r"the watch of this run was killed by signal 9; restarting it after the last stored window")
        job.line(r"metrics: http")
        os.kill(watch_of(job), signal.SIGKILL)
        job.line(r"the run continues without windows and alerts until you run tracekit watch --store=")
        assert job.end() == 0


def watch_of(job: Job) -> int:
    """The process of the watch that `collect` has started."""
    for child in Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split():
        if b"\0watch\0" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    raise AssertionError("collect has no watch")
