"""The rules that `make check` adds to ruff's notice what they are for."""

from __future__ import annotations

import ast

import pytest

from tests.check_names import bound_names, breaches


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("found = 1", ["found"]),
        ("def found(): ...", ["found"]),
        ("class A:\n    def _kept(self): ...", ["_kept"]),
        ("self._left -= 1", ["_left"]),
        ("self.left_s, self.one = 1, 2", ["one"]),
        ("def f(at, *, known=1): ...", ["at", "known"]),
        ("print(self.found, other.kept())", []),
        ("[one for one in jobs]", []),
    ],
)
def test_a_vague_name_is_a_breach_wherever_it_is_bound(source: str, names: list[str]) -> None:
    vague = [text.split("`")[1] for _, text in breaches(source, ast.parse(source))]
    assert vague == names


def test_every_kind_of_binding_is_looked_at() -> None:
    source = "class A:\n    def b(self, c):\n        d = self.e = 1\n        return [f for f in d]"
    assert [name for name, _ in bound_names(ast.parse(source))] == ["A", "b", "self", "c", "d", "e"]
