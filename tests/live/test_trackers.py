"""Windows and reports in real trackers, read back with their readers; trackers that hang, die or are missing."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

import tracekit
from benchmarks.writtenrun import WrittenRun
from tests.cases import case
from tests.handmade import run, slow_trace
from tests.test_store_windows import window
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.base.errors import SelectionError
from tracekit.dashboards.trackers import PAGE, opened, series, tracker_of
from tracekit.live.receivers import MOST_WAITING, TrackerProcess
from tracekit.store import Store

#: What other packages warn of is not for this test.
pytestmark = pytest.mark.filterwarnings("ignore")
#: Of the slow job by hand: steps of 15.5 s, ideal 13.5 s; rank 1 at the pace of its peers would save 3.5 or 4.25 s.
SLOWDOWN, STEP_S = 15.5 / 13.5, 15.5


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Two windows of steps 0 to 1 and 2 to 3."""
    made = Store(tmp_path / "jobs.store")
    for number in range(2):
        made.append(window(number, analysed=True))
    return made


def test_the_series_of_a_report_are_few_and_as_in_the_report() -> None:
    report = PipelineJob(slow_trace((0, 1))).report
    found = series(report)
    assert len(found) <= 10
    assert found["tracekit/slowdown"] == pytest.approx(SLOWDOWN)
    assert found["tracekit/step_s"] == STEP_S
    assert found["tracekit/slowest_rank"] == 1
    assert found["tracekit/excess_ms"] == pytest.approx(1e3 * report.verdict.lost_s)
    assert found["tracekit/straggler_ms"] == found["tracekit/excess_ms"] > 0
    assert found["tracekit/data_wait_ms"] == found["tracekit/exposed_communication_ms"] == 0
    assert found["tracekit/trustworthy"] == 1


def logged(store: Store, where: str, numbers: tuple[int, ...] = (0, 1)) -> TrackerProcess:
    tracker = TrackerProcess(where, store.path, "live")
    tracker.send([{"number": number} for number in numbers])
    tracker.close(300)
    return tracker


@pytest.mark.slow
def test_a_watched_run_is_in_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    written = WrittenRun(tmp_path / "run", 4)
    written.run(range(1, 26), slow={3: 2.0})
    written.end()
    store, folder = tmp_path / "jobs.store", tmp_path / "runs"
    ran = run("watch", tmp_path / "run", "--store", store, "--window-steps", "10", "--log", f"tensorboard:{folder}")
    assert (ran.code, "--log" in ran.err) == (0, False)
    read = EventAccumulator(str(folder / "run")).Reload()
    (window_,) = Store(store).windows("run")
    (event,) = read.Scalars("tracekit/slowdown")
    assert (event.step, event.value) == (25, pytest.approx(window_.slowdown, rel=1e-6))
    assert read.Scalars("tracekit/slowest_rank")[0].value == 3
    assert len(read.Tags()["scalars"]) <= 10
    assert "rank 3" in (folder / "run" / PAGE).read_text()


