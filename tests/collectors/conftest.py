"""Runs training scripts under `tracekit collect`, as a user does: real processes, gloo, torchrun."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.collectors.shared_runs import BATCHES, BATCHES_ALONE, EVERY_PUSH, RUNS
from tests.made_once import made_once
from tracekit.analysis.graph.lanes import place_lanes
from tracekit.trace.canonical import Trace, read_parquet
from tracekit.trace.model import KINDS, P2P

#: Seconds since the start of a step, as float64, against the nanoseconds that were recorded.
CLOCK_TICK_S = 1e-9
SCRIPTS = Path(__file__).parent / "scripts"
#: Never in a training process on tracekit's account.
HEAVY = {"polars", "pandas", "duckdb", "pyarrow", "click", "networkx", "dash"}
#: Runs that hang are a failure, not a wait; dozens of them take minutes on a busy machine.
TIMEOUT_S = 900
#: How often a test looks for what a running job writes: looking all the time takes a core from the job.
POLL_S = 0.02


@dataclass
class Collected:
    """A finished `tracekit collect`."""

    process: subprocess.CompletedProcess
    out: Path
    summary: dict

    @property
    def trace(self) -> Trace:
        return read_parquet(self.out)

    @property
    def weights(self) -> set[str]:
        return weights(self.process.stdout)

    @property
    def attempt(self) -> dict:
        return self.summary["attempts"][-1]


@dataclass
class Run:
    """One run of `several.py`: exit codes and output of its ranks, and what `collect` made of it, if it was there.

    `closing`: the lines of `collect` about this run at its end. `segments`: where those of all runs are.
    """

    exit_codes: list[int]
    said: str
    complained: str
    closing: list[str]
    segments: Path
    attempt: dict | None = None

    @property
    def trace(self) -> Trace:
        return read_parquet(self.attempt["out"])

    @property
    def weights(self) -> set[str]:
        return weights(self.said)


def environment(**variables) -> dict[str, str]:
    """The test's environment with one thread per rank, and the given variables."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path, **{k: str(v) for k, v in variables.items()}}


def torchrun(ranks: int, script: str, *options: str) -> list[str]:
    """The command that starts a script on `ranks` ranks."""
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    return [*run, *options, str(SCRIPTS / script)]


def forks(ranks: int, script: str, *arguments: str) -> list[str]:
    """The command that runs a script on `ranks` ranks, where what starts them is not the point: half as dear."""
    return python("ranks.py", str(ranks), str(SCRIPTS / script), *arguments)


def python(script: str, *arguments: str) -> list[str]:
    """The command that runs a script in one process."""
    return [sys.executable, str(SCRIPTS / script), *arguments]


def brings(attempt: Path, ranks: str = "rank-") -> list[str]:
    """The command that brings what ranks once recorded, where it is not the point how."""
    where = "$TRACEKIT_COLLECT_DIR/attempt-000"
    return ["sh", "-c", f'mkdir "{where}" && cp "$@" "{where}"', "sh", *map(str, attempt.glob(f"{ranks}*"))]


def collect(directory: Path, command: list[str], *options: str, **variables) -> Collected:
    """Run `tracekit collect` in `directory`."""
    out = directory / "job.parquet"
    under = [sys.executable, "-m", "tracekit", "collect", "--out", str(out), "--no-store", "--json", *options, "--"]
    process = plain([*under, *command], directory, **variables)
    lines = [line for line in process.stdout.splitlines() if line.startswith('{"exit_code"')]
    assert lines, process.stderr
    return Collected(process, out, json.loads(lines[-1]))


def plain(command: list[str], directory: Path, **variables) -> subprocess.CompletedProcess:
    """Run the command by itself."""
    return subprocess.run(
        command, cwd=directory, env=environment(**variables), capture_output=True, text=True, timeout=TIMEOUT_S
    )


def several(
    directory: Path, runs: dict[str, str], *options: str, under_collect: bool = True, **variables
) -> dict[str, Run]:
    """Run scripts one after the other in forks of one process (`several.py`), each an attempt under `collect` or not.

    `runs`: a name for each -> `NAME=value ... script.py argument ...`, with RANKS=2 for a run of two ranks.
    """
    command = python("several.py", *runs.values())
    if under_collect:
        kept = ["--segments", str(directory / "segments")]
        collected = collect(directory, command, *kept, *options, **variables)
        process, attempts = collected.process, {one["attempt"]: one for one in collected.summary["attempts"]}
    else:
        process, attempts = plain(command, directory, **variables), {}
    assert process.returncode == 0, process.stderr
    return {name: _run(directory, at, attempts.get(at), process.stderr) for at, name in enumerate(runs)}


