"""Dataclasses that are compiled where they are used behave as those of the standard library."""

from __future__ import annotations

import copy
from dataclasses import FrozenInstanceError, asdict, field, fields, replace
from functools import cached_property

import pytest

from tracekit.records import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    """A class with every kind of field."""

    x: int
    y: int = 2
    tags: list[str] = field(default_factory=list, compare=False)
    note: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Named(Point):
    """One that inherits, and checks."""

    name: str = "p"

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("no name")


@dataclass(frozen=True)
class Cached:
    """One with a dictionary."""

    x: int

    @cached_property
    def double(self) -> int:
        return 2 * self.x


def test_fields_defaults_and_factories() -> None:
    first, second = Point(1), Point(1, tags=["a"])
    assert (first.x, first.y, first.tags, first.note) == (1, 2, [], "")
    assert first.tags is not Point(1).tags
    assert {first, second} == {first}
    assert first not in (Point(1, 3), Named(1))
    assert [one.name for one in fields(Named)] == ["x", "y", "tags", "note", "name"]
    assert repr(Named(1, note="unsaid")) == "Named(x=1, y=2, tags=[], name='p')"


def test_replace_asdict_and_match() -> None:
    changed = replace(Named(1), name="q")
    assert asdict(changed) == {"x": 1, "y": 2, "tags": [], "note": "", "name": "q"}
    match changed:
        case Named(x, y, name=name):
            assert (x, y, name) == (1, 2, "q")
    with pytest.raises(ValueError, match="no name"):
        replace(changed, name="")


def test_nothing_changes_an_instance() -> None:
    point = Point(1)
    with pytest.raises(FrozenInstanceError, match="'x'"):
        point.x = 3  # type: ignore[misc]  # what is tested
    with pytest.raises(FrozenInstanceError, match="'x'"):
        del point.x
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        Point()  # type: ignore[call-arg]  # what is tested
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        Point(1, z=3)  # type: ignore[call-arg]  # what is tested


def test_copies_are_equal() -> None:
    named = Named(1, tags=["a"])
    for other in (copy.copy(named), copy.deepcopy(named)):
        assert asdict(other) == asdict(named)
    assert copy.deepcopy(Cached(2)).double == 4
    assert Cached(3).double == 6
