"""Selections as text: the grammar, its precedence, and masks equal to filters over the rows of the trace."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.handmade import slow_trace
from tests.properties import examples
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.whatif.selection import Context, Selection, all_of, count_selected, steps
from tracekit.analysis.whatif.selection import microbatch as selection_of_microbatches
from tracekit.analysis.whatif.selection_text import checked_selection, parse_selection
from tracekit.base.errors import SelectionError
from tracekit.trace.model import COMMUNICATION, KINDS

#: Steps 4, 5 and 9 of the slow job; 144 ops.
TRACE = replace(slow_trace((4, 5, 9)), metadata={"hosts": {"0": "n0", "1": "n1", "2": "n0", "3": "n1"}})
REPLAY = JobReplay.from_trace(TRACE)
OPS = TRACE.ops.with_columns(pl.col("kind").cast(pl.String))

kind, step, stage, dp_rank, microbatch = (pl.col(name) for name in ("kind", "step", "pp_rank", "dp_rank", "microbatch"))
communication = kind.is_in([str(one) for one in COMMUNICATION])
everything = pl.lit(value=True)
worker = (dp_rank == 1) & (stage == 0)

#: What a person types, and the rows that are meant.
GRAMMAR = {
    "all": everything,
    "everything": everything,
    "communication": communication,
    "compute": ~communication,
    "kind=optimizer": kind == "optimizer",
    "kind=optimizer,forward-compute": kind.is_in(["optimizer", "forward-compute"]),
    "kind=forward-pp-comm": kind.is_in(["forward-send", "forward-recv"]),
    "stage=1": stage == 1,
    "stage 1": stage == 1,
    "pp_rank = 1": stage == 1,
    "stage=0-1": everything,
    "dp=1": dp_rank == 1,
    "dp_rank=0,1": everything,
    "worker=1,0": worker,
    "step=4": step == 4,
    "steps=5-9": step.is_between(5, 9),
    "step=4,6-9": step.is_in([4, 9]),
    "microbatch=1": (microbatch == 1).fill_null(value=False),
    "rank=1-2": pl.col("rank").is_in([1, 2]),
    "host=n1": pl.col("rank").is_in([1, 3]),
    "host=~^n": everything,
    "kind=~-send": kind.is_in(["forward-send", "backward-send"]),
    "chunk=0": (pl.col("chunk") == 0).fill_null(value=False),
    "not all": ~everything,
    "not not stage=1": stage == 1,
    "STAGE=1 AND Step=4": (stage == 1) & (step == 4),
    "everything but communication": ~communication,
    "all but (stage=0 or step=9)": ~((stage == 0) | (step == 9)),
    # "and" binds tighter than "or", "not" tighter than "and", "but" is "and not" of the next term alone
    "stage=1 or step=4 and dp=1": (stage == 1) | ((step == 4) & (dp_rank == 1)),
    "(stage=1 or step=4) and dp=1": ((stage == 1) | (step == 4)) & (dp_rank == 1),
    "not stage=1 and step=4": (stage != 1) & (step == 4),
    "not (stage=1 and step=4)": ~((stage == 1) & (step == 4)),
    "all but stage=1 or step=4": (stage != 1) | (step == 4),
    "all but stage=1 and step=4": (stage != 1) & (step == 4),
    "worker=1,0 and kind=backward-compute but step=5": worker & (kind == "backward-compute") & (step != 5),
    "slowest=100%": everything,
}


def selected(selection: Selection) -> set[tuple[object, ...]]:
    """(step, dp_rank, pp_rank, kind, seq) of every op in the selection, by its mask."""
    rows = set()
    for number, block in enumerate(REPLAY.graph.blocks):
        mask = selection.mask(Context(REPLAY.graph, REPLAY.durations, number))
        template = block.template
        for row in range(template.rows):
            for lane in range(block.lanes):
                if mask[row if mask.shape[0] > 1 else 0, lane if mask.shape[1] > 1 else 0]:
                    at = int(REPLAY.graph.steps[block.step[lane]]), int(block.dp_rank[lane])
                    kind_name = str(KINDS[template.kind[row]])
                    rows.add((*at, int(template.pp_rank[row]), kind_name, int(template.seq[row])))
    return rows


def filtered(condition: pl.Expr) -> set[tuple[object, ...]]:
    return set(OPS.filter(condition).select("step", "dp_rank", "pp_rank", "kind", "seq").iter_rows())


@pytest.mark.parametrize("text", GRAMMAR)
def test_a_text_selects_the_rows_it_says(text: str) -> None:
    selection = parse_selection(text)
    assert selected(selection) == filtered(GRAMMAR[text])
    assert count_selected(selection, REPLAY.graph, REPLAY.durations) == len(filtered(GRAMMAR[text]))


def test_a_selection_of_the_library_is_that_of_its_text() -> None:
    for selection, text in (
        (steps(5), "step=5"),
        (steps(4, 8), "steps=4-8"),
        (selection_of_microbatches(1), "microbatch=1"),
        (selection_of_microbatches(0, 1), "microbatch=0,1"),
    ):
        assert selected(selection) == selected(parse_selection(text)) != set()
    assert selected(steps(9, 4)) == set()


def test_slowest_takes_the_share_of_each_kind_that_costs_most() -> None:
    """Per step four backward-computes cost 4 s twice and 2 s six times, so the slowest 20 % are those of worker (1,0).

    A kind whose ops all cost the same is selected whole, as none of them is slower than another.
    """
    chosen = selected(parse_selection("slowest=20% and kind=backward-compute"))
    assert chosen == filtered(worker & (kind == "backward-compute"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it is empty"),
        ("  ", "it is empty"),
        ("=", "it is empty"),
        ("()", "a selection is missing"),
        ("(stage=1", "a ')' is missing"),
        ("stage=1)", "')' is unexpected"),
        ("stage=1 step=2", "'step' is unexpected"),
        ("stage=1 and", "a selection is missing"),
        ("stage=", "a value for 'stage' is missing"),
        ("stage and step=1", "a value for 'stage' is missing"),
        ("everything but", "a selection is missing"),
        ("../etc=3", "'../etc' is unknown"),
        ("host=~[", "'[' is not a regular expression"),
        ("host=~(?=x", "'(?=x' is not a regular expression"),
        ("host=~x)", "')' is unexpected"),
        ("kind=~a{1000}{1000}", "'a{1000}{1000}' is not a regular expression: Compiled regex exceeds size limit"),
        ("kind=~" + ".*" * 101, "has 202 characters, more than 200"),
        ("rank=~[a&&b", "is not a regular expression: unclosed character class"),
        ("stage=a", "'a' is neither a number nor a range"),
        ("stage=-1", "'-1' is neither a number nor a range"),
        ("step=9-4", "'9-4' is not a range from a smaller to a larger number"),
        ("step=0-99999999999", "has more than 1000000 numbers"),
        ("worker=5", "'5' is not DP_RANK,PP_RANK such as 5,2"),
        ("slowest=x", "'x' is not a percentage"),
        ("rank=٣", "'٣' is no number in the digits 0 to 9"),
        ("stage=٣", "'٣' is neither a number nor a range"),
        ("worker=5,٢", "'5,٢' is not DP_RANK,PP_RANK"),
        ("(" * 100_000, "it has 100000 words, more than 200"),
        ("not " * 100_000, "it has 100000 words, more than 200"),
        ("step=" + "9" * 5000, "is neither a number nor a range"),
    ],
)
def test_what_cannot_be_understood_is_quoted(text: str, reason: str) -> None:
    with pytest.raises(SelectionError) as caught:
        parse_selection(text)
    message = str(caught.value)
    assert reason in message
    assert "expected for example `worker=5,2 and step=100-200`" in message
    assert len(message) < 700


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("rank=~^(1|3)$", r"^(1|3)$"),
        ("(rank=~^(1|3)$)", r"^(1|3)$"),
        ("(rank=~[(]|\\)|1 or rank=~3)", r"[(]|\)|1"),
        ("rank=~((1)|a=b)", r"((1)|a=b)"),
    ],
)
def test_a_pattern_has_the_parentheses_that_it_opens(text: str, pattern: str) -> None:
    selection = parse_selection(text)
    assert f"pattern={pattern!r}" in repr(selection)


@pytest.mark.parametrize("percent", ["0", "-1", "101", "nan", "inf"])
def test_slowest_takes_a_share_above_0_and_up_to_100(percent: str) -> None:
    with pytest.raises(SelectionError, match="expected more than 0 and at most 100"):
        parse_selection(f"slowest={percent}%")


@pytest.mark.parametrize(
    "text",
    ["worker=0,2", "worker=1,2", "stage=2", "dp=9", "step=6-8", "microbatch=2", "kind=gc", "not all"]
    + [f"{word}=99999999999999999999" for word in ("stage", "dp", "step", "microbatch")]
    + ["worker=99999999999999999999,0", "worker=0,99999999999999999999"],
)
def test_a_selection_without_ops_says_what_there_is(text: str) -> None:
    """Above all, a stage beyond the last one is not counted on into the next DP rank."""
    with pytest.raises(SelectionError) as caught:
        checked_selection(text, REPLAY.graph, REPLAY.durations)
    values = {"stage": "0-1", "chunk": "0", "dp_rank": "0-1", "step": "4-5, 9", "microbatch": "0-1", "rank": "0-3"}
    label = text.partition("=")[0]
    if label == "kind":
        assert "matches no op; the job has kind backward-compute, " in str(caught.value)
    elif label in values:
        assert str(caught.value).endswith(f"matches no op; the job has {label} {values[label]}")
    else:
        listed = "; ".join(f"{name} {shown}" for name, shown in values.items())
        assert str(caught.value).endswith(f"; {listed}; host n0, n1")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "wrker=3",
            "'wrker' is not a label of this job; it has kind, stage, chunk, dp_rank, step, microbatch, rank, host",
        ),
        ("kind=fwd", "'fwd' is not a kind of this job; it has backward-compute, backward-recv"),
        ("host=n0,n7", "'n7' is not a host of this job; it has n0, n1"),
        ("rank=first", "'first' is not a rank of this job; it has 0-3"),
        ("rank=~1", "rank has numbers, not names"),
    ],
)
def test_a_label_or_value_that_no_op_has_is_an_error_that_lists_those_there_are(text: str, reason: str) -> None:
    with pytest.raises(SelectionError) as caught:
        checked_selection(text, REPLAY.graph, REPLAY.durations)
    assert str(caught.value).startswith(f"selection {text!r}: {reason}")


def test_a_list_of_thousands_of_steps_is_a_selection() -> None:
    text = "step=" + ",".join(map(str, range(5000)))
    assert selected(parse_selection(text)) == filtered(everything)


def test_ranges_of_numbers_cost_what_their_text_costs() -> None:
    """66 million numbers, written out, would take gigabytes."""
    text = " or ".join(["step=0-1000000", "stage=0-1000000", "rank=0-1000000"] * 22)
    assert selected(parse_selection(text)) == filtered(everything)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=6))
def test_numbers_in_any_ranges_are_selected(ranges: list[tuple[int, int]]) -> None:
    text = ",".join(f"{first}-{first + more}" for first, more in ranges)
    numbers = [number for first, more in ranges for number in range(first, first + more + 1)]
    for label, column in (("step", step), ("rank", pl.col("rank"))):
        assert selected(parse_selection(f"{label}={text}")) == filtered(column.is_in(numbers))


def test_no_selection_at_all_is_an_error() -> None:
    with pytest.raises(SelectionError, match="no selection given"):
        all_of([])


WORDS = st.sampled_from(
    [
        *("and", "or", "but", "not", "(", ")", "=", ",", "all", "compute", "stage=1", "step=4-9", "worker=1,0"),
        *("kind=gc", "slowest=3%", "microbatch", "5-2", "kind=", "\x00"),
        *("\u0661", "\u00b2", "9" * 30),  # digits of other scripts, a number beyond every integer
    ]
)


@examples(100)
@given(st.lists(WORDS, max_size=30).map(" ".join) | st.text(max_size=60))
def test_any_text_parses_or_raises_a_selection_error(text: str) -> None:
    try:
        selection = parse_selection(text)
    except SelectionError:
        return
    with suppress(SelectionError):  # a label or value that this job has not
        assert 0 <= count_selected(selection, REPLAY.graph, REPLAY.durations) <= OPS.height


TERMS = {text: condition for text, condition in GRAMMAR.items() if " " not in text and text != "slowest=100%"}
Meant = tuple[str, pl.Expr]


def combined(children: st.SearchStrategy[Meant]) -> st.SearchStrategy[Meant]:
    """Larger selections, bracketed, with the filter they mean."""
    joins: dict[str, Callable[[pl.Expr, pl.Expr], pl.Expr]] = {
        "and": lambda left, right: left & right,
        "or": lambda left, right: left | right,
        "but": lambda left, right: left & ~right,
    }
    return st.tuples(children, st.sampled_from(sorted(joins)), children).map(
        lambda drawn: (
            f"({drawn[0][0]}) {drawn[1]} ({drawn[2][0]})",
            joins[drawn[1]](drawn[0][1], drawn[2][1]),
        )
    ) | children.map(lambda child: (f"not ({child[0]})", ~child[1]))


@examples(30)
@given(st.recursive(st.sampled_from(sorted(TERMS)).map(lambda text: (text, TERMS[text])), combined, max_leaves=6))
def test_nested_selections_equal_their_filter(meant: Meant) -> None:
    text, condition = meant
    assert selected(parse_selection(text)) == filtered(condition)
