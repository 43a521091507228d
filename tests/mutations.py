"""Break the code at random and see whether the tests notice: python -m tests.mutations [COUNT [SEED [PYTEST OPTIONS]]]

Each mutation changes an operator, a constant or a condition of a shipped file, or removes a statement, in a copy of the
repository. Tests that import the file run first, then those of its folder, then all that the options select (by default
those of `make test`).
"""

from __future__ import annotations

import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("tracekit", "collectors", "analysis", "dashboards")
OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
#: Tests that take longer hang.
HANGS_S = 1800
EVERY_PUSH = ("-m", "not slow and not fleet and not nightly")


def mutants(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Nodes of functions, and the code to put in the place of each."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for statement in function.body:
                for node in ast.walk(statement):
                    if (text := mutant(node)) is not None:
                        assert isinstance(node, ast.expr | ast.stmt)
                        yield node, text


def mutant(node: ast.AST) -> str | None:
    """A wrong version of the code of a node, if there is one."""
    match node:
        case ast.Compare(left, [operator], [right]) if type(operator) in OPERATORS:
            return ast.unparse(ast.Compare(left, [_other(operator)], [right]))  # type: ignore[list-item]
        case ast.BinOp(left, operator, right) if type(operator) in OPERATORS:
            return f"({ast.unparse(ast.BinOp(left, _other(operator), right))})"  # type: ignore[arg-type]
        case ast.BoolOp(operator, values):
            return f"({ast.unparse(ast.BoolOp(_other(operator), values))})"  # type: ignore[arg-type]
        case ast.UnaryOp(ast.Not(), operand):
            return f"bool({ast.unparse(operand)})"
        case ast.Constant(bool(value)):
            return repr(not value)
        case ast.Constant(int(value) | float(value)):
            return repr(value + 1)
        case ast.Expr(ast.Call()) | ast.AugAssign():
            return "pass"
        case _:
            return None


def _other(operator: ast.AST) -> ast.AST:
    return OPERATORS[type(operator)]()


def replaced(source: str, node: ast.expr | ast.stmt, text: str) -> str:
    """The source with other code in the place of a node."""
    lines = source.encode().splitlines(keepends=True)
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    before = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    after = lines[node.end_lineno - 1][node.end_col_offset :] + b"".join(lines[node.end_lineno :])
    return (before + text.encode() + after).decode()


def draw(count: int, seed: int) -> list[tuple[Path, int, str]]:
    """So many mutations: file, line and the file's text afterwards; files with more code are drawn more often."""
    chosen = random.Random(seed)
    files = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if not path.is_symlink())
    drawn: list[tuple[Path, int, str]] = []
    for path in chosen.choices(files, weights=[path.stat().st_size for path in files], k=4 * count):
        source = path.read_text()
        if candidates := [*mutants(ast.parse(source))]:
            node, text = chosen.choice(candidates)
            drawn.append((path.relative_to(ROOT), node.lineno, replaced(source, node, text)))
    return drawn[:count]


def noticed(copy: Path, path: Path, options: list[str]) -> bool:
    """Whether tests fail in a copy with a mutated file: those that import it, those of its folder, all."""
    parts = path.with_suffix("").parts
    module = ".".join(parts if parts[0] == "tracekit" else ("tracekit", *parts))
    tests = sorted((copy / "tests").rglob("test_*.py"))
    importing = [str(test) for test in tests if module in test.read_text()]
    near = copy / Path("tests", *(part for part in path.parent.parts if part not in ("tracekit", "browser")))
    while not near.is_dir():
        near = near.parent
    in_folder = [str(near)] if near != copy / "tests" else []
    runs = [["-n", "0", *importing]] * bool(importing) + [["-n", "0", *in_folder]] * bool(in_folder) + [["-n", "3"]]
    return any(_fails(copy, [*options, *run]) for run in runs)


def _fails(copy: Path, options: list[str]) -> bool:
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", *options]
    try:
        ran = subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=HANGS_S)
    except subprocess.TimeoutExpired:
        return True
    return ran.returncode not in (0, 5)


def main(count: int = 39, seed: int = 0, *options: str) -> None:
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tracekit"
        shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv", "build", ".*_cache"))
        for path, line, text in draw(count, seed):
            original = (copy / path).read_text()
            (copy / path).write_text(text)
            seen = noticed(copy, path, list(options or EVERY_PUSH))
            (copy / path).write_text(original)
            missed += not seen
            changed = text.splitlines()[line - 1].strip()
            print(f"{'noticed' if seen else 'MISSED '} {path}:{line}  {changed}", flush=True)
    print(f"{missed} of {count} mutations missed")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]), *sys.argv[3:])
