"""The guided test: does a metric of the suspected host show what the trace shows?

In: samples and `Suspicion`s. Out: a `MetricTest` each: confirmed with the dose, refuted, or not testable and why.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import polars as pl
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.metrics.effects import EFFECTS, USUAL_BASIS, MetricEffect, TooLittleError, effect_of
from tracekit.analysis.metrics.samples import (
    CPU_LIMIT,
    CPU_PRESSURE,
    ERRORS,
    LINK,
    MECHANISMS,
    Mechanism,
    Samples,
    TimeSpan,
    is_counter,
    line_for,
    short_host,
)
from tracekit.base.text import short
from tracekit.report.hardware import Band, MetricTest, MetricVerdict

#: Standard errors on both sides of the 95 % interval.
_OF_95 = 1.96
#: By so many hours, times of another time zone are wrong.
_PARTS_OF_HOURS = (2.5, 3.5, 4.5, 5.5, 5.75, 6.5, 8.75, 9.5, 10.5, 12.75)
_ZONES = [sign * hours for hours in (*range(1, 15), *_PARTS_OF_HOURS) for sign in (1, -1)]
#: Points of a figure.
_POINTS = 120
#: How much is drawn on each side, as a multiple of the interval.
_MARGIN = 1.0
_LOW, _HIGH = 0.1, 0.9


class Suspicion(Struct, frozen=True):
    """A host whose part of a rank (`MECHANISMS`) takes `excess` longer, 0.4 = 40 %, in `window`.

    `peers`: hosts to compare with, None for all. `untestable`: why no metric can tell, None if one can.
    """

    host: str
    part: str
    excess: float
    window: TimeSpan
    peers: frozenset[str] | None = None
    untestable: str | None = None


class _Measured(Struct, frozen=True):
    """One mechanism measured: `effect` of `metric`, or why not."""

    mechanism: Mechanism
    metric: str
    effect: MetricEffect | None
    why_not: str | None = None
    missing: bool = False

    def predicts(self, sigmas: float = 0.0) -> float:
        """How much longer the work takes by the metric; `sigmas` standard errors more than measured."""
        assert self.effect is not None
        size = self.effect.size + self.mechanism.slow * sigmas * self.effect.sigma
        return self.mechanism.excess(size, self.effect.own)

    @property
    def significant(self) -> bool:
        """Whether the host departs towards slowness beyond chance."""
        effect = self.effect
        return effect is not None and self.mechanism.slow * effect.size > EFFECTS.significant * effect.sigma

    def confirms(self, excess: float) -> bool:
        """Whether the metric explains what the trace shows."""
        return self.significant and EFFECTS.least_dose <= self.predicts() / excess <= EFFECTS.most_dose


def verdicts_on(samples: Samples, suspicions: Sequence[Suspicion]) -> list[MetricTest]:
    """Test suspicions, in this order."""
    return [_tested(samples, suspicion) for suspicion in suspicions]


def _tested(samples: Samples, suspicion: Suspicion) -> MetricTest:
    tried = MECHANISMS.get(suspicion.part, ())
    if suspicion.untestable is not None:
        return untestable(suspicion, suspicion.untestable)
    if not tried:
        return untestable(suspicion, f"no metric shows the part {suspicion.part}; one of {', '.join(MECHANISMS)} does")
    host = short_host(suspicion.host)
    if host not in samples.hosts:
        why = f"no metric names the host {host}; the label is Hostname, else instance"
        return untestable(suspicion, why, tried[0].metrics[:1])
    measured = [_measured(samples, mechanism, suspicion) for mechanism in tried]
    usual = measured[0]
    for measurement in measured:
        if measurement.confirms(suspicion.excess):
            return _concluded(samples, suspicion, measurement, MetricVerdict.CONFIRMED, usual)
    if usual.effect is None:
        return _lacking(suspicion, usual.why_not or "", usual.metric, missing=usual.missing)
    if usual.predicts(_OF_95) < EFFECTS.least_dose * suspicion.excess:
        if (otherwise := _may_be_otherwise(samples, suspicion, usual)) is not None:
            return otherwise
        return _concluded(samples, suspicion, usual, MetricVerdict.REFUTED, usual)
    return untestable(suspicion, _why_unclear(usual, suspicion))


def untestable(
    suspicion: Suspicion, reason: str, missing: Collection[str] = (), lines: Collection[str] = ()
) -> MetricTest:
    """The test of a suspicion that cannot be tested. `lines`: what to add to exporters."""
    return MetricTest(
        host=suspicion.host,
        part=suspicion.part,
        verdict=MetricVerdict.NOT_TESTABLE,
        shows=suspicion.excess,
        missing=tuple(missing),
        reason=reason,
        sentence="; ".join([f"{short(suspicion.host)} not testable with these metrics: {reason}", *lines]),
    )


def _lacking(suspicion: Suspicion, reason: str, metric: str, *, missing: bool) -> MetricTest:
    """The test of a suspicion that cannot be tested by a metric; `missing`: the exporter lacks it."""
    return untestable(suspicion, reason, [metric], [line_for(metric)]) if missing else untestable(suspicion, reason)


def _measured(samples: Samples, mechanism: Mechanism, suspicion: Suspicion) -> _Measured:
    host = short_host(suspicion.host)
    of_host = samples.series.filter(host=host)["metric"]
    metric = next((name for name in mechanism.metrics if name in of_host), mechanism.metrics[0])
    if (why := samples.why_not_one_machine(host, metric)) is not None:
        return _Measured(mechanism, metric, None, why)
    try:
        effect = effect_of(samples, metric, host, suspicion.window, _peers(samples, suspicion), mechanism.slow)
    except TooLittleError as error:
        return _Measured(mechanism, metric, None, str(error), error.missing)
    return _Measured(mechanism, metric, effect)


def _peers(samples: Samples, suspicion: Suspicion) -> frozenset[str]:
    """The hosts to compare with, as samples name them."""
    named = samples.hosts if suspicion.peers is None else frozenset(map(short_host, suspicion.peers))
    return named - {short_host(suspicion.host)}


def _may_be_otherwise(samples: Samples, suspicion: Suspicion, usual: _Measured) -> MetricTest | None:
    """The test if a flat metric does not refute; None if it does."""
    effect = usual.effect
    if effect is not None and effect.apart is not None:
        departs = usual.mechanism.slow * effect.apart > 0
        if departs and usual.mechanism.excess(effect.apart, effect.own) >= EFFECTS.least_dose * suspicion.excess:
            why = "it differs from its few peers as the trace says, before and after the trace, too"
            return untestable(suspicion, why)
    for hours in _ZONES:
        moved = TimeSpan(suspicion.window.since + 3600 * hours, suspicion.window.until + 3600 * hours)
        moved_suspicion = replace(suspicion, window=moved)
        if samples.hold(moved) and _measured(samples, usual.mechanism, moved_suspicion).confirms(suspicion.excess):
            when = "later" if hours > 0 else "earlier"
            why = f"metrics show it {abs(hours):g} h {when}: write times as seconds since 1970 UTC"
            return untestable(suspicion, why)
    if usual.mechanism is not LINK:
        return None
    host = short_host(suspicion.host)
    try:
        errors = effect_of(samples, ERRORS, host, suspicion.window, _peers(samples, suspicion), 1)
    except TooLittleError as error:
        why = f"the link rate is as usual, but errors on it are not known: {error}"
        return _lacking(suspicion, why, ERRORS, missing=error.missing)
    if errors.size > EFFECTS.significant * errors.sigma:
        why = f"the link rate is as usual, but {ERRORS} grows by {errors.size:.2g} a second"
        return untestable(suspicion, why)
    return None


def _why_unclear(usual: _Measured, suspicion: Suspicion) -> str:
    """Why a measured metric neither confirms nor refutes."""
    low, high = sorted((usual.predicts(-_OF_95), usual.predicts(_OF_95)))
    comparison = (
        f"{usual.metric} predicts {1 + low:.2f}x to {1 + high:.2f}x, the trace shows {1 + suspicion.excess:.2f}x"
    )
    if usual.significant and usual.predicts() > EFFECTS.most_dose * suspicion.excess:
        return f"{comparison}: more than twice as much"
    return f"{comparison}: too much noise; sample more often"


def _concluded(
    samples: Samples, suspicion: Suspicion, measured: _Measured, verdict: MetricVerdict, usual: _Measured
) -> MetricTest:
    """The test with its sentence: "confirmed by metrics: SM clock 1,410 against 1,980 MHz ... predicts 1.40x, ..."."""
    effect, mechanism, metric = measured.effect, measured.mechanism, measured.metric
    assert effect is not None
    usually = effect.own - effect.size if is_counter(metric) else effect.own * math.exp(-effect.size)
    own, peers = (_figure(value / mechanism.scale) for value in (effect.own, usually))
    device = "" if effect.device is None else f" ({_device(effect.device)})"
    facts = f"{mechanism.what} {own} against {peers} {mechanism.unit} on {short(suspicion.host)}{device}"
    dose = f"predicts {1 + measured.predicts():.2f}x, the trace shows {1 + suspicion.excess:.2f}x"
    compared = "" if effect.basis == USUAL_BASIS else f"; compared with {effect.basis}"
    opening = str(verdict)
    if mechanism is not usual.mechanism and (mechanism, usual.mechanism) != (CPU_LIMIT, CPU_PRESSURE):
        opening = f"corrected, not the {usual.mechanism.what}"
    return MetricTest(
        host=suspicion.host,
        device=effect.device,
        part=suspicion.part,
        verdict=verdict,
        shows=suspicion.excess,
        mechanism=mechanism.name,
        metric=metric,
        predicts=measured.predicts(),
        interval=sorted((measured.predicts(-_OF_95), measured.predicts(_OF_95))),
        sampling_s=effect.sampling_s,
        samples=effect.samples,
        basis=effect.basis,
        band=band_of(samples, metric, effect.series, _peers(samples, suspicion), suspicion.window, mechanism),
        sentence=f"{opening} by metrics: {facts} {dose}{compared}",
    )


def _device(name: str) -> str:
    return f"GPU {name}" if name.isdigit() else short(name)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def band_of(
    samples: Samples, metric: str, series: int, peers: Collection[str], window: TimeSpan, mechanism: Mechanism
) -> Band:
    """The series and its peers' around the interval."""
    margin = _MARGIN * (window.until - window.since)
    since, until = window.since - margin, window.until + margin
    width = (until - since) / _POINTS
    values = samples.of_metric(metric).filter(pl.col("time").is_between(since, until))
    is_own = pl.col("series") == series
    thinned = (
        values.filter(is_own | pl.col("host").is_in(list(peers)))
        .with_columns(value=pl.col("value") / mechanism.scale, point=((pl.col("time") - since) / width).floor())
        .group_by("point")
        .agg(
            own=pl.col("value").filter(is_own).mean(),
            low=pl.col("value").filter(~is_own).quantile(_LOW),
            high=pl.col("value").filter(~is_own).quantile(_HIGH),
        )
        .sort("point")
    )
    time = (since + (thinned["point"] + 0.5) * width).to_list()
    own_values, low, high = (thinned[name].round_sig_figs(5).to_list() for name in ("own", "low", "high"))
    return Band(mechanism.unit, time, own_values, low, high, window.since, window.until)
