"""How far a host departs from its peers: as a suspicion asks, and any host by any metric for minutes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

import numpy as np
import polars as pl
from msgspec import Struct

from tracekit.analysis.metrics.samples import Samples, TimeSpan, is_counter
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.numeric.statistics import MAD_TO_SIGMA
from tracekit.base.errors import FormatError
from tracekit.report.hardware import Alarm


class EffectThresholds(Struct, frozen=True):
    """When a host departs from its peers. Simulated fleets: like those of docs/hardware.md."""

    #: Fewer samples of a series in the interval, or in its past, tell nothing. Simulated fleets.
    fewest_samples: int = 6
    #: With fewer peers, a host is compared with its own past only. Chosen: their median tells little.
    fewest_peers: int = 4
    #: The smallest standard error. Definition: clocks have steps.
    sigma: float = 0.0008
    #: A host agrees with its peers where it is within this many standard deviations of what they differ by.
    #: Statistic: 99.7 % of normal values.
    agrees: float = 3.0
    #: The past is judged in pieces of at most this many seconds. Simulated fleets.
    piece_s: float = 60.0
    #: Other intervals count for the noise if there are so many ... Chosen: fewer show no spread.
    fewest_windows: int = 3
    #: ... and a host's own past needs that many without peers. Simulated fleets.
    of_past: int = 6
    #: Departures of the scan are medians over this time, seconds. Chosen: shorter ones happen to healthy nodes.
    smoothed_s: float = 180.0
    #: Its threshold is this many times the farthest that a healthy node departed ... Chosen: baselines are short.
    margin: float = 1.15
    #: ... and at least so many standard deviations. Statistic: one normal value of 300,000.
    least_sigmas: float = 4.5
    #: Without baselines: so many standard deviations of the smoothed departures. Chosen: only large ones show.
    sigmas: float = 10.0
    #: An effect of this many standard errors is not chance. Chosen: of thousands of series, none is by chance.
    significant: float = 6.0
    #: The dose agrees with the trace from this factor on, below it a metric refutes ... Chosen.
    least_dose: float = 0.5
    #: ... to this factor. Chosen: the inverse.
    most_dose: float = 2.0


EFFECTS = EffectThresholds()
#: What a host is compared with, if nothing is lacking.
USUAL_BASIS = "its peers and its own past"
#: Of the samples of a series, the middle half; it follows clocks that have few steps, which the median does not.
_OUTER_QUARTERS = 4


class MetricEffect(Struct, frozen=True):
    """How far a host departs. `size`: logarithm of a ratio, of counters the difference of rates; `sigma`: its standard
    error; `own`: the value in the interval. `basis`: what it is compared with, in words. `apart`: how far it is from
    its peers where those are too few, None without any.
    """

    series: int
    device: str | None
    size: float
    sigma: float
    own: float
    samples: int
    sampling_s: float
    basis: str
    apart: float | None = None


class TooLittleError(Exception):
    """The samples do not suffice; the message says why. `missing`: whether the host lacks the metric altogether."""

    def __init__(self, why: str, *, missing: bool = False) -> None:
        super().__init__(why)
        self.missing = missing


def effect_of(
    samples: Samples, metric: str, host: str, window: TimeSpan, peers: Collection[str], slow: int
) -> MetricEffect:
    """Measure a host. `slow`: the sign of a slow machine's departure; its slowest device counts, and so does that of
    the others. Raises TooLittleError.

    Each value is compared with the median of the peers at that time, which removes what all have in common; then with
    what the host's own series was when it combined with its peers, which removes the fingerprint of each node. A fault
    often lasts longer than a trace, so the past is only that part; without it, peers alone are compared, and
    fingerprints count as noise. Noise is measured: the same figure of the other hosts, and of all hosts at other times.
    """
    recorded = samples.of_metric(metric)
    if recorded.filter(host=host).is_empty():
        raise TooLittleError(f"{host} has no samples of {metric}", missing=True)
    values = recorded if is_counter(metric) else recorded.filter(pl.col("value") > 0)
    own = values.filter(host=host)
    if samples.span is not None and not (samples.span.since <= window.until and window.since <= samples.span.until):
        raise TooLittleError(_no_overlap(samples.span, window))
    counts = own.filter(_within(window)).group_by("series").len()
    enough = counts.filter(pl.col("len") >= EFFECTS.fewest_samples)["series"]
    spacing = samples.spacing(metric).join(own.select("series").unique(), on="series")["spacing"].median()
    sampling_s = float(spacing) if isinstance(spacing, int | float) else math.inf
    length_s = window.until - window.since
    if enough.is_empty() or length_s < EFFECTS.fewest_samples * sampling_s:
        most = max(counts["len"].to_list(), default=0)
        raise TooLittleError(
            f"{most} samples of {metric} in {length_s:.0f} s; {EFFECTS.fewest_samples} whole ones are needed"
        )
    measure = _Measure(values.filter(pl.col("host").is_in([host, *peers])), metric, host, window, slow, sampling_s)
    return measure.effect(enough.to_list())


def _no_overlap(span: TimeSpan, window: TimeSpan) -> str:
    distance_s = window.since - span.until if window.since > span.until else window.until - span.since
    hours = round(distance_s / 3600)
    zone = (
        f"; a time zone would explain {hours:+d} h: write times as seconds since 1970 UTC"
        if 0 < abs(hours) <= 14
        else ""
    )
    return f"times do not overlap: the metrics are of another time{zone}"


def _within(window: TimeSpan) -> pl.Expr:
    return (pl.col("before") >= window.since) & (pl.col("time") <= window.until)


def location(values: pl.Expr, metric: str) -> pl.Expr:
    """The location of values: of counters the mean, else the mean of the middle half."""
    if is_counter(metric):
        return values.mean()
    outer = values.len() // _OUTER_QUARTERS
    return values.sort().slice(outer, values.len() - 2 * outer).mean()


def spread_of(values: Floats) -> tuple[float, float]:
    """Median, and standard deviation by the median absolute deviation, at least `EFFECTS.sigma`."""
    center = float(np.median(values))
    return center, max(MAD_TO_SIGMA * float(np.median(np.abs(values - center))), EFFECTS.sigma)


class _Measure:
    """One measurement: values with their residuals and the pieces and windows of time that they lie in."""

    def __init__(
        self, values: pl.DataFrame, metric: str, host: str, window: TimeSpan, slow: int, sampling_s: float
    ) -> None:
        self.metric, self.host, self.slow, self.sampling_s = metric, host, slow, sampling_s
        x = pl.col("value") if is_counter(metric) else pl.col("value").log()
        before, after = pl.col("time") < window.since, pl.col("before") > window.until
        rows = values.with_columns(x=x, inside=_within(window)).filter(pl.col("inside") | before | after)
        present = rows.filter(pl.col("inside") & (pl.col("host") != host))["host"].n_unique()
        self.has_peers = present >= EFFECTS.fewest_peers
        level = (
            rows.filter(pl.col("host") != host)
            .group_by(moment=(pl.col("time") / sampling_s).floor())
            .agg(level=pl.col("x").median())
        )
        compared = rows.with_columns(moment=(pl.col("time") / sampling_s).floor()).join(level, on="moment", how="left")
        self.of_peers = compared.filter(pl.col("level").is_not_null()).with_columns(r=pl.col("x") - pl.col("level"))
        self.rows = self.of_peers if self.has_peers else rows.filter(host=host).with_columns(r=pl.col("x"))
        self.window = window

    def effect(self, series: list[int]) -> MetricEffect:
        """The effect on the slowest of these series."""
        inside = self._locations(self.rows.filter("inside"), "series", "host", "device")
        outside = self.rows.filter(~pl.col("inside"))
        past = self._locations(self._healthy(outside), "series").filter(pl.col("n") >= EFFECTS.fewest_samples)
        past = past.select("series", past="r")
        healthy = {*past["series"]} & {*series}
        measured = []
        if healthy:
            measured.append(self._against(past, inside, outside, healthy, past_known=True))
        if self.has_peers and healthy != {*series}:
            level = inside.select("series", past=pl.lit(0.0))
            measured.append(self._against(level, inside, outside, {*series} - healthy, past_known=False))
        if not measured:
            few = f"fewer than {EFFECTS.fewest_peers} peers"
            raise TooLittleError(f"{few}, and no samples before or after to compare with")
        return max(measured, key=lambda effect: self.slow * effect.size)

    def _against(
        self, past: pl.DataFrame, inside: pl.DataFrame, outside: pl.DataFrame, series: set[int], *, past_known: bool
    ) -> MetricEffect:
        """The effect on the slowest of these series, against `past`: series, past. `past_known`: it is their own."""
        sizes = inside.join(past, on="series").with_columns(size=pl.col("r") - pl.col("past"))
        own = sizes.filter(pl.col("series").is_in(series)).sort(self.slow * pl.col("size")).row(-1, named=True)
        null = self._noise(sizes, past, outside)
        if len(null) < EFFECTS.fewest_windows:
            raise TooLittleError("too few samples outside of the interval to know how much the metric varies")
        center, sigma = spread_of(null)
        basis = USUAL_BASIS if past_known else "its peers only, as it has no past in which it agrees with them"
        return MetricEffect(
            own["series"],
            own["device"],
            own["size"] - (center if self.has_peers else 0.0),
            sigma,
            own["x"],
            own["n"],
            self.sampling_s,
            basis if self.has_peers else f"its own past only, as it has fewer than {EFFECTS.fewest_peers} peers",
            None if self.has_peers else self._apart(own["series"]),
        )

    def _locations(self, rows: pl.DataFrame, *by: str) -> pl.DataFrame:
        """Residuals r and values x of rows in groups, and how many there are: n."""
        value = pl.col("value").mean() if is_counter(self.metric) else location(pl.col("value"), self.metric)
        return rows.group_by(by).agg(r=location(pl.col("r"), self.metric), x=value, n=pl.len())

    def _pieces(self, outside: pl.DataFrame, width: float) -> pl.DataFrame:
        """Rows with the number of their piece: pieces of `width` seconds, away from the interval on both sides."""
        since, until = self.window.since, self.window.until
        early = -((since - pl.col("time")) / width).floor() - 1
        late = ((pl.col("time") - until) / width).floor() + 1
        return outside.with_columns(piece=pl.when(pl.col("time") < since).then(early).otherwise(late))

    def _healthy(self, outside: pl.DataFrame) -> pl.DataFrame:
        """The rows outside of the interval in which series agree with those of the peers."""
        if not self.has_peers:
            return outside
        length = min(self.window.until - self.window.since, EFFECTS.piece_s)
        placed = self._pieces(outside, max(length, EFFECTS.fewest_samples * self.sampling_s))
        pieces = self._locations(placed, "series", "host", "piece")
        others = pieces.filter(pl.col("host") != self.host)["r"].to_numpy()
        if not len(others):
            return outside
        center, sigma = spread_of(others)
        agreeing = pieces.filter((pl.col("r") - center).abs() <= EFFECTS.agrees * sigma).select("series", "piece")
        return placed.join(agreeing, on=["series", "piece"], how="semi")

    def _noise(self, sizes: pl.DataFrame, past: pl.DataFrame, outside: pl.DataFrame) -> Floats:
        """The same figure where nothing is suspected: of other hosts, and at other times."""
        others = self._slowest(sizes.filter(pl.col("host") != self.host), "host") if self.has_peers else np.zeros(0)
        width = self.window.until - self.window.since
        if not self.has_peers:
            span = outside.select(pl.col("time").max() - pl.col("time").min()).item()
            width = max(min(width, (span - width) / EFFECTS.of_past), EFFECTS.fewest_samples * self.sampling_s)
        windows = self._locations(self._pieces(outside, width), "series", "host", "piece")
        full = windows.filter(pl.col("n") >= pl.col("n").max() / 2)
        count = full["piece"].n_unique()
        if count < EFFECTS.fewest_windows:
            return others
        differences = full.join(past, on="series").with_columns(size=pl.col("r") - pl.col("past"))
        # A window is part of the past that it is compared with, which the interval is not.
        wider = math.sqrt((count + 1) / (count - 1)) if self.has_peers else 1.0
        return np.concatenate([others, wider * self._slowest(differences, "host", "piece")])

    def _slowest(self, sizes: pl.DataFrame, *by: str) -> Floats:
        """The size of the slowest series in each group."""
        extreme = pl.col("size").min() if self.slow < 0 else pl.col("size").max()
        return np.asarray(sizes.group_by(by).agg(extreme)["size"].to_numpy())

    def _apart(self, series: int) -> float | None:
        """How far a series is from those of too few peers in the interval; None without any."""
        rows = self.of_peers.filter(pl.col("inside") & (pl.col("series") == series))
        departure = rows.select(location(pl.col("r"), self.metric)).item() if rows.height else None
        return departure if isinstance(departure, float) else None


def scanned(samples: Samples, baselines: Sequence[Samples]) -> Iterator[Alarm]:
    """Yield alarms, by metric. A metric that no baseline has gets the threshold of this run.

    Raises FormatError if no metric can be compared.

    Without a suspicion, thousands of series are looked at for hours, so chance must be known well: the threshold is the
    farthest that any healthy node departed in the baselines, and a margin. Without baselines, it is many standard
    deviations of this run, and only large departures show.
    """
    of_metrics = {metric: _departures(samples, metric) for metric in sorted(set(samples.series["metric"]))}
    if all(departures is None for departures in of_metrics.values()):
        raise FormatError(
            f"too little to compare: a metric needs more than {EFFECTS.fewest_peers} hosts with numbers for"
            f" {EFFECTS.smoothed_s:.0f} s"
        )
    for metric, departures in of_metrics.items():
        if departures is None:
            continue
        healthy = [of_run for baseline in baselines if (of_run := _departures(baseline, metric)) is not None]
        yield from _alarms(departures, metric, *_limits(healthy, departures))


def _departures(samples: Samples, metric: str) -> pl.DataFrame | None:
    """Each series' smoothed departure from the median of all, less its usual one; None with too few hosts or times.

    What is usual for a series is its median, as nodes have fingerprints. A median that is far from those of the other
    series is no fingerprint but a fault that lasts for most of this time.
    """
    values = samples.of_metric(metric)
    spacing = samples.spacing(metric)["spacing"].median()
    if not isinstance(spacing, float) or values["host"].n_unique() <= EFFECTS.fewest_peers:
        return None
    x = pl.col("value") if is_counter(metric) else pl.col("value").log()
    usable = values if is_counter(metric) else values.filter(pl.col("value") > 0)
    moment = (pl.col("time") / spacing).floor().cast(pl.Int64)
    residuals = usable.with_columns(x=x, moment=moment).with_columns(r=x - x.median().over("moment"))
    usual = residuals.group_by("series").agg(usual=pl.col("r").median())
    if usual.is_empty():
        return None
    center, sigma = spread_of(usual["usual"].to_numpy())
    fingerprint = (pl.col("usual") - center).abs() <= EFFECTS.sigmas * sigma
    usual = usual.with_columns(usual=pl.when(fingerprint).then("usual").otherwise(center))
    departures = (
        residuals.join(usual, on="series").with_columns(r=pl.col("r") - pl.col("usual")).sort("series", "moment")
    )
    width = max(int(EFFECTS.smoothed_s / spacing), 1)
    smoothed = pl.col("r").rolling_median_by("moment", f"{width}i", min_samples=max(width * 3 // 4, 1)).over("series")
    departures = departures.with_columns(smoothed=smoothed).drop_nulls("smoothed")
    return None if departures.is_empty() else departures.with_columns(pl.col("time") - EFFECTS.smoothed_s / 2)


def _limits(healthy: Sequence[pl.DataFrame], departures: pl.DataFrame) -> tuple[float, float]:
    """Departures between these are healthy."""
    if not healthy:
        _, sigma = spread_of(departures["smoothed"].to_numpy())
        return -EFFECTS.sigmas * sigma, EFFECTS.sigmas * sigma
    values = pl.concat([of_run["smoothed"] for of_run in healthy]).to_numpy()
    _, sigma = spread_of(values)
    least = EFFECTS.least_sigmas * sigma
    return min(EFFECTS.margin * float(values.min()), -least), max(EFFECTS.margin * float(values.max()), least)


def _alarms(departures: pl.DataFrame, metric: str, low: float, high: float) -> Iterator[Alarm]:
    """An alarm for each stretch of a series beyond these limits."""
    beyond = pl.when(pl.col("smoothed") < low).then(-1).when(pl.col("smoothed") > high).then(1)
    marked = departures.with_columns(beyond=beyond.otherwise(0))
    stretches = (
        marked.with_columns(stretch=pl.col("beyond").rle_id().over("series"))
        .filter(pl.col("beyond") != 0)
        .group_by("series", "stretch", "beyond")
        .agg(
            pl.col("host", "device").first(),
            since=pl.col("time").min(),
            until=pl.col("time").max(),
            farthest=pl.col("smoothed").median(),
        )
        .sort("since", "host", "device", "series", "stretch")
    )
    change = pl.col("farthest") if is_counter(metric) else pl.col("farthest").exp() - 1
    for row in stretches.with_columns(change=change).iter_rows(named=True):
        yield Alarm(row["host"], row["device"], metric, row["since"], row["until"], row["change"])
