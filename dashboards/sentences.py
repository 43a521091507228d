"""What a report says about places, times and kinds of op, in sentences.

In: a report (docs/report-schema.md), or parts of it, and the map. Out: text for the pages Workers, Attribution, Time.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from tracekit.analysis.attribution import STRAGGLING_SLOWDOWN
from tracekit.dashboards.worker_map import WORTH_NAMING, HostLoad, WorkerMap
from tracekit.model import COMMUNICATION, OpKind, ReportedKind, Worker
from tracekit.text import seconds, short

#: Longer lists are cut.
MOST_NAMED = 6
#: Kinds by what a person would look at.
_NETWORK = {*map(str, COMMUNICATION), *map(str, ReportedKind)}
_HOST = {str(kind) for kind in (OpKind.GC, OpKind.DATA_LOAD, OpKind.CHECKPOINT, OpKind.HOST_DELAY)}
#: A share of the loss below this does not decide between compute and communication.
SMALL_SHARE = 0.2
#: From this correlation of forward and backward on, the microbatches differ, as long sequences make them.
SAME_MICROBATCHES = 0.9
#: Microbatches differ where this share of the stages says so.
EVERY_STAGE_SHARE = 0.7


def believed(report: dict[str, Any], words: str) -> str:
    """`words` about a report, which say first where it is not to be believed."""
    return words if report["trust"]["trustworthy"] else f"Not trustworthy: {words}"


def space_words(space: dict[str, Any], found: WorkerMap) -> str:
    """Which workers are slow, what shape they make on the map, and how much of the time the worst one stays it."""
    workers = [Worker(one["dp_rank"], one["pp_rank"]) for one in space["workers"]]
    named = listed([str(worker) for worker in workers])
    host = f" on {short(space['host'])}" if space["host"] else ""
    largest = float(found.slowdown.max())
    stays = f"The same worker is the worst in {space['stays']:.0%} of the steps."
    if found.slowdown.size == 1:
        return "One worker: there is nobody to compare it with."
    match space["shape"]:
        case "none":
            return f"No worker stands out: the largest S_w is {largest:.3f}."
        case "one-worker":
            return f"One worker is slow: {named}{host}, S_w = {largest:.3f}. {stays}"
        case "one-host" if found.only_host is not None:
            everyone = len(workers) == found.slowdown.size
            which = f"All {len(workers):,} workers" if everyone else f"Several workers ({named})"
            return f"{which} are slow on the only host of the job, {short(found.only_host)}. {stays}"
        case "one-host":
            return f"The slow workers sit on one host, {short(space['host'])}: {named}. {stays}"
        case "one-stage":
            stage = workers[0].pp_rank
            return (
                f"One stage is slow on nearly every DP rank: stage {stage}. That is uneven work, not a broken machine."
            )
        case "one-dp-rank":
            rank = workers[0].dp_rank
            return f"One DP rank is slow on nearly every stage: DP rank {rank}, by its work or its input. {stays}"
        case "several-workers":
            return f"Several workers are slow: {named}. {stays}"
        case _:
            return f"The slow place moves: whoever is worst changes from step to step (largest S_w {largest:.3f})."


def host_words(loads: Sequence[HostLoad]) -> str:
    """Which host to drain first, if any, of several."""
    if not loads:
        return "The trace does not name its hosts."
    slow = [load for load in loads if load.worst_slowdown >= WORTH_NAMING]
    if not slow:
        return f"No host to drain: the worst S_w on any of {len(loads):,} hosts is {loads[0].worst_slowdown:.3f}."
    first = slow[0]
    if len(slow) > 1:
        also = f"{len(slow):,} of {len(loads):,} hosts reach {WORTH_NAMING:.2f}"
    else:
        also = f"no other host reaches {WORTH_NAMING:.2f}" if len(loads) > 1 else "no other host is known"
    return f"Drain {short(first.name)} first: its worker {first.worst} has S_w = {first.worst_slowdown:.3f}; {also}."


def time_words(pattern: dict[str, Any], by_step: Sequence[dict[str, Any]]) -> str:
    """How the slowdown runs over the steps. `by_step`: the rows of that table of the report."""
    if len(by_step) == 1:
        return "One step was traced: since when cannot be said."
    steps = listed([str(step) for step in pattern["slow_steps"]])
    match pattern["shape"]:
        case "none":
            return "No slowdown worth naming in any step."
        case "persistent":
            slow = sum(row["slowdown"] >= STRAGGLING_SLOWDOWN for row in by_step)
            if 0 < slow < len(by_step):
                return (
                    f"The slowdown comes and goes from the first step on: {slow:,} of {len(by_step):,} steps straggle."
                )
            return "The slowdown is there in every step, from the first one on."
        case "changed":
            since = pattern["since_step"]
            before, after = (
                fmean(row["slowdown"] for row in by_step if (row["step"] < since) is early) for early in (True, False)
            )
            way = "rose" if after > before else "fell"
            return f"S {way} at step {since}, from {before:.2f} on average to {after:.2f}: look at what changed then."
        case "drifting":
            return "The slowdown drifts: it grows or shrinks steadily over the steps."
        case "periodic":
            slow = f" (slow: {steps})" if steps else ""
            return f"The slowdown comes back every {pattern['period']} steps{slow}: look at what runs that often."
        case _:
            return f"Single slow steps: {steps}. All others run at the usual speed."


def listed(items: Sequence[str]) -> str:
    """The first few of `items`, and how many more there are."""
    more = f" and {len(items) - MOST_NAMED:,} more" if len(items) > MOST_NAMED else ""
    return ", ".join(items[:MOST_NAMED]) + more


def verdict(report: dict[str, Any]) -> str:
    """Compute, communication or host in one sentence, from what fixing each kind by itself would save."""
    times, trust = report["step_time_s"], report["trust"]
    loss = times["original"] - times["ideal"]
    saved = {"compute": 0.0, "communication": 0.0, "host work": 0.0}
    for row in report["by_kind"]:
        group = "communication" if row["kind"] in _NETWORK else "host work" if row["kind"] in _HOST else "compute"
        saved[group] += row["saved_s"]
    late = f" Launch delays add {trust['discrepancy']:.1%} to the original step."
    if not report["straggling"]:
        return f"Neither: no straggler (S = {report['slowdown']:.3f}); what follows is small.{late}"
    first, *others = sorted(saved, key=lambda group: -saved[group])
    rest = ", ".join(f"{group} {seconds(saved[group])}" for group in others if saved[group] or group != "host work")
    if saved[first] < SMALL_SHARE * loss:
        return (
            f"No kind of op by itself: of the {seconds(loss)} that stragglers cost a step, fixing any one kind gives"
            f" back little ({first} {seconds(saved[first])}, {rest}): they hide each other.{late}"
        )
    return (
        f"{first.capitalize()}: fixing it kind by kind saves {seconds(saved[first])} of the {seconds(loss)} that"
        f" stragglers cost a step ({rest}).{late}"
    )


def correlation_words(stages: Sequence[int], values: Sequence[float | None]) -> str:
    """What the correlations mean: sequences of different length show on every stage, a slow worker on its own."""
    high = [
        str(stage)
        for stage, value in zip(stages, values, strict=True)
        if value is not None and value >= SAME_MICROBATCHES
    ]
    if not high:
        return f"Not long together: no stage reaches r = {SAME_MICROBATCHES}, so sequence lengths are not the cause."
    if len(high) >= EVERY_STAGE_SHARE * len(stages):
        return (
            "Long together on every stage or nearly: microbatches differ, as sequences of different length make them."
        )
    return (
        f"Long together on stage {listed(high)} alone: sequences of different length would show on every stage, a"
        " worker that is slow in everything shows on its own."
    )
