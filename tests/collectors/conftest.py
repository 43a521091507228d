"""Runs training scripts under `tracekit collect`, as a user does: real processes, gloo, torchrun."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tracekit.trace import Trace, read_parquet

SCRIPTS = Path(__file__).parent / "scripts"
#: A run that hangs is a failure, not a wait.
TIMEOUT_S = 120
TORCH_ABORTS = "terminate called without an active exception"
TRIES = 3


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
        return weights(self.process)

    @property
    def attempt(self) -> dict:
        return self.summary["attempts"][-1]


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
    """Run the command by itself; again where torch aborts at the end of a rank.

    On a busy machine torch 2.13 with gloo does so now and then by itself, without tracekit.
    """
    for _ in range(TRIES):
        process = subprocess.run(
            command, cwd=directory, env=environment(**variables), capture_output=True, text=True, timeout=TIMEOUT_S
        )
        if TORCH_ABORTS not in process.stderr:
            break
    return process


def weights(process: subprocess.CompletedProcess) -> set[str]:
    """Checksums of the weights by rank; ranks share one stdout, so that lines run into each other."""
    return set(
        re.findall(
            r"rank \d+ (?:median_step_s [0-9.]+ )?weights [0-9a-f]{64}", process.stdout.replace("rank", "\nrank")
        )
    )


def digests(process: subprocess.CompletedProcess) -> set[str]:
    """The checksums alone."""
    return {line.split()[-1] for line in weights(process)}


def collect_pipeline(directory: Path, *, slow: bool = False) -> Collected:
    """The DP 2 x PP 2 job under collect, rank 3 slowed by 6 ms in each forward or not."""
    variables = {"SLOW_RANK": 3, "SLOW_MS": 6} if slow else {}
    return collect(directory, torchrun(4, "dp2_pp2.py"), **variables)


@pytest.fixture(scope="session")
def healthy(tmp_path_factory) -> Collected:
    """DP 2 x PP 2 under collect, nobody slowed."""
    return collect_pipeline(tmp_path_factory.mktemp("healthy"))


@pytest.fixture(scope="session")
def slowed(tmp_path_factory) -> Collected:
    """The same job with rank 3 slowed by 6 ms in each forward."""
    return collect_pipeline(tmp_path_factory.mktemp("slowed"), slow=True)
