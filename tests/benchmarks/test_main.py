"""`python -m benchmarks`: sections of RESULTS.md, and the quick mode of each."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from benchmarks.__main__ import SECTIONS, updated

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULTS = (
    "# Results\n\n<!-- section removed -->\nKept.\n\n<!-- section core -->\nOld.\n\n<!-- section store -->\nStore.\n"
)


def test_a_section_is_replaced_where_it_stands_and_all_others_stay() -> None:
    """Also figures of benchmarks that no longer exist."""
    assert updated(RESULTS, "core", "New.") == RESULTS.replace("Old.", "New.")
    assert updated(RESULTS, "store", "New.\n") == RESULTS.replace("Store.", "New.")
    assert updated(RESULTS, "hang", "New.") == RESULTS + "\n<!-- section hang -->\nNew.\n"


def test_every_benchmark_has_a_section_and_a_quick_mode() -> None:
    for name in SECTIONS:
        path = BENCHMARKS / f"{name}.py"
        body = ast.parse(path.read_text()).body
        functions = {node.name for node in body if isinstance(node, ast.FunctionDef)}
        constants = {target.id: node for node in body for target in _targets(node) if isinstance(target, ast.Name)}
        assert "section" in functions, name
        imported = {alias.name for node in body if isinstance(node, ast.ImportFrom) for alias in node.names}
        quick = constants["QUICK"]
        assert isinstance(quick, ast.Assign), name
        assert isinstance(quick.value, ast.Dict), name
        keys = {key.value for key in quick.value.keys if isinstance(key, ast.Constant)}
        assert keys <= constants.keys() | imported, name


def test_an_unknown_section_is_one_error_that_lists_the_sections() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "cor"], cwd=BENCHMARKS.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("unknown section 'cor'; sections are core, ")


def _targets(node: ast.stmt) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return [
            part for target in node.targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])
        ]
    return [node.target] if isinstance(node, ast.AnnAssign) else []
