"""Steps of one structure are replayed together, and nothing but speed depends on it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import polars as pl
import pytest

import tracekit
from tracekit.analysis.graph import op_graph
from tracekit.base.errors import GraphError, TraceError
from tracekit.trace.op import OpTrace


def job(*, groups: tuple[tracekit.ProcessGroup, ...] = (), axes: tuple[str, ...] = (), **columns: Any) -> tracekit.Job:
    length = max(len(values) for values in columns.values() if isinstance(values, list))
    full = {"start": 0.0, "kind": "x", **columns}
    ops = pl.DataFrame(
        {name: values if isinstance(values, list) else [values] * length for name, values in full.items()}
    )
    return tracekit.job_of(OpTrace(ops, "job", axes=axes, groups=groups))


def fixed_s(of: tracekit.Job, selection: str) -> float:
    (question,) = of.whatif(fix=[selection]).questions
    return question.step_time_s


def test_an_op_without_peers_is_its_own_ideal_in_each_step() -> None:
    report = job(step=[0, 1], rank=0, duration=[1.0, 3.0], comparable=False).whatif()
    assert (report.slowdown, report.step_time_s.ideal) == (1.0, 2.0)


def test_workers_are_chosen_by_both_labels() -> None:
    """At the pace of its peers, the third op takes 1 s instead of 11."""
    of = job(rank=[0, 1, 2, 3], duration=[1.0, 1.0, 11.0, 1.0], dp_rank=[0, 0, 1, 1], stage=[0, 1, 0, 1])
    assert fixed_s(of, "worker=1,0") == fixed_s(of, "dp_rank=1 and stage=0") == 1.0
    assert fixed_s(of, "worker=0,0") == fixed_s(of, "dp_rank=0 and stage=0") == 11.0


def test_the_slowest_of_each_kind_are_found_where_kinds_change_from_step_to_step() -> None:
    """f takes 1 and 2 s, g 5 and 9; of each the longer one, in step 1, takes as long as its rank in step 0: 1 and 5 s.

    The longer f alone takes as long as the other rank in that step, 9 s.
    """
    of = job(step=[0, 0, 1, 1], rank=[0, 1, 0, 1], peer="p", kind=["f", "g", "g", "f"], duration=[1.0, 5.0, 9.0, 2.0])
    assert fixed_s(of, "slowest=50%") == pytest.approx((5.0 + 5.0) / 2)
    assert fixed_s(of, "slowest=50% and kind=f") == pytest.approx((5.0 + 9.0) / 2)


@pytest.mark.parametrize("seed", range(6))
def test_answers_do_not_depend_on_folding(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random kinds, labels, durations and ops without peers, in steps of one structure."""
    rng = np.random.default_rng(seed)
    steps, ranks = 4, 3
    count = steps * ranks * 2
    columns = {
        "step": np.repeat(np.arange(steps), 2 * ranks).tolist(),
        "rank": np.tile(np.repeat(np.arange(ranks), 2), steps).tolist(),
        "waits_for": [[] if at % 2 == 0 else [at - 1] for at in range(count)],
        "kind": rng.choice(["f", "g"], count).tolist(),
        "peer": "p",
        "dp_rank": rng.integers(0, 2, count).tolist(),
        "stage": rng.integers(0, 2, count).tolist(),
        "duration": rng.exponential(size=count).tolist(),
        "comparable": (rng.random(count) < 0.8).tolist(),
    }
    asked = ["slowest=25%", "slowest=50% and kind=f", "worker=0,0 or worker=1,1", "dp_rank=1"]
    folded = job(**columns)
    assert len(folded.graph.blocks) == 1
    answers = [folded.whatif().slowdown, *(fixed_s(folded, text) for text in asked)]
    numbers = iter(range(count))
    monkeypatch.setattr(op_graph._Step, "signature", lambda *_: next(numbers).to_bytes(8, "little"))
    alone = job(**columns)
    assert len(alone.graph.blocks) == steps
    assert answers == pytest.approx([alone.whatif().slowdown, *(fixed_s(alone, text) for text in asked)], rel=1e-12)


