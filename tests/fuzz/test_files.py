"""Fuzzing a store, damaged somewhere."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.doors import analyse, ends_well
from tests.handmade import findings_of, slow_trace
from tests.properties import examples
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.sources.load import load_from_store
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
STRATEGIES: dict[str, tuple[st.SearchStrategy[Any], ...]] = {
    "test_a_damaged_store_ends_in_a_report_or_one_error": (DAMAGE, st.integers(0, 3)),
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
    ends_well(lambda: repair(Store(path), findings_of))
