"""Messages quote values from outside in part, whatever their size."""

import json
import re
from dataclasses import astuple

import polars as pl
import pytest

import tracekit
from tests.cases import case
from tests.handmade import run, slow_frame, slow_trace, write_canonical
from tracekit.base.errors import FormatError, SelectionError, TraceError, bounded
from tracekit.base.text import quoted
from tracekit.trace.canonical import METADATA_KEY, Trace
from tracekit.trace.model import Layout

HUGE = "x" * 1_000_000


def test_a_message_keeps_where_it_is_and_what_to_do_and_cuts_the_value_in_between():
    message = str(FormatError(f"trace.parquet: column 'kind', row 0: {HUGE}; expected an op kind"))
    assert message.startswith("trace.parquet: column 'kind', row 0: xxx")
    assert message.endswith("xxx; expected an op kind")
    assert len(message) < 300


def test_values_with_spaces_are_cut_too():
    assert len(bounded("a b " * 1_000_000)) <= 1500


def test_a_quoted_value_is_one_line_of_200_characters_at_most():
    for value in (HUGE, HUGE.encode(), 10**10_000, [HUGE] * 1000, {"a": {"b": [[HUGE]]}}, "a\x1b\n" * 99):
        assert len(quoted(value)) <= 200
        assert quoted(value).isprintable()


def test_a_short_value_is_quoted_as_python_writes_it():
    assert [quoted(value) for value in ("a'b", 3, None, [1, 2.5])] == ['"a\'b"', "3", "None", "[1, 2.5]"]


def test_a_trace_of_absurd_values_is_refused_in_a_few_words():
    ops = slow_frame().cast({"kind": pl.String})
    for name, absurd in {
        "kind": ops.with_columns(kind=pl.lit(HUGE)),
        "category": ops.with_columns(kind=pl.lit(HUGE, pl.Categorical)),
        "column": ops.rename({"step": HUGE}),
        "type": ops.with_columns(duration=pl.struct(pl.lit(1).alias(f"f{at}") for at in range(3000))),
        "columns": ops.drop("step").with_columns(pl.lit(0).alias(f"c{at}") for at in range(3000)),
    }.items():
        with case(name):
            with pytest.raises(TraceError) as refused:
                Trace.from_frame(absurd, Layout(dp=2, pp=2), name="job")
            assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("absurd", ["kind", "schema_version"])
def test_a_file_of_a_few_kilobytes_prints_a_few_words(tmp_path, absurd):
    """A million characters, which compress to nothing, in the first op kind or in the header."""
    ops = slow_frame().cast({"kind": pl.String})
    path = write_canonical(tmp_path / "huge.parquet", ops)
    header = json.loads(pl.read_parquet_metadata(path)[METADATA_KEY])
    if absurd == "kind":
        ops = ops.with_columns(kind=pl.Series([HUGE, *ops["kind"][1:]]))
    else:
        header[absurd] = HUGE
    ops.write_parquet(path, metadata={METADATA_KEY: json.dumps(header)})
    code, _, err = astuple(run("store", "list", path))
    assert code == 2
    assert len(err) < 1000


@pytest.mark.slow
def test_more_columns_than_any_trace_has_are_not_read(tmp_path):
    """250,000 rows of 1,000 columns of one value: 2 GB in a few hundred kB."""
    ops = pl.select(pl.repeat(0, 250_000).alias("step"))
    path = write_canonical(tmp_path / "wide.parquet", ops.with_columns(pl.lit(0).alias(f"c{at}") for at in range(1000)))
    with pytest.raises(FormatError, match=r"250000 rows of 1001 columns in \d+ bytes"):
        tracekit.load(path)


def test_calls_from_python_take_paths_and_texts_and_say_what_is_neither(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    slow_trace((0, 1)).write_parquet("job.parquet")
    job = tracekit.load("job.parquet")
    cases = {
        "5 is no path": lambda: tracekit.load(5),
        "the path is empty": lambda: tracekit.load(""),
        "unknown method 'x'; expected one of tracekit, published": lambda: tracekit.load("job.parquet", method="x"),
        "unknown method []": lambda: tracekit.job_of(slow_trace(), method=[]),
        "selection None is no text": lambda: job.answer(None),
        "selection ['rank=1'] is no text": lambda: job.answer(["rank=1"], keep=True),
        "fix=None: expected a text or a list of texts": lambda: job.whatif(fix=None),
        "by=[['rank', 'kind']]: expected a text": lambda: job.whatif(by=[["rank", "kind"]]),
        "keep=[3]: expected a text": lambda: job.whatif(keep=[3]),
    }
    for words, call in cases.items():
        with case(words), pytest.raises(SelectionError, match=re.escape(words)):
            call()


def test_one_text_is_an_option_by_itself():
    job = tracekit.job_of(slow_trace((0, 1)))
    texts = job.whatif(fix="rank=1", keep="stage=0", by="rank").questions
    assert texts == job.whatif(fix=["rank=1"], keep=["stage=0"], by=["rank"]).questions
    assert len(texts) == 2
