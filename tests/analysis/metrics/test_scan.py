"""The blind scan and the doctor."""

from __future__ import annotations

import polars as pl
import pytest

from tests.analysis.metrics.fleet import BEGAN, CLOCK, ERRORS, RATE, Fault, fleet
from tracekit.analysis.metrics.effects import EFFECTS, _limits, scanned
from tracekit.analysis.metrics.samples import Samples, lacking
from tracekit.base.errors import FormatError


def scan(frame: pl.DataFrame, *baselines: int) -> list[tuple[str, str]]:
    alarms = scanned(Samples.of(frame), [Samples.of(fleet(seed, lasts_s=1800)) for seed in baselines])
    return [(alarm.host, alarm.metric) for alarm in alarms]


@pytest.mark.slow
def test_healthy_fleets_raise_no_alarm() -> None:
    assert scan(fleet(1, lasts_s=1800), 2, 3) == []
    assert scan(fleet(1, lasts_s=1800)) == []


@pytest.mark.slow
def test_a_small_change_for_five_minutes_shows_with_baselines_and_on_that_host_alone() -> None:
    frame = fleet(1, Fault(3, "compute", 0.03, 600, 900), lasts_s=1800, devices=1)
    assert scan(frame, 2, 3) == [("node-03", CLOCK)]


def test_an_alarm_says_when_and_how_much() -> None:
    frame = fleet(1, Fault(3, "compute", 0.25, 600, 900), lasts_s=1800, devices=1)
    (alarm,) = scanned(Samples.of(frame), [])
    assert (alarm.host, alarm.device, alarm.metric) == ("node-03", "0", CLOCK)
    assert abs(alarm.change + 0.2) < 0.01
    assert abs(alarm.from_s - BEGAN - 600) < 100
    assert abs(alarm.to_s - BEGAN - 900) < 100


def test_alarms_that_begin_together_are_in_the_order_of_their_devices() -> None:
    frame = fleet(1, Fault(3, "compute", 0.25, 600, 900), lasts_s=1800, devices=1)
    slow = frame.filter(host="node-03")
    more = [slow.with_columns(device=pl.lit(str(device), pl.Categorical)) for device in range(1, 8)]
    frame = pl.concat([frame, *more])
    alarms = [alarm for alarm in scanned(Samples.of(frame), []) if alarm.host == "node-03"]
    assert len({alarm.from_s for alarm in alarms}) == 1
    assert [alarm.device for alarm in alarms] == list("01234567")


def test_a_fault_of_most_of_the_time_is_no_fingerprint() -> None:
    for lasted_s in (1260, 1800):
        frame = fleet(1, Fault(3, "compute", 0.25, 0, lasted_s), lasts_s=1800, devices=1)
        (alarm,) = scanned(Samples.of(frame), [])
        assert (alarm.host, alarm.metric) == ("node-03", CLOCK)
        assert abs(alarm.change + 0.2) < 0.01
        assert abs(alarm.to_s - BEGAN - lasted_s) < 100


def test_what_healthy_runs_depart_is_no_alarm() -> None:
    """Most samples do not depart at all, so that the largest departures are the limits, but for the margin."""
    departures = pl.DataFrame({"smoothed": [0.0] * 98 + [-0.1, 0.2]})
    assert _limits([departures.head(99), departures.tail(99)], departures.head(1)) == pytest.approx(
        (-0.1 * EFFECTS.margin, 0.2 * EFFECTS.margin)
    )
    frame = fleet(1, Fault(3, "compute", 0.25, 300, 600), hosts=8, devices=1)
    healthy = Samples.of(fleet(2, hosts=8, devices=1))
    alarms = scanned(Samples.of(frame), [healthy])
    assert {(alarm.host, alarm.metric) for alarm in alarms} == {("node-03", CLOCK)}


def test_a_metric_of_few_hosts_or_without_values_is_passed_over() -> None:
    frame = fleet(1, Fault(3, "compute", 0.25, 300, 600), hosts=8, devices=1)
    few = (pl.col("metric") != RATE) | (pl.col("host") == "node-00")
    zero = pl.when(pl.col("metric") == RATE).then(0.0).otherwise("value")
    expected = list(scanned(Samples.of(frame.filter(pl.col("metric") != RATE)), []))
    assert [(alarm.host, alarm.metric) for alarm in expected] == [("node-03", CLOCK)]
    assert list(scanned(Samples.of(frame.filter(few)), [])) == expected
    assert list(scanned(Samples.of(frame.with_columns(value=zero)), [])) == expected


@pytest.mark.parametrize("few", [pl.col("host").is_in(["node-01", "node-02", "node-03"]), pl.col("time") < BEGAN + 30])
def test_what_cannot_be_compared_is_not_called_healthy(few: pl.Expr) -> None:
    with pytest.raises(FormatError, match="too little to compare"):
        list(scanned(Samples.of(fleet(1, lasts_s=1800, devices=1).filter(few)), []))


def test_the_doctor_names_what_some_or_all_hosts_lack_with_the_line_to_add() -> None:
    without = ~((pl.col("metric") == CLOCK) & (pl.col("host") == "node-02")) & (pl.col("metric") != ERRORS)
    missing = {each.metric: each for each in lacking(Samples.of(fleet(1).filter(without)))}
    assert missing.keys() == {CLOCK, ERRORS, "DCGM_FI_DEV_POWER_VIOLATION", "DCGM_FI_DEV_THERMAL_VIOLATION"}
    assert missing[CLOCK].why.startswith("on node-02, ")
    assert missing[CLOCK].line == "DCGM_FI_DEV_SM_CLOCK, gauge, SM clock frequency (in MHz)."
    assert missing[ERRORS].why.startswith("on all hosts, ")
    assert (missing[ERRORS].exporter, missing[ERRORS].line) == ("node_exporter", "--collector.infiniband (the default)")
