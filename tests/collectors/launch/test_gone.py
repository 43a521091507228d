"""The launcher or the folder of a run goes while the job trains: the training does not notice, and the rest is said."""

import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.collectors.conftest import POLL_S, TIMEOUT_S, environment, forks
from tests.handmade import read_any
from tracekit.collectors.run_directory.follow import read_attempt
from tracekit.collectors.run_directory.steering import pace

pytestmark = pytest.mark.slow


class Training:
    """Two ranks under `tracekit collect` in `folder` / "run", from `begin` on some steps along; `stop` ends them."""

    def __init__(self, folder: Path) -> None:
        self.run, self._stop = folder / "run", folder / "stop"
        under = [sys.executable, "-m", "tracekit", "collect", "--no-store", "--out", "job.parquet", "--segments", "run"]
        self.launcher = subprocess.Popen(
            [*under, "--", *forks(2, "slow_on_demand.py")],
            cwd=folder,
            env=environment(SLOW=folder / "slow", STOP=self._stop, DEVICE_MS=1),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def begin(self) -> None:
        """Return once some steps have ended."""
        assert self.launcher.stdout is not None
        assert self.launcher.stdout.readline() == "training\n"
        self.await_step(5)

    def await_step(self, step: int) -> None:
        """Return once a rank has ended that step."""
        while (now := pace(self.run)) is None or now.step < step:
            select.select([self.launcher.stdout], [], [], POLL_S)

    def stop(self) -> str:
        """What was said on stderr, once every process of the job has ended."""
        self._stop.touch()
        return self.launcher.communicate(timeout=TIMEOUT_S)[1]


@pytest.fixture
def training(tmp_path):
    """The job, stopped at the end."""
    made = Training(tmp_path)
    try:
        made.begin()
        yield made
    finally:
        made.stop()


def test_a_killed_launcher_leaves_a_job_that_trains_on(training):
    """Its ranks end in the ordinary way and close their recorders; what they wrote is read without a manifest."""
    training.launcher.kill()
    training.launcher.wait(TIMEOUT_S)
    ended = pace(training.run).step
    training.await_step(ended + 5)
    training.stop()
    recording = read_attempt(training.run, 0)
    assert [one.summary["off"] for one in recording.ranks.values()] == [None, None]
    trace = read_any(training.run)
    assert trace.layout.dp == 2
    assert trace.steps[-1] >= ended + 4


def test_a_folder_that_is_removed_costs_the_recording_only(training):
    """The exit code is the command's; ranks say that they have stopped, and the launcher that there is no trace."""
    removed = training.run.rename(training.run.with_name("removed"))
    shutil.rmtree(removed)
    said = training.stop()
    assert training.launcher.returncode == 0, said
    assert said.count("stopped recording, training continues (FileNotFoundError") == 2
    assert "tracekit: no trace: " in said
    assert "Traceback" not in said
