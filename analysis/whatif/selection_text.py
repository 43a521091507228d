"""Selections as text: `worker=5,2 and step=100-200`, `not communication`, `everything but kind=gc`.

In: a line typed by a person. Out: a `Selection`. The grammar, loosest first:

    either  = both { "or" both }
    both    = single { ("and" | "but") single }        "a but b" is "a and not b"
    single  = "not" single | "(" either ")" | words
    words   = all | compute | communication | worker=D,P | slowest=P% | LABEL=VALUES | LABEL=~REGEX
    VALUES  = 3 | 3-7 | 3,5,9-12 | name[,name]         the "=" may be a space

A LABEL is anything the job knows of its ops: kind, stage, dp_rank, step, microbatch, rank, host ... An edit says what
happens to selections: `stage=3 and compute * 0.9 + worker=1,2` scales the first, and makes the second as fast as its
peers; `fix=repair-link` stands for a fix that the report prices, `layers=8,8,8,8>9,9,9,5` moves layers between stages.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator

from msgspec import Struct

from tracekit.analysis.graph.compiled import MOST_SHOWN, LabelledGraph, label_values, shown_values
from tracekit.analysis.replay.graph_replay import Durations
from tracekit.analysis.whatif import selection as select
from tracekit.analysis.whatif.selection import Selection, all_of, count_selected
from tracekit.base.errors import SelectionError
from tracekit.base.limits import check_pattern
from tracekit.base.text import quoted
from tracekit.trace.model import KINDS, Worker, kind_groups

_TOKEN = re.compile(r"~|[()]|[^\s()=~][^\s()=]*")
#: What counts as one in a pattern: an escape, a set of characters, any other.
_PATTERN_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_NUMBERS = re.compile(r"([0-9]{1,40})(?:-([0-9]{1,40}))?")
_NAME = re.compile(r"[^\W\d][\w.-]*")
_JOINING = {"and", "but", "or", ")"}
_LARGEST_RANGE = 1_000_000
_MOST_WORDS = 200
#: Of a number of layers.
_MOST_DIGITS = 6
LARGEST_FACTOR = 100.0


def parse_selection(text: str) -> Selection:
    """The selection that `text` describes. Raises SelectionError, which quotes the part that it does not understand."""
    parser = _Parser(checked_text(text))
    selection = parser.either()
    if parser.tokens:
        raise parser.error(f"{parser.tokens[0]!r} is unexpected")
    return selection


def checked_text(given: object) -> str:
    """What is given for a selection or an edit, if it is text. Raises SelectionError."""
    if not isinstance(given, str):
        raise SelectionError(f"selection {quoted(given)} is no text; expected for example 'worker=5,2' or 'stage=3'")
    return given


def texts_of(option: str, given: object) -> tuple[str, ...]:
    """The texts given for an option: several, or one by itself. Raises SelectionError for anything else."""
    if isinstance(given, str):
        return (given,)
    texts = tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(text, str) for text in texts):
        raise SelectionError(f"{option}={quoted(given)}: expected a text or a list of texts")
    return texts


def checked_selection(text: str, graph: LabelledGraph, durations: Durations) -> Selection:
    """Like `parse_selection`, but raises SelectionError, with what the job has, if the selection matches no op."""
    selection = parse_selection(text)
    try:
        chosen = count_selected(selection, graph, durations)
    except SelectionError as error:
        raise SelectionError(f"selection {text!r:.200}: {error}") from None
    if not chosen:
        names = [name for name in graph.label_names if re.search(rf"\b{re.escape(name)}\b", text)] or graph.label_names
        values_of = {name: label_values(graph, name) for name in names}
        listed = "; ".join(
            f"{name} {shown_values(values) if len(values) <= MOST_SHOWN else f'({len(values):,} values)'}"
            for name, values in values_of.items()
            if values
        )
        raise SelectionError(f"selection {text!r:.200} matches no op; the job has {listed}")
    return selection


class Term(Struct, frozen=True):
    """One part of an edit: the selected ops take `factor` times as long; None: as long as their peers.

    `fix`: instead, the change of a priced fix, by name. `layers`: instead, the layers of each stage, now and then.
    """

    text: str
    selection: Selection | None = None
    factor: float | None = None
    fix: str | None = None
    layers: tuple[tuple[int, ...], ...] = ()


def parse_edit(text: str) -> tuple[Term, ...]:
    """The parts of an edit: `SELECTION [* FACTOR]`, `fix=KIND[:NUMBER]` or `layers=NOW>THEN`, joined by `+`.

    Raises SelectionError.
    """
    return tuple(_term(part.strip()) for part in re.split(r"(?<!\S)\+(?!\S)", checked_text(text)))


def _term(text: str) -> Term:
    named = re.match(r"(fix|layers)=", text)
    if named and not re.fullmatch(r"fix=\S*|layers=[0-9]+(,[0-9]+)*>[0-9]+(,[0-9]+)*", text):
        raise SelectionError(
            f"edit {text!r:.200}: {named[1]} stands alone; expected `fix=repair-link` or `layers=8,8,8,8>9,9,9,5`"
        )
    if named and named[1] == "fix":
        return Term(text, fix=text.removeprefix("fix="))
    if named:
        if too_long := next((layers for layers in re.findall(r"\d+", text) if len(layers) > _MOST_DIGITS), None):
            most = f"{10**_MOST_DIGITS - 1:,}"
            raise SelectionError(f"edit {text!r:.200}: a stage has at most {most} layers, not {too_long:.40}")
        splits = text.removeprefix("layers=").split(">")
        return Term(text, layers=tuple(tuple(map(int, split.split(","))) for split in splits))
    chosen, star, factor = text.rpartition("*")
    if not star or not chosen[-1:].isspace() or len(factor.split()) > 1:
        return Term(text, parse_selection(text))
    return Term(chosen.strip(), parse_selection(chosen), read_factor(factor))


def read_factor(text: object) -> float:
    """A factor from 0 to 100. Raises SelectionError."""
    try:
        factor = float(str(text).strip())
    except ValueError:
        factor = math.nan
    if not str(text).isascii() or not 0 <= factor <= LARGEST_FACTOR:
        raise SelectionError(f"factor {text!r:.40}; expected a number from 0 to {LARGEST_FACTOR:g}, such as 0.5")
    return factor


class _Parser:
    """Recursive descent over the tokens of one text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = list(_tokens(text))
        if not self.tokens:
            raise self.error("it is empty")
        if len(self.tokens) > _MOST_WORDS:
            raise self.error(f"it has {len(self.tokens)} words, more than {_MOST_WORDS}")

    def error(self, reason: str) -> SelectionError:
        return SelectionError(
            f"selection {self.text!r:.200}: {reason:.200}; expected for example `worker=5,2 and step=100-200`,"
            " `stage=3`, `kind=gc`, `slowest=3%` or `everything but communication`"
        )

    def either(self) -> Selection:
        parts = [self.both()]
        while self._next_is("or"):
            parts.append(self.both())
        return all_of(parts)

    def both(self) -> Selection:
        selection = self.single()
        while True:
            if self._next_is("and"):
                selection &= self.single()
            elif self._next_is("but"):
                selection &= ~self.single()
            else:
                return selection

    def single(self) -> Selection:
        if self._next_is("not"):
            return ~self.single()
        if self._next_is("("):
            selection = self.either()
            if not self._next_is(")"):
                raise self.error("a ')' is missing")
            return selection
        return self.words()

    def words(self) -> Selection:
        label = self._take("a selection")
        word = label.lower()
        if word in ("all", "everything"):
            return select.everything()
        if word == "communication":
            return select.communication()
        if word == "compute":
            return ~select.communication()
        try:
            if not _NAME.fullmatch(word):
                raise self.error(f"{word!r} is unknown")
            return self.valued(word if word in _VALUED else label, self._take(f"a value for {word!r}"))
        except ValueError as error:
            raise self.error(f"{word}: {error}") from None

    def valued(self, word: str, value: str) -> Selection:
        """Ops by label. Raises ValueError for an invalid value."""
        if word in _VALUED:
            return _VALUED[word](value)
        if value.startswith("~"):
            return _like(word, value[1:])
        names = value.split(",")
        if foreign := next((name for name in names if name.isnumeric() and not name.isascii()), None):
            raise ValueError(f"{foreign!r:.60} is no number in the digits 0 to 9")
        numbers = _numbers(value) if all(map(_NUMBERS.fullmatch, names)) else []
        return select.Labelled(word, frozenset(names), tuple(numbers))

    def _next_is(self, token: str) -> bool:
        if self.tokens and self.tokens[0].lower() == token:
            self.tokens.pop(0)
            return True
        return False

    def _take(self, wanted: str) -> str:
        if not self.tokens or self.tokens[0].lower() in _JOINING:
            raise self.error(f"{wanted} is missing")
        return self.tokens.pop(0)


