"""Fleets with known shares: jobs with given sizes, causes and teams, and their true loss.

In: a `Population`. Out: its jobs, each a simulated trace with its ground truth (`JobTruth`), in memory or as files.
Shares are met as exactly as whole jobs allow: they are dealt out, not drawn. Whether a job straggles comes from the
simulator itself (`simulated_slowdown`), without the analysis, so that a study of the traces can be checked against it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import polars as pl

from tracekit.base.errors import SelectionError
from tracekit.synth.injected_causes import (
    InjectedCause,
    PythonGc,
    SequenceLengthImbalance,
    SlowHost,
    SlowLastStage,
    SlowWorker,
    require,
)
from tracekit.synth.simulate import EPOCH_S, SynthSpec, simulated_slowdown, synthesize
from tracekit.trace.canonical import Trace
from tracekit.trace.model import Layout

#: Straggling means S of at least this; jobs are made to be this far away from it, because no measurement is exact.
STRAGGLING, CLEAR_OF_IT = 1.1, 0.01
#: How often to strengthen or weaken a cause until its job is on the right side.
_MOST_TRIES = 12
_WEEK_S = 7 * 86_400.0
#: Cause -> the field for its strength, the value at which it has no effect, a usual one, and the largest.
_STRENGTHS: Mapping[str, tuple[type[InjectedCause], str, float, float, float]] = MappingProxyType(
    {
        "slow-worker": (SlowWorker, "factor", 1.0, 1.5, math.inf),
        "slow-host": (SlowHost, "factor", 1.0, 1.5, math.inf),
        "slow-last-stage": (SlowLastStage, "factor", 1.0, 1.4, math.inf),
        "sequence-length-imbalance": (SequenceLengthImbalance, "quadratic_share", 0.0, 0.4, 1.0),
        "python-gc": (PythonGc, "pause_s", 0.0, 0.3, math.inf),
    }
)


@dataclass(frozen=True, slots=True)
class Population:
    """The jobs of a fleet. Shares are relative to their sum.

    `layouts`: DP ranks x stages x tensor-parallel ranks, as (dp, pp, tp), each with its share. `straggling`: the share
    of jobs with S >= 1.1. `causes`: of those, by name. `mild`: the share of all other jobs with a cause that is too
    weak to make them straggle. `teams`, `gpu_models`: shares. `weeks`: period over which starts are spread. `hosts`: of
    the fleet; `bad_hosts`: the number of hosts that have, between them, the slow workers of the share `on_bad_hosts` of
    the jobs with a slow worker. `hours`: median run time of a job, lognormal with `hours_sigma`. Raises SelectionError
    for impossible values.
    """

    jobs: int = 100
    seed: int = 0
    layouts: Mapping[tuple[int, int, int], float] = field(
        default_factory=lambda: {
            (4, 4, 8): 0.35, (8, 4, 8): 0.22, (16, 4, 8): 0.18, (32, 4, 8): 0.10, (32, 8, 8): 0.07, (64, 8, 8): 0.04,
            (64, 16, 8): 0.02, (128, 16, 8): 0.012, (256, 16, 8): 0.005, (512, 16, 8): 0.003,
        }
    )  # fmt: skip
    straggling: float = 0.425
    causes: Mapping[str, float] = field(
        default_factory=lambda: {
            "slow-last-stage": 0.50,
            "sequence-length-imbalance": 0.25,
            "python-gc": 0.15,
            "slow-worker": 0.10,
        }
    )
    mild: float = 0.3
    teams: Mapping[str, float] = field(default_factory=lambda: {"search": 0.4, "speech": 0.3, "vision": 0.3})
    gpu_models: Mapping[str, float] = field(default_factory=lambda: {"H800": 0.7, "A100": 0.3})
    weeks: int = 4
    hosts: int = 4096
    bad_hosts: int = 3
    on_bad_hosts: float = 0.5
    hours: float = 24.0
    hours_sigma: float = 1.0
    steps: int = 5
    microbatches: int = 8

    def __post_init__(self) -> None:
        for name in ("jobs", "weeks", "hosts", "steps", "microbatches"):
            require("population", name, getattr(self, name), 1, math.inf, int)
        for name in ("seed", "bad_hosts"):
            require("population", name, getattr(self, name), 0, math.inf, int)
        for name in ("straggling", "mild", "on_bad_hosts"):
            require("population", name, getattr(self, name), 0, 1)
        for name in ("hours", "hours_sigma"):
            require("population", name, getattr(self, name), 0, math.inf)
        for name in ("layouts", "causes", "teams", "gpu_models"):
            shares = getattr(self, name)
            if not shares or not sum(shares.values()) > 0:
                raise SelectionError(f"population: {name} is empty; expected shares such as {{a: 0.6, b: 0.4}}")
            for key, share in shares.items():
                require("population", f"{name}: {key}", share, 0, math.inf)
        if unknown := sorted(set(self.causes) - set(_STRENGTHS)):
            raise SelectionError(f"population: unknown cause {unknown[0]!r}; known: {', '.join(_STRENGTHS)}")


@dataclass(frozen=True, slots=True)
class JobTruth:
    """The ground truth about a job: `slowdown` is S by the simulator, `cause`: the injected one, "" for none.

    `bad_host`: the host of its slow worker, if that is one of the bad ones, else "".
    """

    name: str
    gpus: int
    workers: int
    team: str
    gpu_model: str
    cause: str
    bad_host: str
    started_at: float
    slowdown: float
    straggling: bool
    gpu_hours: float
    lost_gpu_hours: float


@dataclass(frozen=True, slots=True)
class _Role:
    """Properties assigned to a job before it is drawn."""

    layout: tuple[int, int, int]
    straggling: bool
    cause: str
    team: str
    gpu_model: str
    week: int
    on_bad_host: bool


def write_fleet(population: Population, out: Path, processes: int = 1) -> pl.DataFrame:
    """Write a canonical trace for each job into a folder, and truth.csv; returns the truth, a row for each job."""
    out.mkdir(parents=True, exist_ok=True)
    work = [(population, number, out) for number in range(population.jobs)]
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        truths = list(pool.map(_write_job, work) if processes > 1 else map(_write_job, work))
    truth = pl.DataFrame([asdict(truth) for truth in truths])
    truth.write_csv(out / "truth.csv")
    return truth


def _write_job(work: tuple[Population, int, Path]) -> JobTruth:
    population, number, out = work
    trace, truth = job_of_population(population, number)
    trace.write_parquet(out / f"{truth.name}.parquet")
    return truth


def job_of_population(population: Population, number: int) -> tuple[Trace, JobTruth]:
    """Return job number `number`, 0 to `jobs` - 1, with its ground truth, independent of earlier calls."""
    role = _roles(population)[number]
    rng = np.random.default_rng([population.seed, number])
    dp, pp, tp = role.layout
    spec = SynthSpec(
        Layout(dp=dp, pp=pp, tp=tp),
        steps=population.steps,
        microbatches=population.microbatches,
        seed=int(rng.integers(2**31)),
        name=f"job-{number:06d}",
    )
    spec, slowdown = _on_its_side(spec, role, rng)
    trace = synthesize(spec)
    hosts, bad_host = _hosts(population, trace, role, rng)
    gpu_hours = spec.layout.world_size * population.hours * float(rng.lognormal(0, population.hours_sigma))
    started = EPOCH_S + role.week * _WEEK_S + float(rng.uniform(0, _WEEK_S / 2))
    facts = {"team": role.team, "gpu_model": role.gpu_model, "gpu_hours": gpu_hours, "hosts": hosts}
    trace = replace(
        trace,
        step_starts=MappingProxyType({step: start - EPOCH_S + started for step, start in trace.step_starts.items()}),
        metadata=MappingProxyType({**trace.metadata, **facts}),
    )
    truth = JobTruth(
        name=spec.name,
        gpus=spec.layout.world_size,
        workers=spec.layout.workers,
        team=role.team,
        gpu_model=role.gpu_model,
        cause=role.cause,
        bad_host=bad_host,
        started_at=started,
        slowdown=slowdown,
        straggling=slowdown >= STRAGGLING,
        gpu_hours=gpu_hours,
        lost_gpu_hours=max(1 - 1 / slowdown, 0.0) * gpu_hours,
    )
    return trace, truth


def _roles(population: Population) -> Sequence[_Role]:
    """The role of each job. Every share is met as exactly as whole jobs allow, and none correlates with another."""
    rng, jobs = np.random.default_rng([population.seed, 2**31]), population.jobs
    slow = dealt({True: population.straggling, False: 1 - population.straggling}, jobs, rng)
    strong = iter(dealt(population.causes, sum(slow), rng))
    others = jobs - sum(slow)
    mild = iter(dealt({True: population.mild, False: 1 - population.mild}, others, rng))
    weak = iter(dealt(population.causes, others, rng))
    weak_or_none = (next(weak) if is_mild else "" for is_mild in mild)
    causes = [next(strong) if is_slow else next(weak_or_none) for is_slow in slow]
    bad = dealt({True: population.on_bad_hosts, False: 1 - population.on_bad_hosts}, causes.count("slow-worker"), rng)
    on_bad = iter(bad)
    columns = (
        dealt(population.layouts, jobs, rng),
        slow,
        causes,
        dealt(population.teams, jobs, rng),
        dealt(population.gpu_models, jobs, rng),
        dealt(dict.fromkeys(range(population.weeks), 1.0), jobs, rng),
        [cause == "slow-worker" and next(on_bad) for cause in causes],
    )
    return [_Role(*row) for row in zip(*columns, strict=True)]


def dealt(shares: Mapping[Any, float], count: int, rng: np.random.Generator) -> list[Any]:
    """`count` keys, shuffled, each as often as its share requires: rounded down, the largest remainders up."""
    keys, weights = list(shares), np.array(list(shares.values()), np.float64)
    exact = weights / weights.sum() * count
    whole = np.floor(exact).astype(np.int64)
    for index in np.argsort(-(exact - whole), kind="stable")[: count - int(whole.sum())]:
        whole[index] += 1
    order = rng.permutation(count)
    expanded = [key for key, times in zip(keys, whole.tolist(), strict=True) for _ in range(times)]
    return [expanded[at] for at in order]


def _on_its_side(spec: SynthSpec, role: _Role, rng: np.random.Generator) -> tuple[SynthSpec, float]:
    """The job with its cause as strong as its role requires, and its S."""
    if not role.cause:
        return spec, simulated_slowdown(spec)
    kind, name, nothing, usual, largest = _STRENGTHS[role.cause]
    strength = (usual - nothing) * float(rng.lognormal(0, 0.5)) * (1.0 if role.straggling else 0.2)
    for _ in range(_MOST_TRIES):
        value = min(nothing + strength, largest)
        tried = replace(spec, causes=(kind(**{name: value}),))
        slowdown = simulated_slowdown(tried)
        if role.straggling == (slowdown >= STRAGGLING) and abs(slowdown - STRAGGLING) >= CLEAR_OF_IT:
            return tried, slowdown
        strength *= 1.6 if role.straggling else 0.5
    side = "straggle" if role.straggling else "not straggle"
    raise SelectionError(
        f"population: {spec.name} of {spec.layout.workers} workers cannot be made to {side} by {role.cause}; choose"
        " other layouts, causes or microbatches"
    )


def _hosts(population: Population, trace: Trace, role: _Role, rng: np.random.Generator) -> tuple[dict[str, str], str]:
    """Rank -> host of the fleet, and the bad host of the job's slow worker, if it is on one."""
    numbered = trace.hosts
    names = sorted(set(numbered.values()))
    pool = max(population.hosts, len(names) + population.bad_hosts)
    good = rng.choice(pool - population.bad_hosts, len(names), replace=False) + population.bad_hosts
    called = {name: f"node-{host:05d}" for name, host in zip(names, good.tolist(), strict=True)}
    bad_host = ""
    if role.on_bad_host and population.bad_hosts:
        place = trace.metadata["labels"][0]["location"]
        shape = SynthSpec(trace.layout).shape
        bad_host = f"node-{int(rng.integers(population.bad_hosts)):05d}"
        called[f"host-{shape.host(place['dp_rank'], place['pp_rank']):04d}"] = bad_host
    return {str(rank): called[host] for rank, host in numbered.items()}, bad_host
