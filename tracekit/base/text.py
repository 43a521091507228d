"""Text that is safe to display or store: names and paths from outside, and durations.

In: any string. Out: a string that cannot break a line, control a terminal or fail to encode.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Iterable

#: Longer names are cut for display.
LONGEST_NAME = 80
#: Messages cut values from outside to this many characters.
LONGEST_QUOTE = 200
#: Most names with which a mistyped name is compared.
MOST_COMPARED = 1000
#: Shown instead of a name of spaces only.
NO_NAME = "(no name)"
#: Nothing is more certain than this.
MOST_CONFIDENT = 0.99
#: The last second that dates can show, of the year 9999; seconds since the epoch.
LAST_MOMENT = 253_402_300_799

_LINE = re.compile(r"^(?:.*/)?([^/]+\.pyx?)\((\d+)\): (.+)$")


def encodable(text: str) -> str:
    """`text` with escapes for what UTF-8 cannot represent (undecodable bytes of a path, lone surrogates)."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def printable(text: str) -> str:
    """`text` on one line, with escapes for control characters and what UTF-8 cannot represent."""
    encoded = encodable(text)
    if encoded.isprintable():  # the usual case, and a hundred times as fast
        return encoded
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in encoded)


def short(text: str, most: int = LONGEST_NAME) -> str:
    """A name for display: `printable`, cut to `most` characters; a text for a blank one."""
    line = printable(text) if text.strip() else NO_NAME
    return line if len(line) <= most else f"{line[: most - 3]}..."


def code_name(name: str) -> str:
    """A name in code for people: "step (train.py:88)" for "train.py(88): step", else the name itself, shortened."""
    line = _LINE.match(name)
    return f"{short(line[3])} ({line[1]}:{line[2]})" if line else f"`{short(name)}`"


def quoted(value: object, most: int = LONGEST_QUOTE) -> str:
    """A value from outside as messages quote it: as Python writes it, on one line, cut in the middle. Costs no more for
    a value of any size or depth.
    """
    if isinstance(value, bytes | bytearray):
        value = bytes(value[: most + 1])
    writer = reprlib.Repr()
    writer.maxstring = writer.maxother = writer.maxlong = 2 * most
    writer.maxlevel = 3
    try:
        representation = writer.repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        representation = f"a {type(value).__name__} of more digits than Python writes"
    return cut(printable(representation), most)


def cut(text: str, most: int) -> str:
    """`text`, or its beginning and end with dots in between: at most `most` characters."""
    end = (most - 3) // 3
    return text if len(text) <= most else f"{text[: most - 3 - end]}...{text[len(text) - end :]}"


def listed(names: Iterable[str], most: int = 20) -> str:
    """Names from outside, each of them short, and how many more there are."""
    all_names = list(names)
    more = f" and {len(all_names) - most:,} more" if len(all_names) > most else ""
    return ", ".join(map(short, all_names[:most])) + more


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The name that a mistyped word most likely means, of 1,000 that begin like it if there are more; None if none is
    alike. Names are compared by their first characters: to compare two takes the square of their length.
    """
    import difflib

    likely = sorted(names, key=lambda name: name[:1] != word[:1])[:MOST_COMPARED]
    by_start = {name[:LONGEST_NAME]: name for name in reversed(likely)}
    close = difflib.get_close_matches(word[:LONGEST_NAME], by_start, n=1)
    return by_start[close[0]] if close else None


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """The end of an error about a mistyped word: "; did you mean `gc`?", empty if no name is like it."""
    similar = nearest(word, names)
    return f"; did you mean `{printable(similar)}`?" if similar is not None else ""


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """First and last of each run of neighbours, ascending."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(numbers):
        first = ranges.pop()[0] if ranges and number == ranges[-1][1] + 1 else number
        ranges.append((first, number))
    return ranges


def ranks_text(ranks: Iterable[int], most: int = 6, name: str = "rank") -> str:
    """`ranks 0-3, 8`, cut after `most` runs; `name`: what is numbered."""
    ranges = runs(ranks)
    count = sum(end - begin + 1 for begin, end in ranges)
    listed_ranges = ", ".join(f"{begin}" if begin == end else f"{begin}-{end}" for begin, end in ranges[:most])
    return f"{name}{'s' * (count != 1)} {listed_ranges}{', ...' if len(ranges) > most else ''}"


def steps_text(first: int, last: int) -> str:
    """Steps in a row: "step 7", or "steps 7 to 12"."""
    return f"step {first}" if first == last else f"steps {first} to {last}"