def _tokens(text: str) -> Iterator[str]:
    """The words and parentheses of a text. A pattern, from its `~` to a blank, has the parentheses that it opens."""
    position = 0
    while token := _TOKEN.search(text, position):
        position = _end_of_pattern(text, token.end()) if token[0] == "~" else token.end()
        yield text[token.start() : position]


def _end_of_pattern(text: str, begin: int) -> int:
    depth = 0
    for part in _PATTERN_PART.finditer(text, begin):
        if part[0].isspace() or (part[0] == ")" and not depth):
            return part.start()
        depth += (part[0] == "(") - (part[0] == ")")
    return len(text)


def _numbers(text: str) -> list[range]:
    """`3`, `3-7` or `3,5,9-12` as ranges, ends included."""
    ranges = []
    for part in text.split(","):
        match = _NUMBERS.fullmatch(part)
        if not match:
            raise ValueError(f"{part!r:.60} is neither a number nor a range such as 100-200")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"{part!r} is not a range from a smaller to a larger number")
        if last - first > _LARGEST_RANGE:
            raise ValueError(f"{part!r} has more than {_LARGEST_RANGE} numbers")
        ranges.append(range(first, last + 1))
    if sum(map(len, ranges)) > _LARGEST_RANGE + 1:
        raise ValueError(f"more than {_LARGEST_RANGE} numbers")
    return ranges


