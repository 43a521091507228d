"""Patterns that people type: they match what Python's match, whatever they are they end, and others go on meanwhile."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import case
from tests.properties import examples
from tracekit.base import limits
from tracekit.base.errors import TimeLimitError
from tracekit.base.limits import check_pattern, search, time_limit

NAMES = st.lists(st.text("abAB-0. ", max_size=8), max_size=20)
PATTERNS = st.lists(st.sampled_from(["a", "b+", ".", "[a-b]*", "-?", "^", "$", "|", "0{1,2}"]), max_size=6).map("".join)
#: Python's engine takes more than the age of the universe for each, Rust's a few milliseconds.
SLOW = (".*" * 20 + "X", "a?" * 40 + "a{40}X", "(a+)+$", "(a|a)*X", "(.*a){20}X")


@examples(200)
@given(PATTERNS, NAMES, st.booleans())
def test_a_pattern_matches_what_pythons_does(pattern: str, names: list[str], any_case: bool) -> None:
    expected = re.compile(pattern, re.IGNORECASE if any_case else 0)
    assert search(pattern, names, any_case=any_case) == [expected.search(name) is not None for name in names]


def test_names_of_any_length_are_all_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_AT_ONCE", 10)
    names = ["a" * 25, "", "b", "ca", "b" * 9, "ba", ""]
    assert search("a", names) == [True, False, False, True, False, True, False]
    assert search("a", []) == []


@pytest.mark.parametrize("pattern", SLOW)
def test_no_pattern_takes_longer_than_its_names(pattern: str) -> None:
    assert search(pattern, ["a" * 1000 + "!"] * 100) == [False] * 100


def test_what_is_no_pattern_is_one_sentence() -> None:
    for pattern, why in (
        ("(", "'(' is not a regular expression: unclosed group"),
        ("(?<=a)b", "look-around, including look-ahead and look-behind, is not supported"),
        (r"(a)\1", "backreferences are not supported"),
        ("(a{1000}){1000}", "Compiled regex exceeds size limit of 10485760 bytes."),
        ("(" * 90 + "a" * 200, "has 290 characters, more than 200"),
        ("a\n(", "unclosed group"),
    ):
        with case(pattern), pytest.raises(ValueError, match=re.escape(why)) as raised:
            check_pattern(pattern)
        assert "\n" not in str(raised.value)


def test_others_go_on_while_names_are_searched() -> None:
    """The search takes a second. This thread lets go of the GIL each time, and would not get it back until the end."""
    names, count = [f"{'abcdefgh' * 12}{number}" for number in range(600)], 0
    with ThreadPoolExecutor(1) as pool:
        searched = pool.submit(search, r"(?:\w?){190}\d\dX", names)
        while wait([searched], 0.001).not_done:
            count += 1
    assert not any(searched.result())
    assert count > 20


def test_a_search_ends_with_its_time() -> None:
    with time_limit(1e-9), pytest.raises(TimeLimitError, match="it took longer than 1e-09 s; ask for less"):
        search("a", ["b"])
    assert search("a", ["b"]) == [False]


def test_a_longer_limit_inside_of_one_does_not_lift_it() -> None:
    with time_limit(1e-9), time_limit(float("inf")), pytest.raises(TimeLimitError, match="longer than 1e-09 s"):
        search("a", ["b"])
    with time_limit(3600), time_limit(1e-9), pytest.raises(TimeLimitError, match="longer than 1e-09 s"):
        search("a", ["b"])
