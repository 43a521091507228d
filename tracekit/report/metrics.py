"""What metrics of hosts and GPUs say about a culprit: plain data.

In: what `tracekit.analysis.metrics` measured. Out: the key `metrics` of a report, and what `tracekit metrics` prints.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from tracekit.base.enums import StrEnum
from tracekit.base.text import short
from tracekit.report.section import Series, SeriesLine, UsualBand


class MetricVerdict(StrEnum):
    """Whether metrics show what the trace shows."""

    CONFIRMED = "confirmed"
    REFUTED = "refuted"
    NOT_TESTABLE = "not-testable"


class MechanismName(StrEnum):
    """How a machine slows down what runs on it."""

    CLOCK = "clock"
    LINK = "link"
    CPU_PRESSURE = "cpu-pressure"
    CPU_LIMIT = "cpu-limit"
    MEMORY_PRESSURE = "memory-pressure"
    IO_PRESSURE = "io-pressure"


class Band(Struct, frozen=True):
    """The suspect's series over its peers', for a figure: a few hundred points at most.

    `time`: seconds since 1970; `own`: of the slowest device; `low`, `high`: the middle 80 % of the peers' series; all
    in `unit`, None where nothing was sampled. The trace, or the suspicion, lasts `from_s` to `to_s`.
    """

    unit: str
    time: list[float]
    own: list[float | None]
    low: list[float | None]
    high: list[float | None]
    from_s: float = msgspec.field(name="from")
    to_s: float = msgspec.field(name="to")


class MetricTest(Struct, frozen=True, kw_only=True):
    """The test of one suspicion. A verdict but not-testable has everything but `missing` and `reason`.

    `shows`, `predicts`: how much longer the work takes by the trace and by the metric, 0.4 = 40 %; `interval`: of
    `predicts`, 95 %. `device`: the slowest GPU or port, None if the metric is of the host. `samples`: of that series in
    the interval, every `sampling_s` seconds. `missing`: names of metrics. `basis`: what the host is compared with.
    """

    host: str
    part: str
    verdict: MetricVerdict
    shows: float
    sentence: str
    device: str | None = None
    mechanism: MechanismName | None = None
    metric: str | None = None
    predicts: float | None = None
    interval: list[float] | None = None
    sampling_s: float | None = None
    samples: int | None = None
    basis: str | None = None
    missing: tuple[str, ...] = ()
    reason: str | None = None
    band: Band | None = None


class MetricsInReport(Struct, frozen=True):
    """The key `metrics` of a report. `source`: where the samples come from; `dropped`: samples that were no numbers or
    came twice; `problem`: why nothing could be read, None if something was.
    """

    source: str
    tests: list[MetricTest]
    dropped: int = 0
    problem: str | None = None

    @property
    def pictures(self) -> list[Series]:
        """The metric of each culprit that was tested, over the band of its peers."""
        return [_picture(test, test.band) for test in self.tests if test.band is not None]


def _picture(test: MetricTest, band: Band) -> Series:
    return Series(
        title=f"{test.metric} of {short(test.host)}",
        axis="seconds from the beginning of the trace",
        unit=band.unit,
        places=[time - band.from_s for time in band.time],
        lines=[SeriesLine("the host", 5, band.own)],
        usual=UsualBand("its peers, the middle 80 %", band.low, band.high),
        marks=[0.0, band.to_s - band.from_s],
        note=f"{test.sentence}. Dotted: the beginning and the end of what the trace shows",
    )


class Alarm(Struct, frozen=True):
    """A host that departs from its peers for a while. `change`: of a gauge, relative; of a counter, of its rate."""

    host: str
    device: str | None
    metric: str
    from_s: float = msgspec.field(name="from")
    to_s: float = msgspec.field(name="to")
    change: float = 0.0


class MissingMetric(Struct, frozen=True):
    """A metric that the exporters lack. `line`: what to add; `why`: what cannot be told without it, and where."""

    metric: str
    exporter: str
    line: str
    why: str
