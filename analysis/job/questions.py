"""Custom what-if questions about jobs of any shape: what if these ops were as fast as their peers, who costs how much.

In: a replay, and questions as people type them. Out: `Question`s and `ByLabel`s, answered. A question needs the fit of
the replay and what its own edits read; only a fix that it names needs the whole diagnosis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from tracekit.analysis.evidence.subject import JobKind
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.numeric.statistics import saving_error_s
from tracekit.analysis.replay.graph_replay import GraphReplay
from tracekit.analysis.whatif.interventions import (
    ORIGINAL,
    AddTime,
    Intervention,
    SetOps,
    Together,
    addition,
    scaled_ops,
    step_times,
)
from tracekit.analysis.whatif.selection import all_of, count_selected, masks_of
from tracekit.analysis.whatif.selection_text import Term, checked_selection, parse_edit
from tracekit.base.errors import SelectionError
from tracekit.report.questions import Question

if TYPE_CHECKING:
    from tracekit.analysis.diagnosis.price import PricedFix
    from tracekit.analysis.evidence.graph_subject import GraphSubject
    from tracekit.analysis.evidence.pipeline_subject import PipelineSubject


def check(replay: GraphReplay, texts: Iterable[str]) -> None:
    """Raise SelectionError for an edit that cannot be understood or has a selection that matches no op."""
    for text in texts:
        for term in parse_edit(text):
            if term.selection is not None:
                checked_selection(term.text, replay.graph, replay.durations)


def answer_keep(replay: GraphReplay, text: str, gpus: int | None) -> Question:
    """What if only the selected ops were as recorded and all else ideal? `gpus`: None if no day of the job follows.

    Raises SelectionError for a selection that cannot be understood or matches no op.
    """
    selection = checked_selection(text, replay.graph, replay.durations)
    original = step_times(replay, ORIGINAL)
    saving = original - step_times(replay, addition(selection))
    ops = count_selected(selection, replay.graph, replay.durations)
    return answered(f"keep only {text}", ops, float(original.mean()), saving, saving_error_s(saving, 0.0), gpus)


def answer_fix(replay: GraphReplay, text: str, gpus: int, job: PipelineSubject | GraphSubject) -> Question:
    """What if the selected ops were as fast as their peers, or scaled? `text`: checked."""
    terms = parse_edit(text)
    edits: Callable[[Any, Sequence[Term]], Iterable[Intervention]] = (
        _pipeline_edits if job.kind is JobKind.PIPELINE else _op_edits
    )
    selected = [term.selection for term in terms if term.selection is not None]
    saving = job.unchanged - job.step_times(tuple(edits(job, terms)))
    ops = count_selected(all_of(selected), replay.graph, replay.durations) if selected else 0
    recorded_s, gpus_of_day = max(replay.fit.recorded_s, job.unchanged_s), gpus if job.daily else None
    return answered(f"fix {text}", ops, recorded_s, saving, job.saving_error_s(saving, ()), gpus_of_day)


def answered(words: str, ops: int, recorded_s: float, saving: Floats, error_s: float, gpus: int | None) -> Question:
    """A question with its answer. `saving`: of each step, [steps], seconds, of the mean step `recorded_s`.

    `gpus`: None if no figure a day follows.
    """
    saved_s = float(saving.mean())
    a_day = None if gpus is None else saved_s / recorded_s * gpus * 24
    return Question(words, ops, recorded_s - saved_s, saved_s, error_s, a_day)


def _pipeline_edits(job: PipelineSubject, terms: Sequence[Term]) -> Iterable[Intervention]:
    """What the terms of an edit change in a pipeline."""
    from tracekit.analysis.evidence.yardstick import as_fast_as_peers
    from tracekit.analysis.fixes import split_again

    graph, durations, priced = job.replay.graph, job.replay.durations, cache(partial(_priced_fixes, job))
    for term in terms:
        if term.fix is not None:
            yield _named_fix(priced(), term.fix)
        elif term.selection is None:
            yield split_again(job, *term.layers)
        elif term.factor is None:
            yield as_fast_as_peers(job, term.selection)
        else:
            yield scaled_ops(masks_of(term.selection, graph, durations), term.factor)


def _priced_fixes(job: Any) -> Sequence[PricedFix]:
    """The fixes in the report on a job without custom questions."""
    from tracekit.analysis.diagnosis.diagnosis import diagnose
    from tracekit.analysis.diagnosis.of_graph import graph_assessment
    from tracekit.analysis.diagnosis.of_pipeline import PipelineAssessment

    return diagnose(PipelineAssessment(job) if job.kind is JobKind.PIPELINE else graph_assessment(job)).fixes


def _named_fix(fixes: Sequence[PricedFix], name: str) -> Intervention:
    """The change of the fix of that name, with the time that it takes itself. Raises SelectionError."""
    from tracekit.analysis.diagnosis.price import fix_named

    plan = fix_named(fixes, name).plan
    assert plan.change is not None, "`fix_named` returns only fixes with a change"
    return Together((plan.change, AddTime(plan.extra_s))) if plan.extra_s else plan.change


def _op_edits(job: GraphSubject, terms: Sequence[Term]) -> Iterable[Intervention]:
    """What the terms of an edit change in a job whose ops form any graph."""
    from tracekit.analysis.whatif.peers import op_costs_at_the_pace_of_peers

    replay, pace, priced = job.replay, job.pace, cache(partial(_priced_fixes, job))
    cost, like_peers = pace.cost, np.zeros(len(pace.cost), np.bool_)
    changes: list[Intervention] = []
    for term in terms:
        if term.fix is not None:
            changes.append(_named_fix(priced(), term.fix))
            continue
        if term.selection is None:
            raise SelectionError(f"{term.text:.80}: only pipeline traces have layers; select ops instead")
        chosen = np.zeros(len(cost), np.bool_)
        masks = masks_of(term.selection, replay.graph, replay.durations)
        for block, mask in zip(pace.graph.blocks, masks, strict=True):
            chosen[block.op] = mask
        if term.factor is None:
            cost, like_peers = op_costs_at_the_pace_of_peers(pace.graph.ops, cost, chosen), like_peers | chosen
        else:
            cost = np.where(chosen, cost * term.factor, cost)
    freed = pace.freed(pace.ranks_with_all_calls(like_peers))
    edited = [] if cost is pace.cost else [SetOps(cost)]
    return [*([] if freed is None else [freed]), *edited, *changes]
