"""Fixes that any job can try: less communication, hidden communication, a smaller pipeline bubble.

In: a pipeline. Out: `Plan`s; most of them are upper bounds.
"""

from __future__ import annotations

from collections.abc import Iterator

from tracekit.analysis.evidence.grids import collectives
from tracekit.analysis.evidence.network_repairs import rings_faster
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.transfers import traffic_of
from tracekit.analysis.fixes.plan import Plan
from tracekit.analysis.whatif.interventions import Scale
from tracekit.report.finding import Place
from tracekit.trace.model import DP_COLLECTIVES

#: Compression shrinks gradients and parameters by this factor: 16 to 8 bits.
COMPRESSION = 2


def general_plans(job: PipelineSubject) -> Iterator[Plan]:
    """Plans that do not depend on a cause."""
    if not collectives(job).empty:
        # Waiting for an unrecorded worker is not transfer time, so it stays.
        kinds = f"kind={','.join(sorted(DP_COLLECTIVES & set(job.replay.graph.kinds)))}"
        transfers = traffic_of(job).transfer_share[..., None]
        yield Plan(
            "overlap-dp-communication",
            "Overlap data-parallel communication with compute, all of it",
            Place(),
            Scale(collectives(job), 1 - transfers),
            bound=True,
            edit=f"{kinds} * 0" if (transfers == 1).all() else None,
        )
        yield Plan(
            "compress-dp-communication",
            f"Send a {COMPRESSION}th of the data-parallel bytes" if COMPRESSION > 2 else "Halve data-parallel bytes",
            Place(),
            rings_faster(traffic_of(job), 1 - traffic_of(job).transfer_share * (1 - 1 / COMPRESSION)),
            details={"ratio": COMPRESSION, "assumes": "transfer time follows bytes"},
        )
    profile = job.profile
    if profile is not None and job.stages > 1:
        chunks = job.table.shape[2]
        # With twice as many microbatches of half the size, the bubble of (pp - 1) / chunks microbatches is half as
        # long.
        slot_s = float(profile.stage_s.sum(axis=1).mean())
        saved_s = slot_s * (job.stages - 1) / chunks / 2
        yield Plan(
            "more-microbatches",
            "Run twice as many microbatches of half the size",
            Place(),
            None,
            step_times=job.unchanged - saved_s,
            bound=True,
            details={"bubble_s": 2 * saved_s, "assumes": "compute time follows size"},
        )
