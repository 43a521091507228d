"""Traces of torch.profiler: speed of reading and analysis, and accuracy of the named rank, cause and price.

The jobs come from `judges/kinetosim.py`. For speed, its output is repeated until the file of a rank is as large as a
real one. For accuracy, a job with one trouble is compared with the same job without it, whose step time gives the true
price. `judges/kinetoinject.py` puts delays into real traces if there are any next to the repository.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from benchmarks.core import REFERENCE
from benchmarks.measure import measure, table, tracekit
from judges.kinetoinject import Delay, Moments
from judges.kinetosim import Job, Trouble
from tracekit.analysis.gpu.pace import BlamedRank, PaceOfPeers, find_culprit, saved_by_rank
from tracekit.analysis.gpu.recorded import measure_waits
from tracekit.analysis.job.graph import RecordingJob
from tracekit.report.report import Report
from tracekit.sources.load import load

RANKS, FILE_BYTES = 8, 161_000_000
#: Published figures come from these seeds, so develop rules on other ones.
FIRST_SEED, SEEDS = 70, 4
QUICK = {"FILE_BYTES": 2_000_000, "SEEDS": 1, "TROUBLES": {"bad-worker": Trouble(1, gpu=1.15)},
         "GRAPH_TROUBLES": (), "REAL": ()}  # fmt: skip
TROUBLES = {
    "bad-worker": Trouble(1, gpu=1.15),
    "slow-host-code": Trouble(1, host=1.4),
    "late-data-loading": Trouble(1, input_us=1500),
    "slow-host-code, a pause in the backward": Trouble(1, pause_us=1500),
    "data-skew": Trouble(1, extra_kernels=16),
    "python-gc": Trouble(1, gc_us=1500),
    "sync-calls": Trouble(1, syncs=6),
    "slow-nic": Trouble(1, link_us=800),
}
#: Troubles that a step of one CUDA graph can have, since the host is not involved between its kernels.
GRAPH_TROUBLES = ("bad-worker", "late-data-loading", "data-skew", "python-gc", "slow-nic")
_READ = (
    "import pathlib, sys; from tracekit.collectors.importers.kineto.rank_columns import read_file;"
    " read_file(pathlib.Path(sys.argv[1]))"
)
REAL = ("torchrec_resnet18_2", "torchrec_sst_2b", "amd_ddp4")
#: Deals of the durations among ranks, with delays and without.
DEALS, HEALTHY_DEALS = 2, 8
SHARE_OF_STEP = 0.05
DELAYS = (("pause", 0.3), ("pause", 0.8), ("calls", 0.0), ("kernels", 0.0))


def section() -> str:
    """The Markdown of this section."""
    return "\n\n".join(["## Traces of torch.profiler", _speed(), _verdicts(), _injected()])


def _speed() -> str:
    with tempfile.TemporaryDirectory() as folder:
        job = Job(ranks=RANKS, layers=24, host_us=25.0, troubles=(Trouble(3, input_us=1500),))
        files = list(job.run().write_repeated(Path(folder), FILE_BYTES))
        size = sum(path.stat().st_size for path in files) / 1e6
        cost = measure(sys.executable, "-c", _READ, str(files[0]), runs=1, warm_up=0)
        every = measure(*tracekit("whatif", folder, "--json"), runs=1, warm_up=0)
    size_of_one = size / RANKS
    rows = [
        [work, f"{json_mb:.0f} MB", *run.cells, f"{json_mb / run.cpu_s:.0f} MB per CPU second"]
        for work, json_mb, run in (
            ("one file, read", size_of_one, cost),
            (f"`tracekit whatif` of {RANKS} files", size, every),
        )
    ]
    head = ["work", "JSON", "wall s", "CPU s", "peak MB of the largest process", "throughput"]
    return f"Files of the simulator, as large as a rank's of a real job.\n\n{table(head, rows)}"


def _verdicts() -> str:
    rows = [["healthy", *_healthy(_jobs())]]
    rows += [[name, *_row_of_trouble(name.split(",")[0], trouble, _jobs())] for name, trouble in TROUBLES.items()]
    rows += [["CUDA graphs, healthy", *_healthy(_jobs(cuda_graphs=True))]]
    rows += [
        [f"CUDA graphs, {name}", *_row_of_trouble(name, TROUBLES[name], _jobs(cuda_graphs=True))]
        for name in GRAPH_TROUBLES
    ]
    head = ["trouble", "jobs", "rank named", "cause first", "price / true price", "missed"]
    return f"Simulated jobs of 2, 4 and 8 ranks, GPU-bound and host-bound.\n\n{table(head, rows)}"


def _injected() -> str:
    sets = [name for name in REAL if (REFERENCE / "kineto" / name).is_dir()]
    head = ["traces", "delays", "that cost half their length", "rank named", "price within 10 %", "missed",
            "dealt without delays", "of these with a rank named"]  # fmt: skip
    rows = [_injected_into(name) for name in sets]
    intro = (
        "Delays of 5 % of a step, put into real traces whose ranks were made exchangeable: on each rank, a pause\n"
        "early or late in the step, all calls later, or all kernels longer. The growth of the rank's price is\n"
        "compared with the growth of the job's time."
    )
    return f"{intro}\n\n{table(head, rows)}" if rows else ""


def _injected_into(name: str) -> list[str]:
    job = Moments.read(REFERENCE / "kineto" / name)
    delays = felt = right = 0
    missed, blamed = [], []
    for seed in range(FIRST_SEED, FIRST_SEED + HEALTHY_DEALS):
        base = job.exchangeable(seed)
        before, prices = _whatif_of(base, ())
        if before is not None:
            blamed.append(f"deal {seed}: rank {before.rank}")
        if seed >= FIRST_SEED + DEALS:
            continue
        for rank, (kind, place) in product(range(len(job.documents)), DELAYS):
            delay = Delay(rank, kind, SHARE_OF_STEP * job.step_us, place)
            lost = base.took_us(base.times([delay])) - base.took_us(base.times())
            delays += 1
            if lost < 0.5 * delay.us * job.steps:
                continue
            felt += 1
            culprit, after = _whatif_of(base, [delay])
            if culprit is None or culprit.rank != rank:
                missed.append(f"deal {seed}: {kind} of rank {rank}, {place:.0%} into the step")
            right += abs((after[rank] - prices[rank]) * 1e6 - lost) <= 0.1 * lost
    named = f"{felt - len(missed)} of {felt}"
    return [name, str(delays), str(felt), named, f"{right} of {felt}", "; ".join(missed), str(HEALTHY_DEALS),
            "; ".join(blamed) or "none"]  # fmt: skip


def _whatif_of(job: Moments, delays: Sequence[Delay]) -> tuple[BlamedRank | None, Mapping[int, float]]:
    """The culprit, and the price of each rank, seconds."""
    with tempfile.TemporaryDirectory() as folder:
        job.write(Path(folder), job.times(delays))
        loaded = load(folder)
    assert isinstance(loaded, RecordingJob)
    waits = measure_waits(loaded.comparable.matches, loaded.comparable.clocks)
    pace = PaceOfPeers(loaded.graph, loaded.replay)
    return find_culprit(pace, loaded.ops.ops, waits), saved_by_rank(pace, waits.ranks)


def _jobs(*, cuda_graphs: bool = False) -> Iterator[Job]:
    for seed in range(FIRST_SEED, FIRST_SEED + SEEDS):
        for ranks in (2, 4, 8):
            for host_us in (12.0, 30.0):
                yield Job(ranks=ranks, layers=8, bucket=2, host_us=host_us, seed=seed, cuda_graphs=cuda_graphs)


def _healthy(jobs: Iterator[Job]) -> list[str]:
    named = [(job, culprit) for job in jobs if (culprit := _report(job).verdict.culprit) is not None]
    missed = "; ".join(f"{_called(job)}: rank {culprit.rank}" for job, culprit in named)
    return [str(6 * SEEDS), f"{len(named)} (0 is right)", "", "", missed]


def _row_of_trouble(cause: str, trouble: Trouble, jobs: Iterator[Job]) -> list[str]:
    rank = right = count = 0
    ratios, missed = [], []
    for healthy in jobs:
        job = replace(healthy, troubles=(trouble,))
        lost = job.run().took_us - healthy.run().took_us
        if lost < _SMALLEST_LOSS * healthy.run().took_us:
            continue  # hidden behind the GPU, so that the job loses nothing
        count += 1
        report = _report(job)
        culprit = report.verdict.culprit
        if culprit is None or culprit.rank != trouble.rank:
            missed.append(_called(job))
            continue
        rank += 1
        right += next(one.kind for one in report.findings if one.where.ranks) == cause
        ratios.append(culprit.saved_s * 1e6 / lost)
    ratios.sort()
    spread = f"{ratios[len(ratios) // 2]:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})" if ratios else ""
    return [str(count), f"{rank} of {count}", f"{right} of {count}", spread, "; ".join(missed)]


def _called(job: Job) -> str:
    return f"seed {job.seed}, {job.ranks} ranks, {job.host_us:.0f} us"


#: Troubles that cost a smaller share of the job need not be found.
_SMALLEST_LOSS = 0.02


def _report(job: Job) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        job.run().write(Path(folder))
        return load(folder).whatif()
