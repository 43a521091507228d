"""Which hosts compute slower than they used to, each compared with itself: also where all of them are slow.

In: a store, and a window of a job there. Out: a `History`. A host is compared over the windows, of any job, in which it
had the same work: the same sizes, model, layers, GPU model, schedule and microbatches of the job as far as they are
known, and workers at the same stages with as many computes a step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.attribution.gate import GATE
from tracekit.analysis.job.job import SAME_JOB
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.numeric.statistics import student_tail
from tracekit.base.errors import NotStoredError, SelectionError
from tracekit.base.text import short
from tracekit.store import Store
from tracekit.store.catalogue import SIZES
from tracekit.trace.canonical import Trace
from tracekit.trace.model import OpKind, TraceKind

#: Read at most so many windows, spread evenly over the history.
MOST_WINDOWS = 48
#: A change shows against two windows before it: they differ by the noise between windows. Definition.
FEWEST_WINDOWS = 3
_COMPUTES = [str(OpKind.FORWARD_COMPUTE), str(OpKind.BACKWARD_COMPUTE)]


class Slower(Struct, frozen=True):
    """A host that computes slower than it used to. `host`: its name, or that of a rank whose host is unknown.

    `before_s`, `now_s`: compute of its mean worker in the usual step, the mean of the windows before and since;
    `change`: how much longer that is, as a share. `since_job`, `since_window`: the first slow window. `windows`: how
    many before, and since. `chance`: the probability that noise between windows makes any host look like that.
    """

    host: str
    ranks: tuple[int, ...]
    before_s: float
    now_s: float
    change: float
    since_job: str
    since_window: int
    windows: tuple[int, int]
    chance: float


class History(Struct, frozen=True):
    """The hosts of a window against their own history, the slowest first. `hosts`: how many could be compared, over
    `windows` at most. `saved_gpu_hours_per_day`: what the job would save if all in `slower` computed as they used to.
    """

    job: str
    window: int
    hosts: int
    windows: int
    slower: tuple[Slower, ...] = ()
    saved_gpu_hours_per_day: float = 0.0

    @property
    def all_slower(self) -> bool:
        """Whether all became slower in the same window, which changed work explains as well as machines do."""
        since = {(host.since_job, host.since_window) for host in self.slower}
        return 1 < self.hosts == len(self.slower) and len(since) == 1


class _OfHost(Struct, frozen=True):
    """The workers of a host in a window. `work`: stage and computes a step of each; `seconds`: of the mean worker."""

    ranks: tuple[int, ...]
    work: tuple[tuple[int, float], ...]
    seconds: float


def history_of(store: Store, job: str | None = None, window: int | None = None) -> History:
    """The hosts of a window, by default the newest of the newest job, against their own history.

    Raises SelectionError for a job that is no pipeline, StoreError.
    """
    name = store.newest() if job is None else job
    with store.reading() as catalogue:
        newest = catalogue.window(name, window).number
        rows = catalogue.live.all_windows().sort("started_at", "added_s", nulls_last=False).rows(named=True)
    last = next(place for place, row in enumerate(rows) if (row["job"], row["number"]) == (name, newest))
    if rows[last]["kind"] != TraceKind.PIPELINE:
        raise SelectionError(f"--history: job {short(name)!r} is no pipeline, whose computes could be compared")
    alike = [row for row in rows[: last + 1] if _comparable(row, rows[last])]
    spread = [alike[index] for index in np.unique(np.linspace(0, len(alike) - 1, MOST_WINDOWS).round().astype(int))]
    trace = store.load(name, newest)
    assert isinstance(trace, Trace)  # by its kind
    now = _hosts(trace)
    seen = [*_read(store, spread[:-1]), (name, newest, now)]
    of_now = PipelineJob(trace)
    step_s = of_now.replay.recorded_step_times().mean()
    rises, compared = list[Slower](), 0
    for host, of_host in now.items():
        same = [
            (where, number, hosts[host].seconds)
            for where, number, hosts in seen
            if host in hosts and hosts[host].work == of_host.work
        ]
        if len(same) < FEWEST_WINDOWS:
            continue
        compared += 1
        level = np.array([seconds for *_, seconds in same])
        rise, chance = _shift(level)
        before_s, now_s = float(level[:rise].mean()), float(level[rise:].mean())
        if now_s - before_s >= GATE.smallest_share * step_s:
            since, number, _ = same[rise]
            counts = rise, len(same) - rise
            rises.append(
                Slower(host, of_host.ranks, before_s, now_s, now_s / before_s - 1, since, number, counts, chance)
            )
    certain = (replace(rise, chance=rise.chance * compared) for rise in rises)
    slower = sorted((rise for rise in certain if rise.chance <= 1 - GATE.confidence), key=lambda rise: -rise.change)
    return History(name, newest, compared, len(seen), tuple(slower), _saved(of_now, slower))


def _comparable(row: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    facts, facts_now = json.loads(row["metadata"]), json.loads(now["metadata"])
    return (
        row["kind"] == now["kind"]
        and all(row[size] == now[size] for size in SIZES)
        and all(None in (facts.get(name), facts_now.get(name)) or facts[name] == facts_now[name] for name in SAME_JOB)
    )


def _read(store: Store, rows: list[dict[str, Any]]) -> Iterator[tuple[str, int, dict[str, _OfHost]]]:
    """Job, number and hosts of each window whose ops were not pruned."""
    for row in rows:
        with suppress(NotStoredError):
            if isinstance(trace := store.load(row["job"], row["number"]), Trace):
                yield row["job"], row["number"], _hosts(trace)


def _hosts(trace: Trace) -> dict[str, _OfHost]:
    """What each host computes in a window; a rank without a known host is by itself."""
    by_rank = (
        trace.ops.filter(pl.col("kind").cast(pl.String).is_in(_COMPUTES))
        .group_by("rank", "step")
        .agg(pl.col("duration").sum(), pl.col("pp_rank").first(), computes=pl.len())
        .group_by("rank")
        .agg(pl.col("duration").median(), pl.col("pp_rank").first(), pl.col("computes").median())
        .sort("rank")
    )
    members: dict[str, list[tuple[int, float, int, float]]] = {}
    for rank, seconds, stage, computes in by_rank.select("rank", "duration", "pp_rank", "computes").iter_rows():
        members.setdefault(trace.hosts.get(rank, f"rank {rank}"), []).append((rank, seconds, stage, computes))
    return {
        host: _OfHost(
            tuple(rank for rank, *_ in ranks),
            tuple(sorted((stage, computes) for *_, stage, computes in ranks)),
            float(np.mean([seconds for _, seconds, *_ in ranks])),
        )
        for host, ranks in members.items()
    }


def _shift(level: Floats) -> tuple[int, float]:
    """After how many windows a level has risen for good, and the probability that it rises like that by chance after
    any of them.

    Student's t-test of the windows since against two or more before, one-sided, with the variance of both; the chance
    of each place is multiplied by their number (Bonferroni).
    """
    places, best = range(2, len(level)), (2, 1.0)
    for before in places:
        old, new = level[:before], level[before:]
        variance = (((old - old.mean()) ** 2).sum() + ((new - new.mean()) ** 2).sum()) / (len(level) - 2)
        error, risen = np.sqrt(variance * (1 / len(old) + 1 / len(new))), new.mean() - old.mean()
        chance = student_tail(float(risen / error), len(level) - 2) if error else float(risen <= 0)
        best = min(best, (before, min(1.0, chance * len(places))), key=lambda candidate: candidate[1])
    return best


def _saved(job: PipelineJob, slower: list[Slower]) -> float:
    """GPU-hours a day that the job saves if these hosts compute as they used to, all together."""
    if not slower:
        return 0.0
    kinds = f"kind={','.join(_COMPUTES)}"
    parts = [f"rank={','.join(map(str, host.ranks))} and {kinds} * {host.before_s / host.now_s:.9f}" for host in slower]
    return job.answer(" + ".join(parts)).saved_gpu_hours_per_day or 0.0
