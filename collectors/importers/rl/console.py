"""What consoles and clipboards do to a log, undone: colours, prefixes, wrapped lines, any spacing of keys and values.

In: numbered lines of a file. Out: the text of each record in one piece, and its pairs of key and value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

#: Colours, and what Ray puts before a line of a worker.
_DECORATION = re.compile(r"\x1b\[[0-9;]*m|^\s*\((?:[\w.:]+ )?pid=[^)]*\)\s*")
#: A number as Python prints it, also `np.float64(1.5)`, `'1.5'` and `1,251.5`.
NUMBER = r"(?:[\w.]+\()?['\"]?([-+]?(?:\d{1,3}(?:,\d{3})+(?![\d,])(?:\.\d*)?|\d+(?:\.\d*)?|nan|inf)(?:[eE][-+]?\d+)?)"
#: A line that goes on with keys and values of the record above.
_KEYS = re.compile(
    r"(?:^|\s)-\s+['\"]?[A-Za-z_][\w/.@%()-]*\s*[:=]|^\s*['\"]?[A-Za-z_][\w.@%()-]*/[\w/.@%()-]+['\"]?\s*[:=]"
)
#: The rest of a key or of a value that a terminal has wrapped, and the widest of terminals.
_FRAGMENT = re.compile(r"[\w./:+-]+")
_WIDEST = 320
#: Spaces at both ends of a wrapped line may be gone.
_TRIMMED = 2
#: The most lines of a dict that is printed over several.
_MOST_LINES = 2000


def plain(line: str) -> str:
    """A line of a console without colours and without Ray's prefix."""
    return _DECORATION.sub("", _DECORATION.sub("", line)) if "\x1b" in line or "pid=" in line else line


def number(text: str) -> float:
    """The value that `NUMBER` matched."""
    return float(text.replace(",", "") if "," in text else text)


def pair_of(key: str) -> re.Pattern[str]:
    """Matches a key that begins so, and its number: `key:1.5`, `key: 1.5`, `key = 1.5`, `'key': np.float64(1.5)`."""
    return re.compile(rf"(?<![\w/.])((?:{key})[\w/.@%()-]*)['\"]?[ \t]*[:=][ \t]*{NUMBER}")


def pairs(text: str, wanted: re.Pattern[str]) -> dict[str, float]:
    """The keys with numbers in a text that `wanted`, a pattern of `pair_of`, matches."""
    return {key: number(value) for key, value in wanted.findall(text)}


def unwrapped(
    lines: Iterator[tuple[int, str]], begins: re.Pattern[str], word: str
) -> Iterator[tuple[int, re.Match[str]]]:
    """The match of each record's beginning, in its whole text: with the lines over which a terminal, or whoever pasted
    it, has spread it. `word`: is in each beginning.
    """
    first, text, prefix, width, last = 0, "", "", 0, 0
    for place, line in lines:
        if word in line and (match := begins.search(line)):
            if text:
                yield from _matched(begins, first, text)
            first, text, prefix, width, last = place, line[match.start() :], line[: match.start()], len(line), len(line)
        elif text:
            more = line.removeprefix(prefix)
            if joined := _joined(text, more, is_full=last + _TRIMMED >= width):
                text, last = joined, len(line)
            else:
                yield from _matched(begins, first, text)
                text = ""
    if text:
        yield from _matched(begins, first, text)


def _matched(begins: re.Pattern[str], first: int, text: str) -> Iterator[tuple[int, re.Match[str]]]:
    if match := begins.search(text):
        yield first, match


def _joined(text: str, more: str, *, is_full: bool) -> str | None:
    """A record with the line below it, None if that is no part of it. `is_full`: the line before was cut at the width
    of the terminal, so that a key or a value may go on.
    """
    keys = _KEYS.search(more) is not None
    wrapped = is_full and len(more) <= _WIDEST and _FRAGMENT.fullmatch(more.strip()) is not None
    if not more or not (keys or wrapped):
        return None
    ends, begins = text[-1], more[0]
    inside = is_full and not begins.isspace() and (begins.isdigit() or begins in ".:" or not ends.isdigit())
    return text + more if inside else f"{text} {more}"


def dicts(lines: Iterator[tuple[int, str]], begins: re.Pattern[str]) -> Iterator[tuple[int, str, str]]:
    """The step, what is before it in its line, and the dict, of each record that prints one, on one line or on many."""
    step, before, text, remaining = 0, "", None, 0
    for _, line in lines:
        if match := begins.search(line):
            if text:
                yield step, before, text
            step, before, text, remaining = int(match[1]), line[: match.start()], line[match.end() :], _MOST_LINES
        elif text is None:
            continue
        else:
            text, remaining = text + line, remaining - 1
        if remaining == 0 or (text.rstrip().endswith("}") and text.count("{") <= text.count("}")):
            yield step, before, text
            text = None
        elif not text.lstrip().startswith("{") and text.strip():
            text = None
    if text:
        yield step, before, text


def unnumbered(lines: Iterator[tuple[int, str]], wanted: re.Pattern[str]) -> Iterator[dict[str, float]]:
    """Records that do not name their step, as of one step in notes: a new one begins with a key that is there again."""
    values: dict[str, float] = {}
    for _, line in lines:
        for key, value in pairs(line, wanted).items():
            if key in values:
                yield values
                values = {}
            values[key] = value
    if values:
        yield values