def _numbered(label: str) -> Callable[[str], Selection]:
    return lambda text: select.Labelled(label, frozenset(), tuple(_numbers(text)))


def _like(label: str, pattern: str) -> Selection:
    check_pattern(pattern)
    return select.LabelledLike(label, pattern)


def _kinds(text: str) -> Selection:
    """Ops of these kinds; the name of a transfer between stages selects its send and its recv."""
    merged = kind_groups(KINDS)
    names = [kind for name in text.split(",") for kind in merged.get(name, (name,))]
    return _like("kind", text[1:]) if text.startswith("~") else select.labelled("kind", *map(str, names))


def _worker(text: str) -> Selection:
    match = re.fullmatch(r"([0-9]{1,40}),([0-9]{1,40})", text)
    if not match:
        raise ValueError(f"{text!r:.60} is not DP_RANK,PP_RANK such as 5,2")
    return select.worker(Worker(int(match[1]), int(match[2])))


def _slowest(text: str) -> Selection:
    try:
        percent = float(text.removesuffix("%"))
    except ValueError:
        raise ValueError(f"{text!r:.60} is not a percentage such as 3%") from None
    return select.slowest(percent)


_VALUED: dict[str, Callable[[str], Selection]] = {
    "kind": _kinds,
    "stage": _numbered("stage"),
    "pp_rank": _numbered("stage"),
    "dp": _numbered("dp_rank"),
    "dp_rank": _numbered("dp_rank"),
    "microbatch": _numbered("microbatch"),
    "worker": _worker,
    "step": _numbered("step"),
    "steps": _numbered("step"),
    "slowest": _slowest,
}
