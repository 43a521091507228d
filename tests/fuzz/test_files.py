"""Fuzzing files that tracekit wrote itself: a store and an exported timeline, damaged somewhere."""

from __future__ import annotations

import gzip
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tracekit
from tests.fuzz.doors import analyse, ends_well
from tests.handmade import slow_trace
from tests.properties import examples
from tracekit.job.load import load_from_store
from tracekit.job.pipeline import PipelineJob
from tracekit.store import Incoming, Store
from tracekit.store.care import damages, repair

DAMAGE = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "zero", "repeat", "insert"]),
        st.floats(0, 1, exclude_max=True),
        st.integers(1, 255),
    ),
    min_size=1,
    max_size=3,
)
ODD = st.sampled_from(
    [None, -1, 0, 1e308, 10**30, "x", [], {}, True, 0.5, "forward-send", 2**31, float("nan"), float("inf")]
)
#: Where in the JSON of a timeline something is put: the way there, each key taken modulo what there is.
EDITS = st.lists(
    st.tuples(st.lists(st.integers(0, 400), min_size=1, max_size=5), ODD | st.just("remove")), min_size=1, max_size=3
)
STRATEGIES: dict[str, tuple[st.SearchStrategy[Any], ...]] = {
    "test_a_damaged_store_ends_in_a_report_or_one_error": (DAMAGE, st.integers(0, 3)),
    "test_a_damaged_timeline_ends_in_a_report_or_one_error": (DAMAGE, st.booleans()),
    "test_an_edited_timeline_ends_in_a_report_or_one_error": (EDITS, st.booleans()),
}


def damaged(content: bytes, damage: list[tuple[str, float, int]]) -> bytes:
    """`content` with bytes changed at places given as shares of it."""
    changed = bytearray(content)
    for what, share, value in damage:
        at = int(share * len(changed))
        if what == "flip" and changed:
            changed[at] ^= value
        elif what == "cut":
            del changed[at:]
        elif what == "zero":
            changed[at : at + value] = bytes(len(changed[at : at + value]))
        elif what == "repeat":
            changed[at:at] = changed[at : at + value]
        elif what == "insert":
            changed[at:at] = bytes([value])
    return bytes(changed)


@cache
def whole_store(folder: Path) -> Path:
    path = folder / "whole.store"
    trace = slow_trace((0, 1))
    Store(path).add([Incoming(trace, "job", "a", PipelineJob(trace).stored())])
    return path


@cache
def timeline_bytes(folder: Path) -> bytes:
    path = folder / "whole.json.gz"
    PipelineJob(slow_trace((0,), metadata={"hosts": {"0": "a"}}, step_starts={0: 1.7e9})).export(path)
    return path.read_bytes()


@examples(5)
@given(*STRATEGIES["test_a_damaged_store_ends_in_a_report_or_one_error"])
def test_a_damaged_store_ends_in_a_report_or_one_error(
    tmp_path_factory: pytest.TempPathFactory, damage: list[tuple[str, float, int]], which: int
) -> None:
    """`which`: of the catalogue and the three files of the job."""
    folder = tmp_path_factory.getbasetemp()
    path = folder / "damaged.store"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(whole_store(folder), path)
    file = sorted([path / "catalog.duckdb", *path.glob("jobs/*/*")])[which]
    file.write_bytes(damaged(file.read_bytes(), damage))
    ends_well(lambda: Store(path).jobs())
    ends_well(lambda: analyse(load_from_store(store=path)))
    ends_well(lambda: (Store(path).report("job"), Store(path).workers("job")))
    ends_well(lambda: list(damages(Store(path))))
    ends_well(lambda: repair(Store(path)))


@examples(40)
@given(*STRATEGIES["test_a_damaged_timeline_ends_in_a_report_or_one_error"])
def test_a_damaged_timeline_ends_in_a_report_or_one_error(
    tmp_path_factory: pytest.TempPathFactory, damage: list[tuple[str, float, int]], packed: bool
) -> None:
    folder = tmp_path_factory.getbasetemp()
    path = folder / "damaged.json.gz"
    whole = timeline_bytes(folder)
    path.write_bytes(damaged(whole if packed else gzip.decompress(whole), damage))
    ends_well(lambda: analyse(tracekit.load(path, importer="tracekit-chrome")))


def _edit(content: Any, way: list[int], value: Any) -> None:
    """Put `value` at the end of the `way` through lists and objects, or take out what is there."""
    *before, last = way
    for number in before:
        inner = list(content.values()) if isinstance(content, dict) else content
        if not isinstance(inner, list) or not inner or not isinstance(inner[number % len(inner)], dict | list):
            break
        content = inner[number % len(inner)]
    if not content:
        return
    key = list(content)[last % len(content)] if isinstance(content, dict) else last % len(content)
    if value == "remove":
        del content[key]
    else:
        content[key] = value


@examples(15)
@given(*STRATEGIES["test_an_edited_timeline_ends_in_a_report_or_one_error"])
def test_an_edited_timeline_ends_in_a_report_or_one_error(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[list[int], Any]], by_line: bool
) -> None:
    folder = tmp_path_factory.getbasetemp()
    path = folder / "edited.json"
    content = json.loads(gzip.decompress(timeline_bytes(folder)))
    for way, value in edits:
        _edit(content, way, value)
    events = content.get("traceEvents")
    if by_line and isinstance(events, list):
        head = json.dumps({key: value for key, value in content.items() if key != "traceEvents"})
        lines = ",\n".join(json.dumps(event) for event in events)
        path.write_text(f'{head[:-1]}, "traceEvents": [\n{lines}\n]}}\n')
    else:
        path.write_text(json.dumps(content))
    ends_well(lambda: analyse(tracekit.load(path, importer="tracekit-chrome")))
