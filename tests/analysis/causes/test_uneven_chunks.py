"""A model chunk that has more work than the other chunks is named alone, and priced as fast as they are."""

from __future__ import annotations

from statistics import mean

import pytest

from tests.analysis.bubbles.simulated import Compute, Pipeline, trace
from tracekit.analysis.diagnosis.diagnosis import Diagnosis
from tracekit.analysis.job.pipeline import PipelineJob

P, M, CHUNKS = 2, 4, 2


def orders() -> list[list[Compute]]:
    """All forwards, chunk by chunk, then all backwards."""
    return [
        [("F", v, k) for v in (s, s + P) for k in range(M)] + [("B", v, k) for v in (s + P, s) for k in range(M)]
        for s in range(P)
    ]


def lanes(longer: dict[tuple[str, int], float]) -> dict[tuple[int, int], Pipeline]:
    """Forwards take 1 s and backwards 2 s times what `longer` says of their virtual stage, of two DP ranks."""
    cost = {c: (1.0 if c[0] == "F" else 2.0) * longer.get(c[:2], 1.0) for order in orders() for c in order}
    return {(step, d): Pipeline(orders(), cost, lambda _: 0.0).run() for step in range(4) for d in range(2)}


def report(longer: dict[tuple[str, int], float]) -> Diagnosis:
    return PipelineJob(trace(lanes(longer), chunks=CHUNKS)).analysis.diagnosis


@pytest.mark.parametrize("longer", [{("B", 3): 3.0}, {("F", 0): 1.5}, {("B", 3): 3.0, ("F", 3): 5.0}])
def test_a_chunk_with_more_work_is_named_and_priced_by_replay(longer: dict[tuple[str, int], float]) -> None:
    found = report(longer)
    (cause,) = (one for one in found.causes if one.kind == "stage-imbalance")
    chunk, stage = divmod(next(iter(longer))[1], P)
    assert (cause.where.pp_ranks, cause.where.chunks) == ((stage,), (chunk,))
    even, uneven = (mean(one.window for one in lanes(of).values()) for of in ({}, longer))
    assert cause.saved_s == pytest.approx(uneven - even)
    (fix,) = (one for one in found.fixes if one.kind == "even-chunks")
    assert fix.saved_s == pytest.approx(uneven - even)


def test_if_both_directions_are_slower_each_has_a_price_of_its_own() -> None:
    longer = {("B", 3): 3.0, ("F", 3): 5.0}
    fixes = {fix.kind: fix.saved_s for fix in report(longer).fixes}
    uneven = mean(one.window for one in lanes(longer).values())
    for kind, left in (("even-chunk-backwards", ("F", 3)), ("even-chunk-forwards", ("B", 3))):
        without = mean(one.window for one in lanes({left: longer[left]}).values())
        assert fixes[kind] == pytest.approx(uneven - without)
    assert not {"even-chunk-backwards", "even-chunk-forwards"} & {fix.kind for fix in report({("B", 3): 3.0}).fixes}


def test_a_stage_whose_chunks_all_have_more_work_is_named_whole() -> None:
    found = report({("B", 1): 1.5, ("B", 3): 1.5})
    (cause,) = (one for one in found.causes if one.kind == "stage-imbalance")
    assert (cause.where.pp_ranks, cause.where.chunks) == ((1,), ())
    assert "even-chunks" not in {fix.kind for fix in found.fixes}


def test_a_plan_that_moves_layers_needs_to_know_them() -> None:
    recorded = trace(lanes({("B", 3): 3.0}), chunks=CHUNKS)
    for layers, known in ((None, False), ((8, 8), True)):
        kinds = {fix.kind for fix in PipelineJob(recorded).whatif(layers=layers).fixes}
        assert ("even-chunks" in kinds) != known
        assert "repartition-stages" not in kinds or known
