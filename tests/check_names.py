"""Rules for names, sizes and the formatter that ruff does not have, checked on all shipped code by `make check`.

Reads the source files, prints a line for each breach, and exits with 1 if there is one.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("tracekit", "collectors", "analysis", "dashboards", "benchmarks")
#: Programs of their own, which name the same things as the analysis and import nothing of it.
JUDGES = "judges"
VAGUE = {"found", "one", "known", "some", "mine", "at", "left", "told", "made", "taken", "kept", "here", "there"}
#: Lines of a file: a longer one has more than one subject.
LONGEST = 600
REPEATED = {"__init__.py", "__main__.py"}
#: The callback of each framework, which users import under one name.
PUBLIC = {"StepTrace"}


def bound_names(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Each name bound outside the target of a comprehension, with its line: of variables, attributes, arguments,
    functions and classes.
    """
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id, node.lineno
    elif isinstance(node, ast.arg):
        yield node.arg, node.lineno
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name, node.lineno
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr, node.lineno
    children = [node.iter, *node.ifs] if isinstance(node, ast.comprehension) else ast.iter_child_nodes(node)
    for child in children:
        yield from bound_names(child)


def is_table(node: ast.AST) -> bool:
    """Whether `node` has several lines and several entries on one of them, or is a long row of entries."""
    if not isinstance(node, ast.Dict | ast.List | ast.Tuple | ast.Set | ast.Call):
        return False
    parts = [getattr(node, name, []) for name in ("elts", "values", "args", "keywords")]
    entries = [entry.value if isinstance(entry, ast.keyword) else entry for part in parts for entry in part]
    lines = {entry.lineno for entry in entries}
    if len(lines) == 1 and not isinstance(node, ast.Call):
        return len(entries) >= 6
    return 2 <= len(lines) < len(entries)


def breaches(source: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each breach that shows in one file."""
    for name, line in bound_names(tree):
        if name.strip("_") in VAGUE:
            yield line, f"`{name}` says nothing of what it holds"
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp) and sum(isinstance(inner, ast.IfExp) for inner in ast.walk(node)) > 1:
            yield node.lineno, "a conditional expression within another"
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    statements += [decorator for node in statements for decorator in getattr(node, "decorator_list", [])]
    for number, text in enumerate(source.split("\n"), 1):
        if text.rstrip().endswith("# fmt: skip"):
            around = [statement for statement in statements if statement.lineno <= number <= statement.end_lineno]
            innermost = min(around, key=lambda statement: statement.end_lineno - statement.lineno)
            if not any(map(is_table, ast.walk(innermost))):
                yield number, "`fmt: skip` on something that is no table"


def main() -> int:
    """Check all shipped files, the benchmarks and the judges."""
    report, classes, names = [], defaultdict(list), defaultdict(list)
    paths = [path for folder in FOLDERS for path in sorted(Path(folder).rglob("*.py"))]
    for path in [*paths, *sorted(Path(JUDGES).rglob("*.py"))]:  # `rglob` follows no links to folders in tracekit/
        source = path.read_text()
        tree = ast.parse(source)
        report += [f"{path}:{line}: {text}" for line, text in breaches(source, tree)]
        if (lines := source.count("\n")) > LONGEST:
            report.append(f"{path}: {lines} lines, more than {LONGEST}: it has more than one subject")
        if path.parts[0] == JUDGES:
            continue
        names[path.name].append(str(path))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(f"{path}:{node.lineno}")
    report += [
        f"{', '.join(where)}: class {name} twice"
        for name, where in classes.items()
        if len(where) > 1 and name not in PUBLIC
    ]
    report += [
        f"{', '.join(where)}: a file name thrice"
        for name, where in names.items()
        if len(where) > 2 and name not in REPEATED
    ]
    print(*report, sep="\n", end="\n" if report else "")
    return bool(report)


if __name__ == "__main__":
    sys.exit(main())