def cost(saved_s: float, alone_s: float, whole: str = "step", *, bound: bool = False, on_average: bool = False) -> str:
    """What a cause costs; a cause that hides behind another one costs little until that is gone.

    `whole`: what the times are of, "step" or "recording". `bound`: they are upper bounds. `on_average`: some steps cost
    it, others do not.
    """
    later = hidden(saved_s, alone_s)
    words = f"costs {'at most ' * bound}{seconds(alone_s if later else saved_s)} {of_whole(whole)}"
    words += " on average" * on_average
    return f"{words} once the others are gone" if later else words


def of_whole(whole: str) -> str:
    """The words after a time that is part of each "step", or of a "recording"."""
    return "a step" if whole == "step" else "of the recording"


def hidden(saved_s: float, alone_s: float) -> bool:
    """True for a cause that costs little until others are gone."""
    return saved_s < alone_s / 2


def bytes_of(size: str) -> int | None:
    """`500MB`, `1.5g` or `100` in bytes, by powers of ten; None if it is no size."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)([KMGT]?)B?", size.upper(), re.ASCII)
    return None if match is None else int(float(match[1]) * 1000.0 ** " KMGT".index(match[2] or " "))


def percent_sure(confidence: float) -> str:
    """A confidence, 0 to 1, in percent; never more than 99%."""
    return f"{min(confidence, MOST_CONFIDENT):.0%}"


def percent(share: float) -> str:
    """Whole percent, without a minus before zero."""
    return f"{round(share * 100)}%"


def cost_alone(slowdown: float | None) -> str:
    """The share of a step that some ops alone cost, from their S: 1.25 is `20.0%`."""
    return "-" if slowdown is None else f"{1 - 1 / slowdown:z.1%}"


def sure(confidence: float) -> str:
    """The confidence that a cause is real and at its place; says nothing about its cost."""
    return f"{percent_sure(confidence)} sure"


def counted(number: int, noun: str) -> str:
    """A count with its noun: "1 GPU", "1,024 GPUs", "2 dependencies", "3 trajectories"."""
    plural = f"{noun[:-1]}ies" if noun.endswith(("cy", "ry")) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def pace_words(done: int, total: int, units: str, took_s: float) -> str:
    """How far work is: "320 of 1,000 jobs, 14 a second, 49 s to go"."""
    if not done:
        return f"0 of {total:,} {units}"
    a_second = done / max(took_s, 1e-3)
    rate = f"{three_digits(a_second)} a second" if a_second >= 1 else f"{three_digits(60 * a_second)} a minute"
    rest_s = (total - done) / a_second
    rest = f"{rest_s:,.0f} s" if rest_s < 120 else f"{rest_s / 60:,.0f} min"
    return f"{done:,} of {total:,} {units}, {rate}, {rest} to go"


def three_digits(value: float) -> str:
    """A figure with three significant digits, without an exponent: 0.0312, 11.5, 1,040."""
    rounded = float(f"{value:.3g}")
    decimals = 0 if rounded == 0 else max(2 - math.floor(math.log10(abs(rounded))), 0)
    text = f"{rounded:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def ratio(value: float) -> str:
    """A ratio of durations, without digits that do not matter: 1.7, 6.2, 28."""
    return f"{value:.1f}".removesuffix(".0") if value < 9.95 else f"{value:,.0f}"


def with_error(value: float, error: float) -> str:
    """A duration with its error in the same unit, so that the two can be compared at a glance: `36.6 ms ± 0.5 ms`; an
    error that would display as 0 us is left out.
    """
    return f"{seconds(value)} \u00b1 {error_of(value, error)}" if error >= 5e-7 else seconds(value)


def error_of(value: float, error: float) -> str:
    """The error of a duration, in the unit in which that is displayed; an error that would display as 0 keeps its own
    unit.
    """
    return f"{error * 1e3:.1f} ms" if 1e-3 <= abs(value) < 1 and 5e-5 <= error < 1 else seconds(error)


def seconds(value: float) -> str:
    """A duration in a unit that keeps three digits readable. What rounds to a whole second or millisecond is one."""
    size = abs(value)
    if size >= 0.99995 or size == 0:
        return f"{value:z.2f} s"
    return f"{value * 1e3:.1f} ms" if size >= 0.9995e-3 else f"{value * 1e6:z.0f} us"


def main_clause(effect: str) -> str:
    """The effect of a cause without the clauses about noise and other ranks."""
    return effect.split(";", maxsplit=1)[0]
