"""Overlap and experts of a job: measured on request, and in words.

In: the ops of a job. Out: `Overlap` and `Experts`, a sentence and tables for all renderers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tracekit.analysis.detectors.all_detectors import detector_of
from tracekit.base.text import seconds
from tracekit.report.questions import CauseOfImbalance, Experts, LayerLoads, Overlap, Rebalanced
from tracekit.report.tables import Section, ShareGrid, Table

if TYPE_CHECKING:
    from tracekit.analysis.evidence.graph_subject import GraphSubject
    from tracekit.analysis.evidence.subject import Cause
    from tracekit.analysis.job.job import ReportOptions

#: Rows of a table.
_MOST_ROWS = 20
_LATE_PEER = "Loads are equal, and one rank comes late to all-to-alls"
_SOURCES = {"splits": "rows of the all-to-alls", "loads": "the log of loads", "kernel-times": "times of kernels only"}


def overlap_of(evidence: GraphSubject, asked: ReportOptions) -> Overlap | None:
    """What is hidden, exposed and waiting in a recording of GPUs; None if nobody asked, or for other op traces."""
    if not asked.overlap or evidence.recorded is None:
        return None
    from tracekit.analysis.experts.overlap import find_overlap

    return find_overlap(evidence.recorded)


def asked_experts(evidence: GraphSubject | None, asked: ReportOptions, findings: Sequence[Cause]) -> Experts | None:
    """The loads of the experts and the price of plans; if nobody asked, uneven loads with the price of equal ones, None
    if there are none.
    """
    if evidence is None and not asked.wants_experts:  # as of most jobs: they need none of these modules
        return None
    from tracekit.analysis.detectors.uneven_experts import other_causes
    from tracekit.analysis.evidence.exchanges import experts_of, uneven_experts
    from tracekit.analysis.experts.balance import ExpertJob
    from tracekit.analysis.experts.expert_loads import ExpertLoads, RebalancePlan

    if not asked.wants_experts:
        if evidence is None or uneven_experts(evidence) is None:
            return None
        return experts_of(evidence).found([RebalancePlan.parse("balanced")])
    loads = (ExpertLoads(ExpertJob()) if evidence is None else experts_of(evidence)).found(asked.plans)
    if evidence is not None:
        loads.causes.extend(other_causes(evidence, findings))
    return loads


def remarks(overlap: Overlap | None, experts: Experts | None, asked: ReportOptions) -> Iterator[tuple[str, str]]:
    """Yield a sentence each."""
    if overlap is not None:
        yield "Overlap", _hidden(overlap)
    if experts is not None and asked.wants_experts:
        yield "Experts", sentence(experts)


def sentence(experts: Experts) -> str:
    """Where loads were read, and why ranks wait for each other."""
    source = "unknown" if experts.source is None else f"by {_SOURCES[experts.source]}"
    why = [f"{_because(one)} ({seconds(one.saved_s)} a step)" for one in experts.causes]
    even = ["no uneven loads that cost 1% of a step"] if experts.fits and not experts.cut else []
    return "; ".join([f"loads {source}", *(why or even), *experts.notes])


def _because(cause: CauseOfImbalance) -> str:
    title = _LATE_PEER if cause.cause == "late-peer" else detector_of(cause.cause).title
    of = (("rank", cause.rank), ("in most layers expert", cause.expert))
    named = [f"{name} {value}" for name, value in of if value is not None]
    return f"{title}: {', '.join(named)}" if named else title


def _hidden(overlap: Overlap) -> str:
    total = sum(one.communication_s for one in overlap.ranks) or 1.0
    hidden, waits = sum(one.both_s for one in overlap.ranks), sum(one.wait_s for one in overlap.ranks)
    taxes = [one.sm_tax_at_most_s for one in overlap.ranks if one.sm_tax_at_most_s]
    at_most = "at most " if overlap.ranks[0].wait_basis == "minimum" else ""
    tax = f"; hiding cost at most {seconds(sum(taxes))} of SM time" if taxes else ""
    waiting = f"{at_most}{seconds(waits)} of it is waiting, not transfer"
    return f"{hidden / total:.1%} of communication is hidden; {waiting}{tax}"


def asked_tables(overlap: Overlap | None, experts: Experts | None, asked: ReportOptions) -> Iterator[Section]:
    """Yield the tables of what was asked for."""
    if overlap is not None:
        ranks = [
            (str(one.rank), *map(seconds, (one.compute_s, one.communication_s, one.exposed_s, one.wait_s)),
             f"{one.hidden_share:.1%}", "-" if one.sm_tax_at_most_s is None else seconds(one.sm_tax_at_most_s))
            for one in overlap.ranks
        ]  # fmt: skip
        names = [
            (one.name, f"{one.ops:,}", *map(seconds, (one.seconds, one.exposed_s, one.wait_s)))
            for one in overlap.collectives
        ]
        pairs = [(f"{one.communication} under {one.compute}", seconds(one.seconds)) for one in overlap.pairs]
        heads = ("rank", "compute", "communication", "exposed", "waiting", "hidden", "SM tax <=")
        yield _table("Overlap", heads, ranks)
        yield _table("Collectives", ("Collective", "ops", "time", "exposed", "waiting"), names)
        if pairs:
            yield _table("What hides what", ("Communication under compute", "time"), pairs)
    if asked.wants_experts:
        yield from loads(experts)


def loads(experts: Experts | None) -> Iterator[Section]:
    """Yield the loads of experts, if they are known, as a picture and a table, and the prices of plans."""
    if experts is not None and experts.layers:
        yield _grid(experts.layers)
        rows = [(str(one.layer), f"{one.max_over_mean:.2f}", f"{one.deviation:.2f}") for one in experts.layers]
        yield _table("Layers of experts", ("layer", "max over mean", "± over steps"), rows)
    if experts is not None and experts.rebalance:
        why = [f"{one.plan}: {one.unknown}" for one in experts.rebalance if one.unknown]
        yield _table("Other loads", ("Plan", "step", "saves", "dropped"), list(map(_price, experts.rebalance)), *why)


def _grid(layers: Sequence[LayerLoads]) -> ShareGrid:
    """Tokens of each rank over the mean, in each layer."""
    means = [sum(one.tokens_by_rank) / len(one.tokens_by_rank) or 1.0 for one in layers]
    return ShareGrid(
        title="Loads of experts",
        down="layer",
        across="rank",
        rows=[str(one.layer) for one in layers],
        columns=[str(rank) for rank in range(len(layers[0].tokens_by_rank))],
        values=[[tokens / mean - 1 for tokens in one.tokens_by_rank] for one, mean in zip(layers, means, strict=True)],
        unit="tokens",
    )


def _table(title: str, heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], *notes: str) -> Table:
    """A table of the first rows, with the number of all if these are not all."""
    rest = (f"{_MOST_ROWS} of {len(rows):,}; all with --json",) if len(rows) > _MOST_ROWS else ()
    return Table(title, heads, tuple(rows[:_MOST_ROWS]), "\n".join((*notes, *rest)) or None)


def _price(row: Rebalanced) -> tuple[str, ...]:
    plan = row.plan if row.chunks is None else f"{row.plan}: {row.chunks}"
    dropped = "-" if row.dropped_share is None else f"{row.dropped_share:.1%}"
    if row.step_time_s is None or row.saved_s is None:
        bounds = "unknown" if row.low_s is None else f"{seconds(row.low_s)} to {seconds(row.high_s or 0.0)}"
        return plan, bounds, "", dropped
    error = "" if not row.error_s else f" ± {seconds(row.error_s)}"
    times = f"{seconds(row.step_time_s + row.saved_s)} to {seconds(row.step_time_s)}"
    return plan, times, f"{seconds(row.saved_s)}{error}", dropped
