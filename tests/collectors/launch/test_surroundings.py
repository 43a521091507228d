"""In unusual surroundings, a job under `tracekit collect` ends as it does alone: the same exit code and weights."""

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.collectors.conftest import TIMEOUT_S, environment, plain, python, several, torchrun, weights

pytestmark = pytest.mark.nightly
HERE = Path(__file__).parent
RECORDED = "tracekit: recorded 5 steps, "
FULL = "stopped recording, training continues (OSError: [Errno 28]"
#: Where packages are, for a Python that does not look for them.
PACKAGES = ":".join(path for path in sys.path if path.endswith("site-packages"))
_INTERPRETER, *_TRAINS = python("trains.py")


@dataclass
class Job:
    """A job, and what `collect` says about it. `trained`: how many trainings print their weights."""

    command: list[str]
    said: str = RECORDED
    variables: dict[str, str] = field(default_factory=dict)
    trained: int = 1


def limited(limits: str) -> list[str]:
    """The training with limits of the shell's."""
    return ["sh", "-c", f'{limits}; exec "$@"', "sh", _INTERPRETER, *_TRAINS]


JOBS = {
    "-O": Job([_INTERPRETER, "-O", *_TRAINS]),
    "-OO": Job([_INTERPRETER, "-OO", *_TRAINS]),
    "-P": Job([_INTERPRETER, "-P", *_TRAINS]),
    "-E": Job([_INTERPRETER, "-E", *_TRAINS], "nothing was recorded: no process of the command trained with torch, or"),
    "-I": Job([_INTERPRETER, "-I", *_TRAINS], "nothing was recorded: no process of the command trained with torch, or"),
    "-S": Job([_INTERPRETER, "-S", *_TRAINS], variables={"PYTHONPATH": PACKAGES}),
    "few descriptors": Job(limited("ulimit -n 48")),
    "little address space": Job(limited("ulimit -v 6000000")),
    "small stacks": Job(limited("ulimit -s 1024")),
    "a wall clock that goes back": Job(python("trains.py"), variables={"WALL_CLOCK": "backwards"}),
    "a disk that fills up": Job(python("trains.py"), FULL, {"ROOM": "2000"}),
    "a full disk": Job(python("trains.py"), FULL, {"ROOM": "700"}),
    "torchrun in torchrun": Job(torchrun(1, "nests.py"), trained=2),
}


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory) -> Path:
    library = tmp_path_factory.mktemp("surroundings") / "surroundings.so"
    flags = ["-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["cc", *flags, "-o", library, HERE.parent / "surroundings.c", "-ldl"], check=True)
    return library


@pytest.mark.parametrize("name", JOBS)
def test_it_ends_as_it_does_alone(name, preloaded, tmp_path):
    job, variables = JOBS[name], dict(JOBS[name].variables)
    if variables.keys() & {"WALL_CLOCK", "ROOM"}:
        variables |= {"LD_PRELOAD": str(preloaded), "DISK": str(tmp_path / "run")}
    alone = plain(job.command, tmp_path, **variables)
    under = [sys.executable, "-m", "tracekit", "collect", "--out", "job.parquet", "--no-store"]
    ran = plain([*under, "--segments", "run", "--", *job.command], tmp_path, **variables)
    assert (alone.returncode, alone.stdout.count("weights")) == (0, job.trained), alone.stderr
    assert (ran.returncode, ran.stdout) == (0, alone.stdout), ran.stderr
    assert job.said in ran.stderr


def test_a_job_whose_launcher_is_killed_ends_as_it_does_alone(tmp_path):
    """In the middle of the training; nobody waits for the job any more, so that its shell says how it ended."""
    shell = 'KILLS=${KILLS:-$PPID} "$@"; echo ended with $?'
    command = ["sh", "-c", shell, "sh", *python("outlives.py")]
    said = {}
    with subprocess.Popen(["sleep", "inf"]) as other:
        said["alone"] = plain(command, tmp_path, KILLS=str(other.pid)).stdout
    under = [sys.executable, "-m", "tracekit", "collect", "--no-store", "--segments", "run", "--", *command]
    ran = subprocess.run(under, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ran.returncode == -9
    assert ran.stdout == said["alone"]
    assert weights(ran.stdout)
    assert ran.stdout.endswith("ended with 0\n")


def test_a_thousand_steps_of_a_millisecond(tmp_path):
    """All of them are recorded."""
    run = {"short": "STEPS=1000 trains.py"}
    folders = [tmp_path / "alone", tmp_path / "under"]
    for folder in folders:
        folder.mkdir()
    alone, ran = (several(folder, run, under_collect=folder is folders[1])["short"] for folder in folders)
    assert (ran.exit_codes, ran.said, ran.complained) == ([0], alone.said, "")
    assert weights(ran.said)
    assert (ran.attempt["steps"], ran.attempt["ranks"][0]["dropped"]) == (999, 0)
