"""Parts of a report that every renderer draws in its own way: tables, and pictures of three shapes.

In: what a report found out. Out: names, words and figures, few enough for a page. A picture says what is drawn; colours
and places on paper are the renderer's. Colours have a number, the `tone`: 0 to 2 for work, 3 to 6 for time that is
lost, the more the worse but for 6, which lies between 4 and 5.
"""

from __future__ import annotations

from msgspec import Struct

#: The numbers of colours.
TONES = range(7)


class Table(Struct, frozen=True, tag="table"):
    """A table with a heading. The first column names things, the others are figures; `note`: a remark below."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether every row has a cell for each head."""
        return all(len(row) == len(self.heads) for row in self.rows)


class ShareGrid(Struct, frozen=True, tag="grid"):
    """How much more than the mean each of many has, as shares: `values`, [down, across]. `down`, `across`: what rows
    and columns are; `rows`, `columns`: their names. `unit`: what the values are shares of.
    """

    title: str
    down: str
    across: str
    rows: list[str]
    columns: list[str]
    values: list[list[float]]
    unit: str

    @property
    def is_whole(self) -> bool:
        """Whether there is a value for each row and column."""
        return len(self.values) == len(self.rows) and all(len(row) == len(self.columns) for row in self.values)


class SeriesLine(Struct, frozen=True):
    """The values of one line, or of one part of bars; None where there is none."""

    name: str
    tone: int
    values: list[float | None]


class UsualBand(Struct, frozen=True):
    """The low and the high end of what is usual at each place, and what it is."""

    name: str
    low: list[float | None]
    high: list[float | None]


class Series(Struct, frozen=True, tag="series"):
    """Values over `places` on an axis, in `unit`: the `lines`, or with `stacked` bars of these parts. `usual`: the band
    below them. `marks`: places that are marked, explained by the `note` below.
    """

    title: str
    axis: str
    unit: str
    places: list[float]
    lines: list[SeriesLine]
    stacked: bool = False
    usual: UsualBand | None = None
    marks: list[float] = []
    note: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether every line has a value, or none, for each place, and a tone."""
        rows = [line.values for line in self.lines] + ([self.usual.low, self.usual.high] if self.usual else [])
        fit = bool(self.places) and all(len(row) == len(self.places) for row in rows)
        return fit and all(line.tone in TONES for line in self.lines)


class TimelineBar(Struct, frozen=True):
    """A bar in a row of a timeline, seconds; `what`: its place in the legend; `words`: for people who point at it."""

    row: int
    what: int
    start_s: float
    end_s: float
    words: str


class LegendEntry(Struct, frozen=True):
    """What bars of one colour are."""

    name: str
    tone: int


class BarTimeline(Struct, frozen=True, tag="timeline"):
    """Bars in rows over time, which is `axis` in words. `rows`: their names, "" for none; a row with a name and no bars
    is a heading. `legend`: what bars can be; `notes`: remarks below.
    """

    title: str
    axis: str
    rows: list[str]
    legend: list[LegendEntry]
    bars: list[TimelineBar]
    notes: list[str]

    @property
    def is_whole(self) -> bool:
        """Whether every bar has a row and an entry of the legend, and these a tone."""
        rows, whats = range(len(self.rows)), range(len(self.legend))
        fit = all(bar.row in rows and bar.what in whats for bar in self.bars)
        return fit and all(entry.tone in TONES for entry in self.legend)


Picture = ShareGrid | Series | BarTimeline
Section = Table | Picture
