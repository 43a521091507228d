"""Runs training scripts under `tracekit collect`, as a user does: real processes, gloo, torchrun."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tracekit.analysis.graph.lanes import place_lanes
from tracekit.model import KINDS, P2P
from tracekit.trace import Trace, read_parquet

#: Seconds since the start of a step, as float64, against the nanoseconds that were recorded.
CLOCK_TICK_S = 1e-9
SCRIPTS = Path(__file__).parent / "scripts"
#: A run that hangs is a failure, not a wait.
TIMEOUT_S = 300


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
    """One run of `several.py`: exit codes and output of its ranks, and what `collect` made of it, if it was there."""

    exit_codes: list[int]
    said: str
    complained: str
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


def python(script: str, *arguments: str) -> list[str]:
    """The command that runs a script in one process."""
    return [sys.executable, str(SCRIPTS / script), *arguments]


def collect(directory: Path, command: list[str], *options: str, **variables) -> Collected:
    """Run `tracekit collect` in `directory`."""
    out = directory / "job.parquet"
    under = [sys.executable, "-m", "tracekit.collectors", "--out", str(out), "--no-store", "--json", *options, "--"]
    process = plain([*under, *command], directory, **variables)
    lines = [line for line in process.stdout.splitlines() if line.startswith('{"exit_code"')]
    assert lines, process.stderr
    return Collected(process, out, json.loads(lines[-1]))


def plain(command: list[str], directory: Path, **variables) -> subprocess.CompletedProcess:
    """Run the command by itself."""
    return subprocess.run(
        command, cwd=directory, env=environment(**variables), capture_output=True, text=True, timeout=TIMEOUT_S
    )


def several(directory: Path, ranks: int, runs: dict[str, str], *, under_collect: bool = True) -> dict[str, Run]:
    """Run scripts one after the other on ranks that start once (`several.py`), each an attempt under `collect` or not.

    `runs`: a name for each -> `NAME=value ... script.py argument ...`.
    """
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in runs]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        arguments = [
            f"MASTER_PORT={probe.getsockname()[1]} {run}" for probe, run in zip(probes, runs.values(), strict=True)
        ]
    alone = [sys.executable, "-W", "error::UserWarning", str(SCRIPTS / "several.py")]
    command = alone if ranks == 1 else torchrun(ranks, "several.py")
    if under_collect:
        collected = collect(directory, [*command, *arguments])
        process, attempts = collected.process, {one["attempt"]: one for one in collected.summary["attempts"]}
    else:
        process, attempts = plain([*command, *arguments], directory), {}
    assert process.returncode == 0, process.stderr
    return {name: _run(directory, at, ranks, attempts.get(at)) for at, name in enumerate(runs)}


def _run(directory: Path, number: int, ranks: int, attempt: dict | None) -> Run:
    def read(suffix: str) -> list[str]:
        return [(directory / f"{number}-{rank}.{suffix}").read_text() for rank in range(ranks)]

    return Run([int(code) for code in read("exit")], "".join(read("out")), "".join(read("err")), attempt)


def weights(said: str) -> set[str]:
    """Checksums of the weights by rank; ranks share one stdout, so that lines run into each other."""
    return set(re.findall(r"rank \d+ weights [0-9a-f]{64}", said.replace("rank", "\nrank")))


def digests(said: str) -> set[str]:
    """The checksums alone."""
    return {line.split()[-1] for line in weights(said)}


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


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory) -> Collected:
    """DP 2 x PP 2 under collect, rank 3 slowed by 6 ms in each forward."""
    directory = tmp_path_factory.mktemp("pipeline")
    return collect(directory, torchrun(4, "dp2_pp2.py"), SLOW_RANK=3, SLOW_MS=6)


@pytest.fixture(scope="session")
def pipeline_alone(tmp_path_factory) -> set[str]:
    """What the same job trains to by itself: checksums."""
    return digests(plain(torchrun(4, "dp2_pp2.py"), tmp_path_factory.mktemp("alone")).stdout)
