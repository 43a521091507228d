"""docs/detectors.md: its example is that of the code, and what it says a detector may read is there."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import get_type_hints

from tracekit.analysis.detectors.detector import Detector

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "detectors.md").read_text()


def test_the_example_is_a_detector_of_tracekit_and_what_it_imports_is_there() -> None:
    example, imports = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    path, _, code = example.partition("\n")
    assert code in (ROOT / path.removeprefix("# ")).read_text()
    for line in ast.parse(imports).body:
        assert isinstance(line, ast.ImportFrom)
        assert [each.name for each in line.names if not hasattr(import_module(str(line.module)), each.name)] == []


def test_it_explains_every_attribute_of_a_detector() -> None:
    assert [name for name in get_type_hints(Detector) if not re.search(rf"`{name}[`(: ]", PAGE)] == []


def test_evidence_that_it_lists_is_there() -> None:
    """An empty first cell of a row is as the one above."""
    rows, place = re.findall(r"^\| (?:`([\w.]+)`)? ?\| (`.*?) \|", PAGE, re.MULTILINE), ""
    assert len(rows) >= 20
    for first, names in rows:
        place = first or place
        module, _, member = place.partition(".")
        holder: object = import_module(f"tracekit.analysis.evidence.{module}")
        holder = getattr(holder, member) if member else holder
        assert [name for name in re.findall(r"`(\w+)`", names) if not hasattr(holder, name)] == [], place


def test_what_it_says_is_of_a_module_is_there() -> None:
    named = re.findall(r"`([A-Za-z_.]+)(?:\([^`]*\))?` of `(tracekit[\w.]+)`", PAGE)
    assert len(named) >= 3
    for name, module in named:
        assert attrgetter(name)(import_module(module)), (name, module)


def test_files_that_it_names_are_there() -> None:
    paths = set(re.findall(r"\b(?:analysis|tests|judges)/[\w/]+\.py\b", PAGE)) - {"tests/analysis/causes/test_YOURS.py"}
    assert len(paths) >= 4
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_a_newcomer_reads_it_in_one_sitting() -> None:
    assert PAGE.count("\n") <= 200
