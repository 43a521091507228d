"""Fixes that any job can try: less communication, hidden communication, a smaller pipeline bubble.

In: `Evidence`. Out: `Plan`s; most of them are upper bounds.
"""

from __future__ import annotations

from collections.abc import Iterator

from tracekit.analysis.evidence.evidence import Evidence
from tracekit.analysis.evidence.network_repairs import rings_faster
from tracekit.analysis.fixes.plan import Plan
from tracekit.analysis.whatif.interventions import Scale
from tracekit.report.finding import Place
from tracekit.trace.model import DP_COLLECTIVES

#: Compression shrinks gradients and parameters by this factor: 16 to 8 bits.
COMPRESSION = 2


def general_plans(evidence: Evidence) -> Iterator[Plan]:
    """Plans that do not depend on a cause."""
    if not evidence.collectives.empty:
        # Waiting for an unrecorded worker is not transfer time, so it stays.
        kinds = f"kind={','.join(sorted(DP_COLLECTIVES & set(evidence.replay.graph.kinds)))}"
        transfers = evidence.traffic.transfer_share[..., None]
        yield Plan(
            "overlap-dp-communication",
            "Overlap data-parallel communication with compute, all of it",
            Place(),
            Scale(evidence.collectives, 1 - transfers),
            bound=True,
            edit=f"{kinds} * 0" if (transfers == 1).all() else None,
        )
        yield Plan(
            "compress-dp-communication",
            f"Send a {COMPRESSION}th of the data-parallel bytes" if COMPRESSION > 2 else "Halve data-parallel bytes",
            Place(),
            rings_faster(evidence.traffic, 1 - evidence.traffic.transfer_share * (1 - 1 / COMPRESSION)),
            details={"ratio": COMPRESSION, "assumes": "transfer time follows bytes"},
        )
    profile = evidence.profile
    if profile is not None and evidence.stages > 1:
        chunks = evidence.table.shape[2]
        # With twice as many microbatches of half the size, the bubble of (pp - 1) / chunks microbatches is half as
        # long.
        slot_s = float(profile.stage_s.sum(axis=1).mean())
        saved_s = slot_s * (evidence.stages - 1) / chunks / 2
        yield Plan(
            "more-microbatches",
            "Run twice as many microbatches of half the size",
            Place(),
            None,
            step_times=evidence.unchanged - saved_s,
            bound=True,
            details={"bubble_s": 2 * saved_s, "assumes": "compute time follows size"},
        )