@pytest.mark.slow
def test_mlflow_reads_back_what_was_logged(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.chdir(tmp_path)  # where MLflow keeps the artifacts of a database in a file
    address = f"sqlite:///{tmp_path / 'mlflow.db'}"
    tracker = logged(store, f"mlflow:{address}")
    assert (tracker.logged, tracker.dropped, list(tracker.losses())) == (2, 0, [])
    client = MlflowClient(address)
    (found,) = client.search_runs([client.get_experiment_by_name("tracekit").experiment_id])
    assert (found.info.run_name, found.info.status) == ("live", "FINISHED")
    points = client.get_metric_history(found.info.run_id, "tracekit/step_s")
    assert [(point.step, point.value) for point in points] == [(1, STEP_S), (3, STEP_S)]
    assert "rank 1" in Path(client.download_artifacts(found.info.run_id, PAGE)).read_text()


def wandb_records(file: Path) -> Iterator[bytes]:
    """The records of a run's file, which is a log of LevelDB after a header of 7 bytes: blocks of 32 KiB with chunks,
    each after 4 bytes of checksum, 2 of length and 1 of type (1 whole, 2 first, 3 middle, 4 last).
    """
    content, at, record = file.read_bytes(), 7, b""
    while at + 7 < len(content):
        if -at % 32768 < 7:  # no room for a chunk
            at += -at % 32768
        length, kind = struct.unpack_from("<HB", content, at + 4)
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


@pytest.mark.slow
def test_wandb_keeps_what_was_logged_offline(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = logged(store, "wandb:fleet")
    assert (tracker.logged, tracker.dropped, list(tracker.losses())) == (2, 0, [])
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    values = []
    for data in wandb_records(file):
        items = {
            item.key or "/".join(item.nested_key): item.value_json for item in Record.FromString(data).history.item
        }
        if "tracekit/slowdown" in items:
            values.append((float(items["tracekit/step"]), float(items["tracekit/slowdown"])))
    assert values == [(1, pytest.approx(SLOWDOWN)), (3, pytest.approx(SLOWDOWN))]
    (page,) = file.parent.glob("files/media/html/*.html")
    assert "rank 1" in page.read_text()


@pytest.mark.slow
def test_a_job_logs_itself_to_active_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.chdir(tmp_path)
    job = PipelineJob(slow_trace((4, 5)))
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    with mlflow.start_run() as active:
        tracekit.log_to(job, active)
    assert mlflow.get_run(active.info.run_id).data.metrics["tracekit/step_s"] == STEP_S
    scalars: dict[str, tuple[float, int]] = {}

    class SummaryWriter:
        log_dir = str(tmp_path / "tb")

        def add_scalar(self, name: str, value: float, step: int) -> None:
            scalars[name] = value, step

    tracekit.log_to(job, SummaryWriter())
    assert scalars["tracekit/step_s"] == (STEP_S, 5)
    assert (tmp_path / "tb" / PAGE).exists()
    with pytest.raises(SelectionError, match="int is no run of wandb, mlflow or TensorBoard"):
        tracekit.log_to(job, 1)


def stub(folder: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package `wandb` that does this when it is imported."""
    (folder / "wandb.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_a_tracker_that_hangs_loses_its_windows_and_nothing_else(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(tmp_path, "import threading; threading.Event().wait()", monkeypatch)
    tracker = TrackerProcess("wandb", store.path, "live")
    tracker.send([{"number": 0}] * (MOST_WAITING + 20))
    tracker.close(0.0)
    assert (tracker.logged, tracker.dropped) == (0, MOST_WAITING + 20)
    assert list(tracker.losses()) == [f"--log: {MOST_WAITING + 20} windows did not reach wandb"]


@pytest.mark.slow
def test_a_tracker_that_fails_is_said_and_the_watch_ends_as_it_would(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stub(tmp_path, "raise RuntimeError('no network')", monkeypatch)
    tracker = logged(store, "wandb")
    assert list(tracker.losses()) == ["--log: 2 windows did not reach wandb"]
    assert "tracekit: --log: RuntimeError: no network\n" in capfd.readouterr().err


def test_a_tracker_that_is_unknown_or_missing_is_one_line(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {
        (
            "--log",
            "sacred",
            "--name",
            "live",
        ): "--log 'sacred'; expected wandb, mlflow, tensorboard, or one of them with",
        ("--log", "tensorboard"): "--log is for one job: name it with --name",
    }
    for words, message in wrong.items():
        with case(str(words)):
            ran = run("watch", store.path, *words)
            assert (ran.code, message in ran.message) == (2, True)
    monkeypatch.setattr("tracekit.live.receivers.find_spec", lambda _: None)
    assert run("watch", store.path, "--log", "mlflow", "--name", "live").message.endswith(
        "--log mlflow: not installed; pip install mlflow"
    )


def test_what_is_no_run_of_a_tracker_is_refused() -> None:
    with pytest.raises(SelectionError, match="object is no run of wandb, mlflow or TensorBoard"):
        tracker_of(object())


def test_names_of_jobs_are_names_of_folders(tmp_path: Path) -> None:
    opened(f"tensorboard:{tmp_path}", "../evil job").close()
    assert [path.name for path in tmp_path.iterdir()] == ["_evil_job"]
