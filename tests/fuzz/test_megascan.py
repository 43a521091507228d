"""Fuzzing MegaScan's files: a record of a rank, or an event of the aggregated trace, edited or cut."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tracekit
from tests.collectors.importers.test_megascan import aggregated, folder
from tests.fuzz.doors import analyse, ends_well
from tests.fuzz.test_files import DAMAGE, damaged
from tests.properties import examples

ODD = st.sampled_from(
    [None, -1, 0, 1e308, 10**30, "x", [], {}, True, 0.5, "forward-send", 2**31, float("nan"), float("inf")]
)
#: Where in the JSON of a trace something is put: the way there, each key taken modulo what there is.
EDITS = st.lists(
    st.tuples(st.lists(st.integers(0, 400), min_size=1, max_size=5), ODD | st.just("remove")), min_size=1, max_size=3
)
STRATEGIES: dict[str, tuple[st.SearchStrategy[Any], ...]] = {
    "test_edited_records_end_in_a_report_or_one_error": (EDITS, st.booleans()),
    "test_damaged_files_end_in_a_report_or_one_error": (DAMAGE, st.booleans()),
}


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


@examples(25)
@given(*STRATEGIES["test_edited_records_end_in_a_report_or_one_error"])
def test_edited_records_end_in_a_report_or_one_error(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[list[int], Any]], raw: bool
) -> None:
    base = tmp_path_factory.getbasetemp()
    path = folder(base / "edited-run") if raw else aggregated(base / "edited.json.gz")
    file = path / "benchmark-data-0-pipeline-1-tensor-0.json" if raw else base / "edited.json"
    content = json.loads(file.read_text() if raw else gzip.decompress(path.read_bytes()))
    for way, value in edits:
        _edit(content, way, value)
    file.write_text(json.dumps(content))
    importer = "megascan" if raw else "megascan-chrome"
    ends_well(lambda: analyse(tracekit.load(path if raw else file, importer=importer)))


@examples(25)
@given(*STRATEGIES["test_damaged_files_end_in_a_report_or_one_error"])
def test_damaged_files_end_in_a_report_or_one_error(
    tmp_path_factory: pytest.TempPathFactory, damage: list[tuple[str, float, int]], raw: bool
) -> None:
    base = tmp_path_factory.getbasetemp()
    path = folder(base / "damaged-run") if raw else aggregated(base / "damaged.json.gz")
    file = path / "benchmark-data-0-pipeline-1-tensor-0.json" if raw else path
    file.write_bytes(damaged(file.read_bytes(), damage))
    ends_well(lambda: analyse(tracekit.load(path, importer="megascan" if raw else "megascan-chrome")))
