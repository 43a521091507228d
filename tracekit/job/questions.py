"""Custom what-if questions about jobs of any shape: what if these ops were as fast as their peers, who costs how much.

In: a replay, and questions as people type them. Out: `Question`s and `ByLabel`s, answered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tracekit.analysis.attribution.by_label import attribute_by
from tracekit.analysis.evidence.ops import OpEvidence
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.numeric.means import saving_error_s
from tracekit.analysis.replay.graph_replay import GraphReplay
from tracekit.analysis.whatif.interventions import AddTime, Intervention, SetOps, Together, scaled_ops, step_times
from tracekit.analysis.whatif.paper import ORIGINAL, addition
from tracekit.analysis.whatif.selection import all_of, count_selected, masks_of
from tracekit.analysis.whatif.selection_text import Term, checked_selection, parse_edit
from tracekit.base.errors import SelectionError
from tracekit.report.question import ByLabel, Question

if TYPE_CHECKING:
    from tracekit.analysis.evidence.evidence import Evidence
    from tracekit.report.fix import Fix


def check(replay: GraphReplay, texts: Iterable[str]) -> None:
    """Raise SelectionError for an edit that cannot be understood or has a selection that matches no op."""
    for text in texts:
        for term in parse_edit(text):
            if term.selection is not None:
                checked_selection(term.text, replay.graph, replay.durations)


def answer(
    replay: GraphReplay, text: str, gpus: int, *, keep: bool = False, evidence: Evidence | OpEvidence | None = None
) -> Question:
    """What if the selected ops were as fast as their peers, or scaled? With `keep`: what if only they were as recorded
    and all else ideal?

    `evidence`: that on the job, for edits. Raises SelectionError for an edit or selection that cannot be understood or
    matches no op.
    """
    if keep:
        chosen = checked_selection(text, replay.graph, replay.durations)
        original, kept = step_times(replay, ORIGINAL), step_times(replay, addition(chosen))
        ops, saving = count_selected(chosen, replay.graph, replay.durations), original - kept
        return answered(f"keep only {text}", ops, float(original.mean()), saving, saving_error_s(saving, 0.0), gpus)
    assert evidence is not None, "an edit needs the evidence"
    check(replay, (text,))
    terms, base = parse_edit(text), evidence.replay
    selected = [term.selection for term in terms if term.selection is not None]
    edits = _of_ops(evidence, terms) if isinstance(evidence, OpEvidence) else _of_pipeline(evidence, terms)
    unchanged = step_times(base, ())
    saving = unchanged - step_times(base, edits)
    ops = count_selected(all_of(selected), replay.graph, replay.durations) if selected else 0
    recorded_s = max(float(replay.recorded_step_times().mean()), float(unchanged.mean()))
    return answered(f"fix {text}", ops, recorded_s, saving, evidence.saving_error_s(saving, ()), gpus)


def answered(words: str, ops: int, recorded_s: float, saving: Floats, error_s: float, gpus: int) -> Question:
    """A question with its answer. `saving`: of each step, [steps], seconds, of the mean step `recorded_s`."""
    saved_s = float(saving.mean())
    return Question(words, ops, recorded_s - saved_s, saved_s, error_s, saved_s / recorded_s * gpus * 24)


def _of_pipeline(evidence: Evidence, terms: Sequence[Term]) -> Iterable[Intervention]:
    from tracekit.analysis.diagnosis.diagnose import priced_fixes
    from tracekit.analysis.evidence.yardstick import as_fast_as_peers

    graph, durations = evidence.replay.graph, evidence.replay.durations
    fixes = priced_fixes(evidence) if any(term.fix is not None for term in terms) else ()
    for term in terms:
        if term.selection is None:
            yield _change_of(evidence, term, fixes)
        elif term.factor is None:
            yield as_fast_as_peers(evidence, term.selection)
        else:
            yield scaled_ops(masks_of(term.selection, graph, durations), term.factor)


def _change_of(evidence: Evidence, term: Term, fixes: Sequence[Fix]) -> Intervention:
    """The change of the fix, one of `fixes`, that an edit names, or of other layers."""
    from tracekit.analysis.diagnosis.price import fix_named
    from tracekit.analysis.fixes.layers import split_again

    if term.fix is None:
        return split_again(evidence, *term.layers)
    fix = fix_named(fixes, term.fix)
    assert fix.change is not None, "`fix_named` finds only such fixes"
    return Together((fix.change, AddTime(fix.extra_s)))


def _of_ops(evidence: OpEvidence, terms: Sequence[Term]) -> Iterable[Intervention]:
    from tracekit.analysis.diagnosis.of_ops import diagnose_ops
    from tracekit.analysis.diagnosis.price import fix_named
    from tracekit.analysis.gpu.behind import SMALLEST_SHARE
    from tracekit.analysis.whatif.peers import op_costs_at_the_pace_of_peers

    replay, pace = evidence.replay, evidence.pace
    cost, like_peers = pace.cost, np.zeros(len(pace.cost), np.bool_)
    changes: list[Intervention] = []
    fixes = diagnose_ops(evidence).fixes if any(term.fix is not None for term in terms) else ()
    for term in terms:
        if term.fix is not None:
            changes.append(fix_named(fixes, term.fix).change)
            continue
        if term.selection is None:
            raise SelectionError(f"{term.text:.80}: only pipeline traces have layers; select ops instead")
        chosen = np.zeros(len(cost), np.bool_)
        for block, mask in zip(
            pace.graph.blocks, masks_of(term.selection, replay.graph, replay.durations), strict=True
        ):
            chosen[block.op] = mask
        if term.factor is None:
            cost, like_peers = op_costs_at_the_pace_of_peers(pace.graph.ops, cost, chosen), like_peers | chosen
        else:
            cost = np.where(chosen, cost * term.factor, cost)
    freed = pace.freed(pace.ranks_with_all_calls(like_peers), SMALLEST_SHARE * pace.recorded_s)
    edited = [] if cost is pace.cost else [SetOps(cost)]
    return [*([] if freed is None else [freed]), *edited, *changes]


def by_labels(replay: GraphReplay, *labels: str) -> ByLabel:
    """Exact S_x for each value of a label of the ops, or for each combination of values of several labels.

    Raises SelectionError for a label that the job does not have, or one with too many values.
    """
    names = tuple(label.strip() for label in labels)
    return ByLabel(names, attribute_by(replay, names))
