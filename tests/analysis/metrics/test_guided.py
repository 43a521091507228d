"""The guided test: doses worked out by hand, faults that go on outside of the trace, and what cannot be verdicts_on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis.metrics.fleet import BEGAN, CLOCK, ERRORS, PRESSURE, RATE, Fault, fleet
from tests.cases import case
from tests.properties import examples
from tracekit.analysis.metrics.guided import Suspicion, verdicts_on
from tracekit.analysis.metrics.samples import COLUMNS, Samples, TimeSpan
from tracekit.report.hardware import MechanismName, MetricTest, MetricVerdict

DURING = TimeSpan(BEGAN + 300, BEGAN + 540)


def asked(
    frame: pl.DataFrame, host: str = "node-00", part: str = "compute", excess: float = 0.3, window: TimeSpan = DURING
) -> MetricTest:
    (test,) = verdicts_on(Samples.of(frame), [Suspicion(host, part, excess, window)])
    return test


def exact(metric: str, own: float, peers: float, *, counter: bool = False) -> pl.DataFrame:
    """Six hosts without noise; node-00 has another value, or rate, from 300 s to 540 s of 900 s."""
    rows = []
    for host in range(6):
        total = 0.0
        for second in range(0, 900, 2):
            value = own if host == 0 and 300 <= second <= 540 else peers
            total += 2 * value
            rows.append((BEGAN + second, f"node-{host:02}", None, None, metric, total if counter else value))
    return pl.DataFrame(
        rows, {name: COLUMNS[name] for name in ("time", "host", "device", "uuid", "metric", "value")}, orient="row"
    )


class Dose(NamedTuple):
    metric: str
    own: float
    peers: float
    part: str
    predicts: float
    mechanism: MechanismName


@pytest.mark.parametrize(
    "dose",
    [
        Dose(CLOCK, 1410, 1980, "compute", 1980 / 1410 - 1, MechanismName.CLOCK),
        Dose(RATE, 25e9, 50e9, "network", 1.0, MechanismName.LINK),
        Dose("node_network_speed_bytes", 1.25e9, 12.5e9, "network", 9.0, MechanismName.LINK),
        Dose(PRESSURE, 0.2, 0.0, "process", 0.25, MechanismName.CPU_PRESSURE),  # a fifth of the time: 1 / (1 - 0.2)
        Dose(PRESSURE, 0.5, 0.0, "compute", 1.0, MechanismName.CPU_PRESSURE),  # corrected: not the clock
    ],
)
def test_doses_are_those_worked_out_by_hand(dose: Dose) -> None:
    frame = exact(dose.metric, dose.own, dose.peers, counter=dose.metric == PRESSURE)
    test = asked(frame, part=dose.part, excess=dose.predicts)
    assert (test.verdict, test.mechanism, test.metric) == (MetricVerdict.CONFIRMED, dose.mechanism, dose.metric)
    assert test.predicts == pytest.approx(dose.predicts, rel=0.01)
    assert test.interval is not None
    assert test.interval[0] <= test.predicts <= test.interval[1]
    assert (test.sampling_s, test.shows) == (2.0, dose.predicts)


def test_the_sentence_has_both_clocks_and_both_doses() -> None:
    test = asked(exact(CLOCK, 1410, 1980), excess=0.38)
    assert test.sentence == (
        "confirmed by metrics: SM clock 1,410 against 1,980 MHz on node-00 predicts 1.40x, the trace shows 1.38x"
    )


def test_a_clock_that_predicts_more_than_twice_what_the_trace_shows_tells_nothing() -> None:
    test = asked(exact(CLOCK, 1410, 1980), excess=0.1)
    assert (test.verdict, test.missing) == (MetricVerdict.NOT_TESTABLE, ())
    assert test.sentence.endswith("predicts 1.40x to 1.41x, the trace shows 1.10x: more than twice as much")


@pytest.mark.parametrize(("since", "until"), [(0, 900), (100, 900), (0, 700), (200, 700)])
def test_a_fault_that_goes_on_outside_of_the_trace_is_confirmed(since: float, until: float) -> None:
    """The past is the healthy part, or peers alone: never the same fault."""
    test = asked(fleet(1, Fault(0, "compute", 0.2, since, until)), excess=0.2)
    assert (test.verdict, test.mechanism) == (MetricVerdict.CONFIRMED, MechanismName.CLOCK)
    assert test.predicts == pytest.approx(0.2, abs=0.02)


def test_an_innocent_host_with_a_fault_at_another_time_is_refuted() -> None:
    assert asked(fleet(2, Fault(0, "compute", 0.3, 600, 900))).verdict is MetricVerdict.REFUTED


@pytest.mark.slow
@examples(24)
@given(
    seed=st.integers(0, 10_000),
    part=st.sampled_from(["compute", "network", "process"]),
    excess=st.floats(0.03, 1.0),
    length=st.floats(60, 400),
    guilty=st.integers(1, 9),
)
def test_innocent_hosts_are_never_confirmed(seed: int, part: str, excess: float, length: float, guilty: int) -> None:
    frame = fleet(seed, Fault(guilty, part, excess, 300, 300 + length), hosts=10, devices=1)
    window = TimeSpan(BEGAN + 300, BEGAN + 300 + length)
    tests = verdicts_on(
        Samples.of(frame), [Suspicion(f"node-{host:02}", part, excess, window) for host in range(10) if host != guilty]
    )
    assert {test.verdict for test in tests} <= {MetricVerdict.REFUTED, MetricVerdict.NOT_TESTABLE}


def test_duplicates_and_values_that_are_no_numbers_change_nothing() -> None:
    frame = fleet(3, Fault(0, "compute", 0.3, 300, 540))
    spoilt = pl.concat([frame, frame.head(5000), frame.head(500).with_columns(value=pl.lit(float("nan")))])
    assert Samples.of(spoilt).dropped == 5500
    assert asked(spoilt) == asked(frame)


def test_a_clock_of_zero_is_no_sample() -> None:
    frame = exact(CLOCK, 0.0, 1980)
    test = asked(frame)
    assert (test.verdict, test.missing) == (MetricVerdict.NOT_TESTABLE, ())
    assert "0 samples of DCGM_FI_DEV_SM_CLOCK in 240 s" in test.sentence


def test_a_reset_of_a_counter_is_no_negative_rate() -> None:
    frame = exact(PRESSURE, 0.2, 0.0, counter=True)
    falls = (pl.col("host") == "node-00") & (pl.col("time") > BEGAN + 400)
    test = asked(
        frame.with_columns(value=pl.when(falls).then(pl.col("value") - 20).otherwise("value")),
        part="process",
        excess=0.25,
    )
    assert test.predicts == pytest.approx(0.25, rel=0.01)


def test_a_slow_link_is_not_refuted_without_its_errors() -> None:
    frame = fleet(4)
    assert asked(frame, part="network", excess=1.0).verdict is MetricVerdict.REFUTED
    test = asked(frame.filter(pl.col("metric") != ERRORS), part="network", excess=1.0)
    assert (test.verdict, test.missing) == (MetricVerdict.NOT_TESTABLE, (ERRORS,))
    grows = (pl.col("metric") == ERRORS) & (pl.col("host") == "node-00") & (pl.col("time") > BEGAN + 300)
    erring = frame.with_columns(
        value=pl.when(grows).then(pl.col("value") + (pl.col("time") - BEGAN)).otherwise("value")
    )
    test = asked(erring, part="network", excess=1.0)
    assert test.verdict is MetricVerdict.NOT_TESTABLE
    assert f"{ERRORS} grows" in test.sentence


def test_few_peers_leave_the_own_past_and_a_lasting_difference_is_not_refuted() -> None:
    few = fleet(5, Fault(0, "compute", 0.3, 300, 540), hosts=3)
    test = asked(few)
    assert test.verdict is MetricVerdict.CONFIRMED
    assert test.sentence.endswith("; compared with its own past only, as it has fewer than 4 peers")
    assert asked(fleet(5, hosts=3)).verdict is MetricVerdict.REFUTED
    assert asked(fleet(5, Fault(0, "compute", 0.3, 0, 900), hosts=3)).verdict is MetricVerdict.NOT_TESTABLE
    test = asked(fleet(6, hosts=5, devices=1), window=TimeSpan(BEGAN - 5, BEGAN + 899))
    assert test.verdict is MetricVerdict.REFUTED
    assert test.sentence.endswith("peers only, as it has no past in which it agrees with them")


def test_what_cannot_be_tested_says_why_and_is_never_refuted() -> None:
    frame = fleet(6)
    other = frame.with_columns(pl.col("host").cast(pl.String))
    of_0, of_1 = pl.col("host") == "node-00", pl.col("host") == "node-01"
    renamed = pl.when(of_1).then(pl.lit("node-00")).otherwise(pl.col("host"))
    domains = pl.when(of_0).then(pl.lit("node-00.a")).when(of_1).then(pl.lit("node-00.b")).otherwise(pl.col("host"))
    card = pl.when((pl.col("metric") == CLOCK) & (of_0 | of_1)).then(pl.lit("GPU-1"))
    replaced = pl.when((pl.col("metric") == CLOCK) & of_0).then(
        pl.when(pl.col("time") < BEGAN + 450).then(pl.lit("GPU-1")).otherwise(pl.lit("GPU-2"))
    )
    clock_of_0 = frame.filter((pl.col("metric") == CLOCK) & of_0)
    asks = {
        "too few samples outside of the interval": (fleet(6, hosts=3), "node-00", TimeSpan(BEGAN, BEGAN + 880)),
        f"{CLOCK} of node-00 has two values at a time": (
            pl.concat([frame, clock_of_0.with_columns(pl.col("value") - 30)]),
            "node-00",
            DURING,
        ),
        "device 0 was replaced, or hosts share a name: GPU-1 and GPU-2": (
            frame.with_columns(uuid=replaced.cast(pl.Categorical)),
            "node-00",
            DURING,
        ),
        "no metric names the host": (frame, "node-77", DURING),
        f"no samples of {CLOCK}": (frame.filter(~((pl.col("metric") == CLOCK) & of_0)), "node-00", DURING),
        "6 whole ones are needed": (frame, "node-00", TimeSpan(BEGAN + 300, BEGAN + 308)),
        "times do not overlap": (frame, "node-00", TimeSpan(BEGAN + 9000, BEGAN + 9300)),
        "a time zone would explain +2 h": (frame, "node-00", TimeSpan(BEGAN + 7500, BEGAN + 7700)),
        "hosts share a name": (other.with_columns(host=renamed.cast(pl.Categorical)), "node-00", DURING),
        "two hosts share the name node-00: node-00.a, node-00.b": (
            other.with_columns(host=domains.cast(pl.Categorical)),
            "node-00",
            DURING,
        ),
        "device GPU-1 moved: it is reported by node-00 and node-01": (
            frame.with_columns(uuid=card.cast(pl.Categorical)),
            "node-00",
            DURING,
        ),
    }
    for why, (spoilt, host, window) in asks.items():
        with case(why):
            test = asked(spoilt, host, window=window)
            assert test.verdict is MetricVerdict.NOT_TESTABLE
            assert why in (test.reason or "")
            assert (test.metric, test.predicts, test.interval, test.sampling_s) == (None, None, None, None)


def test_a_part_that_no_metric_shows_and_a_suspicion_without_times_are_not_tested() -> None:
    test = asked(fleet(6, hosts=5, devices=1), part="data")
    assert test.verdict is MetricVerdict.NOT_TESTABLE
    assert test.reason == "no metric shows the part data; one of compute, network, process does"
    (test,) = verdicts_on(
        Samples.of(fleet(6, hosts=5, devices=1)), [Suspicion("node-00", "compute", 0.3, DURING, untestable="no times")]
    )
    assert (test.verdict, test.reason) == (MetricVerdict.NOT_TESTABLE, "no times")


def test_a_clock_that_varies_too_much_tells_nothing() -> None:
    frame = exact(CLOCK, 1500, 1950)
    noise = np.random.default_rng(0).lognormal(0, 0.3, frame.height)
    test = asked(frame.with_columns(pl.col("value") * noise))
    assert test.verdict is MetricVerdict.NOT_TESTABLE
    assert "too much noise; sample more often" in test.sentence


def test_times_of_another_zone_are_recognised_by_the_same_fault_whole_hours_away() -> None:
    frame = fleet(9, Fault(0, "compute", 0.3, 7500, 7740), lasts_s=9000, every_s=5, hosts=6, devices=1)
    test = asked(frame)  # two hours earlier
    assert test.verdict is MetricVerdict.NOT_TESTABLE
    assert "metrics show it 2 h later: write times" in test.sentence
    assert asked(frame, "node-01").verdict is MetricVerdict.REFUTED


def test_names_of_hosts_are_compared_without_domain_and_case() -> None:
    test = asked(fleet(7, Fault(0, "compute", 0.3, 300, 540)), "NODE-00.cluster.local")
    assert (test.host, test.verdict, test.device) == ("NODE-00.cluster.local", MetricVerdict.CONFIRMED, "0")


def test_the_band_holds_the_suspect_outside_of_its_peers() -> None:
    band = asked(fleet(8, Fault(0, "compute", 0.3, 300, 540))).band
    assert band is not None
    assert (band.from_s, band.to_s, band.unit) == (DURING.since, DURING.until, "MHz")
    inside = [
        (own, low)
        for time, own, low in zip(band.time, band.own, band.low, strict=True)
        if own is not None and low is not None and DURING.since + 10 < time < DURING.until - 10
    ]
    assert inside
    assert all(own < low for own, low in inside)