@pytest.mark.parametrize("number", [7, -7, 2**63 + 5])
def test_any_integer_names_a_rendezvous(number: int) -> None:
    """Hashes are signed or take all 64 bits. The two wait for each other, so the first works for 1 s of its 6."""
    of = job(rank=[0, 1], start=[0.0, 5.0], duration=[6.0, 1.0], rendezvous=[number, number])
    assert of.whatif().slowdown == 1.0


DP = tracekit.ProcessGroup("dp", (0, 1))


@pytest.mark.parametrize(
    ("columns", "groups", "said"),
    [
        (
            {"rendezvous": [1.0, float("nan"), None]},
            (),
            "column 'rendezvous', row 1: nan; expected integers or strings",
        ),
        ({"rendezvous": [1, 1, None], "group": ["a", "b", "a"]}, ("a", "b"), "but are of two groups"),
        ({"rendezvous": [1, 1, None], "group": "a"}, ((0, 1, 1),), "expected each once, from 0 on"),
        ({"rendezvous": [1, 1, None], "group": "a"}, ((0, -1),), "expected each once, from 0 on"),
        ({"rendezvous": [1, 1, None], "group": "a"}, ((0, 10**30),), "expected each once, from 0 on"),
        ({"waits_for": [[], [99], []]}, (), "column 'waits_for', row 1: 99; the ops have rows 0 to 2"),
        ({"waits_for": [[], [0], [1]], "why": [[], None, ["rule"]]}, (), "row 1: 0 words for 1 ops in 'waits_for'"),
        (
            {"start": -100.0},
            (),
            "its steps end before they begin (at -99 s); 'start' counts from the start of the step",
        ),
        ({"waits_for": [[], [1], []]}, (), "cycle: x of rank 1 at 0 s of step 0 waits for itself"),
    ],
)
def test_what_cannot_be_is_one_clear_error(columns: dict[str, Any], groups: tuple[Any, ...], said: str) -> None:
    made = tuple(tracekit.ProcessGroup(*((one, (0, 1)) if isinstance(one, str) else ("a", one))) for one in groups)
    with pytest.raises((TraceError, GraphError), match=re.escape(said)):
        job(rank=[0, 1, 2], duration=1.0, groups=made, **columns).whatif()


@pytest.mark.parametrize(("rule", "lacks"), [("streams", "start"), ("kineto", "name"), ("explicit", "duration")])
def test_a_column_that_a_rule_needs_is_named(rule: str, lacks: str) -> None:
    columns = {"rank": [0], "name": ["x"], "kind": ["x"], "stream": [1], "start": [0.0], "duration": [1.0]}
    ops = pl.DataFrame(columns).drop(lacks)
    with pytest.raises(TraceError, match=f"column '{lacks}' is missing"):
        tracekit.job_of(OpTrace(ops, "job", rules=(rule,))).whatif()


def test_a_cycle_is_named_without_what_waits_for_it() -> None:
    of = {"kind": ["downstream", "A", "B", "y", "z"], "waits_for": [[1], [2], [1], [], [3]]}
    with pytest.raises(GraphError, match="cycle: A of rank 0 at 0 s of step 0 and 1 more op wait for each other"):
        job(rank=0, duration=[1.0] * 5, **of).whatif()


@pytest.mark.parametrize("name", ["tpRank", "my-label", "my.label", "_x", "größe"])
def test_a_label_of_any_name_is_selected_and_capitals_do_not_matter_otherwise(name: str) -> None:
    of = job(rank=[0, 1, 2], duration=[1.0, 1.0, 4.0], **{name: [0, 0, 1]})
    assert fixed_s(of, f"{name}=1") == fixed_s(of, "RANK=2") == fixed_s(of, "rank=2") == 1.0


def test_labels_with_large_numbers_are_combined() -> None:
    large = [5, 5, 2**31 - 1, 0]
    of = job(rank=[0, 1, 2, 3], duration=[1.0, 1.0, 11.0, 1.0], a=[0, 4, 0, 0], b=large, c=large)
    found = {share.values for share in of.attribute_by("a", "b", "c").shares}
    assert found == {(0, 5, 5), (4, 5, 5), (0, 2**31 - 1, 2**31 - 1), (0, 0, 0)}