def _run(directory: Path, number: int, attempt: dict | None, closing: str) -> Run:
    codes = {int(path.stem.split("-")[1]): int(path.read_text()) for path in directory.glob(f"{number}-*.exit")}

    def read(suffix: str) -> str:
        return "".join((directory / f"{number}-{rank}.{suffix}").read_text() for rank in sorted(codes))

    title = f"attempt {number}: "
    closed = [line.replace(title, "") for line in closing.splitlines() if title in line]
    exit_codes = [codes[rank] for rank in sorted(codes)]
    return Run(exit_codes, read("out"), read("err"), closed, directory / "segments", attempt)


def weights(said: str) -> set[str]:
    """Checksums of the weights by rank; ranks share one stdout, so that lines run into each other."""
    return set(re.findall(r"rank \d+ weights [0-9a-f]{64}", said.replace("rank", "\nrank")))


def contradictions(trace: Trace) -> list[str]:
    """Where the graph lets an op wait for one of its worker's that ended later, receives and sends aside.

    The ops of a worker are recorded by one thread, in turn: this holds however slow the machine is.
    """
    found = []
    transfers = [kind.code for kind in P2P]
    for group in place_lanes(trace).groups:
        made = group.structure
        own = made.pp_rank[made.before] == made.pp_rank[made.after]
        own &= ~np.isin(made.kind[made.before], transfers) & ~np.isin(made.kind[made.after], transfers)
        before, after = made.before[own], made.after[own]
        late = (group.start + group.duration)[before] - group.start[after] > CLOCK_TICK_S
        found += [
            f"step {group.step[lane]}: {KINDS[made.kind[before[edge]]]} ended behind the start of"
            f" {KINDS[made.kind[after[edge]]]}"
            for edge, lane in zip(*np.nonzero(late), strict=True)
        ]
    return found


class Runs:
    """The runs of shared_runs.py by name; a batch of them is made when one of it is first asked for.

    `slow`: also those that only `make test-all` makes.
    """

    def __init__(self, factory: pytest.TempPathFactory, *, slow: bool, under_collect: bool) -> None:
        self.factory, self.slow, self.under_collect = factory, slow, under_collect

    def __getitem__(self, name: str) -> Run:
        batches = BATCHES if self.under_collect else BATCHES_ALONE
        ((batch, names),) = ((batch, names) for batch, names in batches.items() if name in names)
        assert self.slow or batch == "every-push", f"mark the test slow: {name!r} is none of the runs of every push"

        def make(directory: Path) -> dict[str, Run]:
            play_nvml(directory)
            return several(directory, {name: RUNS[name] for name in names}, under_collect=self.under_collect)

        return made_once(self.factory, f"{batch}-{'collected' if self.under_collect else 'alone'}", make)[name]


def play_nvml(folder: Path) -> None:
    """Put a libnvidia-ml.so.1 that plays a GPU into the folder."""
    source, library = Path(__file__).parent / "fake_nvml.c", folder / "libnvidia-ml.so.1"
    flags = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{library.name}"]
    subprocess.run(["cc", *flags, "-o", str(library), str(source)], check=True)


@pytest.fixture(scope="session")
def nvml(tmp_path_factory) -> Path:
    """A folder with a libnvidia-ml.so.1 that plays a GPU."""
    folder = tmp_path_factory.mktemp("nvml")
    play_nvml(folder)
    return folder


@pytest.fixture
def runs(request, tmp_path_factory) -> Runs:
    """The runs that many tests look at, under collect."""
    slow = request.node.get_closest_marker("slow") is not None
    return Runs(tmp_path_factory, slow=slow, under_collect=True)


@pytest.fixture
def alone(request, tmp_path_factory) -> Runs:
    """Those whose results are compared with what they give without collect."""
    slow = request.node.get_closest_marker("slow") is not None
    return Runs(tmp_path_factory, slow=slow, under_collect=False)


def quick_and_slow(names: Iterable[str]) -> list[pytest.ParameterSet]:
    """Parameters of a test that goes through runs: those of every push, and the others, which are slow."""
    every_push = [name for name in names if name in EVERY_PUSH]
    others = [name for name in names if name not in EVERY_PUSH]
    return [
        *([pytest.param(every_push, id="every-push")] if every_push else []),
        pytest.param(others, id="others", marks=pytest.mark.slow),
    ]
