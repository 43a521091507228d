"""Hangs of real jobs on this machine: every fault in every layout, and jobs that are slow or busy but do not hang.

python -m benchmarks hang_live                               one run of each
python -m benchmarks hang_live --runs 50 --log runs.jsonl    adds 50 runs to a file and prints the table of all in it
TRACEKIT_HANG_LOG=runs.jsonl makes the section from the runs in that file.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.measure import descendants, table, tracekit

HANG_AFTER_S, RANKS = 5, 4
LAYOUTS = ("ddp", "fsdp2", "pipeline")
#: Runs of the section: one of each fault and layout.
RUNS = 30
QUICK = {"RUNS": 1}
SCRIPT = Path(__file__).resolve().parents[1] / "tests" / "collectors" / "scripts" / "hangs.py"
GONE = "process gone or interpreter locked"
#: Fault of the script -> class that names it; None: no hang.
FAULTS = {
    "stop": GONE,
    "lock": "host stuck",
    "gil": GONE,
    "loader": "host stuck",
    "exit": GONE,
    "_exit": GONE,
    "skip": "mismatch",
    "size": "mismatch",
    "slow": None,
    "checkpoint": None,
}
#: A forward of the slow rank takes 2 s; a checkpoint takes 30 s, with a limit of 20 s.
VARIABLES = {"slow": {"COMPUTE_S": "0.5"}, "checkpoint": {"SAVING_S": "30"}}
LIMITS = {"checkpoint": 20}


@dataclass(frozen=True, slots=True)
class LiveHang:
    """`named`: rank and class of each culprit. `delay_s`: from the first rank's wait to the report; None without a
    report. `load`: load average of the machine at the start.
    """

    fault: str
    layout: str
    rank: int
    named: list[list[int | str]]
    delay_s: float | None
    load: float

    @property
    def limit_s(self) -> int:
        """--hang-after."""
        return LIMITS.get(self.fault, HANG_AFTER_S)

    @property
    def right(self) -> bool:
        """This rank and class alone are named; nothing if there is no hang."""
        expected = FAULTS[self.fault]
        return self.named == ([] if expected is None else [[self.rank, expected]])

    @property
    def in_time(self) -> bool:
        """Reported within the limit plus 5 s; without a hang, not reported at all."""
        if self.delay_s is None:
            return FAULTS[self.fault] is None
        return self.delay_s <= self.limit_s + 5


def section() -> str:
    """The Markdown of this section."""
    log = os.environ.get("TRACEKIT_HANG_LOG")
    return _section(list(_read(Path(log))) if log else [live(*case) for case in itertools.islice(_cases(), RUNS)])


def main(arguments: list[str]) -> None:
    """Add runs to a file and print the table of all runs in it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks hang_live")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--from", dest="begin", type=int, default=0, help="number of cases to skip")
    options = parser.parse_args(arguments)
    for case in itertools.islice(_cases(), options.begin, options.begin + options.runs):
        run = live(*case)
        print(run, flush=True)
        with options.log.open("a") as file:
            file.write(json.dumps(asdict(run)) + "\n")
    print(_section(list(_read(options.log))))


def _cases() -> Iterator[tuple[str, str, int]]:
    """Fault, layout and rank without end: all faults and layouts, then the next rank."""
    for rank in itertools.cycle((1, 2, 0, 3)):
        for fault, layout in itertools.product(FAULTS, LAYOUTS):
            yield fault, layout, rank


def _read(log: Path) -> Iterator[LiveHang]:
    for line in log.read_text().splitlines():
        yield LiveHang(**json.loads(line))


def _section(runs: list[LiveHang]) -> str:
    cells: defaultdict[tuple[str, str], list[LiveHang]] = defaultdict(list)
    for run in runs:
        cells[run.fault, run.layout].append(run)
    rows = []
    for fault, expected in FAULTS.items():
        of_fault = [run for layout in LAYOUTS for run in cells[fault, layout]]
        shares = [_share(cells[fault, layout]) for layout in LAYOUTS]
        delays = sorted(run.delay_s - run.limit_s for run in of_fault if run.delay_s is not None)
        late = f"{delays[len(delays) // 2]:.1f}, {delays[-1]:.1f}" if delays else "-"
        rows.append([fault, expected or "no hang", *shares, late])
    hangs = [run for run in runs if FAULTS[run.fault] is not None]
    loads = sorted(run.load for run in runs)
    words = (
        f"Real jobs on this machine: torchrun, gloo, {RANKS} ranks, `--hang-after {HANG_AFTER_S}`. Right: this rank and"
        " class alone; for slow (a rank takes 4 times as long, 2 s in each forward) and checkpoint (30 s, with"
        f" `--hang-after 20`) no report. {len(runs)} runs; of {len(hangs)} hangs"
        f" {sum(run.right for run in hangs)} are right and"
        f" {sum(run.in_time for run in hangs)} reported within the limit plus 5 s. Delay: from the first wait to the"
        f" report, less the limit, s. Load of the 2 cores {loads[0]:.0f} to {loads[-1]:.0f}, median"
        f" {loads[len(loads) // 2]:.0f}."
    )
    head = ["fault", "class", *LAYOUTS, "delay: median, longest"]
    return f"## Hangs of real jobs\n\n{words}\n\n{table(head, rows)}"


def _share(runs: list[LiveHang]) -> str:
    return f"{sum(run.right for run in runs)} of {len(runs)}"


def live(fault: str, layout: str, rank: int) -> LiveHang:
    """Run a job in which `rank` breaks, until `collect` reports a hang or the job ends."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        limit_s = str(LIMITS.get(fault, HANG_AFTER_S))
        command = tracekit(
            "collect", "--no-store", "--out", "job.parquet", "--hang-after", limit_s, "--on-hang", "stop"
        )
        torchrun = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", str(RANKS)]
        process = subprocess.Popen(
            [*command, "--", *torchrun, str(SCRIPT), fault, str(rank), layout],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **VARIABLES.get(fault, {})},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        end = time.monotonic() + 300
        while process.poll() is None and time.monotonic() < end and not list(Path(folder).glob("hang-*/report.json")):
            time.sleep(0.2)
        for process_id in descendants(process.pid):  # a stopped rank delays what ends the others
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
        process.wait()
        named: list[list[int | str]] = []
        delays = []
        for report in Path(folder).glob("hang-*/report.json"):
            for culprit in json.loads(report.read_text())["culprits"]:
                named.append([culprit["rank"], culprit["class"]])
                delays.append(report.parent.stat().st_ctime - culprit["since_unix_ns"] / 1e9)
    return LiveHang(fault, layout, rank, named, max(delays, default=None), load)
