"""The scanner of events says what a JSON parser says, wherever it does not leave an event to one."""

import json
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from tracekit.collectors.importers.kineto._events import scan_events
from tracekit.collectors.importers.kineto.json_events import Column

CATEGORIES = ("kernel", "cpu_op", "cuda_runtime")
AT_END, DAMAGED, INCOMPLETE = 1, 2, 0

texts = st.text(st.characters(codec="utf-8"), max_size=20)
numbers = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
times = st.floats(0, 1e16) | st.integers(0, 2**53) | st.decimals(0, 10**13, places=3).map(float)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
args = st.fixed_dictionaries(
    {},
    optional={"correlation": numbers, "device": values, "stream": st.integers(0, 2**40), "grid": values, "x": values},
)
events = st.fixed_dictionaries(
    {"ph": st.sampled_from(["X", "X", "X", "s"]), "cat": st.sampled_from([*CATEGORIES, "Kernel", "ac2g"]),
     "name": texts, "ts": times, "dur": times},
    optional={"pid": st.integers(-5, 2**50) | texts, "tid": st.integers(0, 2**50), "args": args, "more": values},
)  # fmt: skip


def scan(text, most=100):
    """The rows, as {column: value}, with times; where scanning stopped, and why."""
    rows, times = np.empty((len(Column), most), np.int64), np.empty((2, most))
    wanted = "".join(f"{name}\n" for name in CATEGORIES).encode()
    count, stopped, why = scan_events(text, 0, wanted, rows, times)
    found = [({column: int(rows[column, at]) for column in Column}, *times[:, at].tolist()) for at in range(count)]
    return found, stopped, why


@examples(60)
@given(st.lists(events, max_size=5), st.sampled_from([None, 1]))
def test_rows_hold_what_the_json_says(stated, indent):
    text = (json.dumps(stated, indent=indent)[1:]).encode()
    found, stopped, why = scan(text)
    assert (stopped, why) == (len(text), AT_END)
    wanted = [one for one in stated if one["ph"] == "X" and one["cat"].lower() in CATEGORIES]
    assert len(found) == len(wanted)
    for (row, start, duration), event in zip(found, wanted, strict=True):
        assert json.loads(text[row[Column.BEGIN] : row[Column.END]]) == event
        assert CATEGORIES[row[Column.CATEGORY]] == event["cat"].lower()
        if row[Column.ODD]:
            continue
        assert (start, duration) == (float(event["ts"]), float(event["dur"]))
        assert text[row[Column.NAME_BEGIN] : row[Column.NAME_END]].decode() == event["name"]
        said = event.get("args", {})
        assert row[Column.PID] == event.get("pid", -1)
        assert [row[Column.CORRELATION], row[Column.STREAM]] == [said.get("correlation", -1), said.get("stream", -1)]
        if "grid" in said:
            assert json.loads(text[row[Column.FIRST_BEGIN] : row[Column.FIRST_END]]) == said["grid"]


@examples(40)
@given(st.lists(events, min_size=1, max_size=3), st.data())
def test_a_text_that_ends_early_is_incomplete_from_its_last_event_on(stated, data):
    text = (json.dumps(stated)[1:]).encode()
    end = data.draw(st.integers(0, len(text) - 1))
    found, stopped, why = scan(text[:end])
    assert why == INCOMPLETE
    whole, _, _ = scan(text)
    assert found == whole[: len(found)]
    again, _, _ = scan(text[stopped:])
    assert len(found) + len(again) == len(whole)


@examples(60)
@given(
    st.binary(max_size=200) | st.lists(events, max_size=2).map(lambda some: json.dumps(some)[1:].encode()), st.data()
)
def test_no_bytes_make_it_read_outside_the_text(text, data):
    if text:
        at = data.draw(st.integers(0, len(text) - 1))
        text = text[:at] + data.draw(st.binary(max_size=2)) + text[at + 1 :]
    found, stopped, why = scan(text)
    assert 0 <= stopped <= len(text)
    assert why in {INCOMPLETE, AT_END, DAMAGED}
    for row, start, _ in found:
        assert 0 <= row[Column.BEGIN] < row[Column.END] <= stopped
        assert math.isfinite(start) or math.isnan(start) or math.isinf(start)


def test_equal_names_have_equal_numbers_and_others_other_ones():
    """Names that differ in one letter, in length, and by what stands behind them in the text."""
    names = ["aten::add", "aten::add_", "aten::adm", "a" * 64, "a" * 65, "aten::add", ""]
    text = json.dumps([{"ph": "X", "cat": "cpu_op", "name": name, "ts": 1} for name in names])[1:].encode()
    numbers = [row[Column.NAME] for row, *_ in scan(text)[0]]
    assert len(set(numbers)) == len(set(names))
    assert numbers[0] == numbers[5]
