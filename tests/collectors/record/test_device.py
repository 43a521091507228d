"""Timing a GPU that the test plays: durations, drift, pools, hangs, captures, failures; nobody ever waits."""

import gc

import pytest

from tests.collectors.fake_cuda import CudaError, FakeCuda
from tracekit.collectors.merge.record_times import fit_device_clock
from tracekit.collectors.record.device import PENDING_LIMIT, POOL_LIMIT, DeviceClock, Mark
from tracekit.collectors.record.wire_format import NONE, Category, Flag

US, MS, S = 1_000, 1_000_000, 1_000_000_000
DRIFT = 30e-6


class Host:
    """The host's clock: each look at it takes a while, so that readings have a width."""

    def __init__(self):
        self.now_ns = 5 * S

    def __call__(self):
        self.now_ns += 300
        return self.now_ns


class Rig:
    """A device clock on a fake GPU, with what it delivered."""

    def __init__(self, drift=DRIFT, **options):
        self.host = Host()
        self.cuda = FakeCuda(self.host, drift)
        self.records, self.readings, self.opened, self.errors = [], [], [], []
        self.clock = DeviceClock(
            self.cuda,
            self.records.append,
            self.readings.append,
            opened=self.opened.append,
            failed=self.errors.append,
            host_clock=self.host,
            **options,
        )

    def wait(self, ns):
        self.host.now_ns += ns

    def op(self, duration_ns, category=Category.COMPUTE, step=1, stream=None):
        """One op of one kernel; returns its true begin and end."""
        begin = self.clock.instant()
        truth = self.cuda.launch(duration_ns, stream)
        self.clock.keep((category, 0, 0, step, NONE, NONE, NONE), begin, self.clock.instant(), 0)
        return truth

    def end_step(self, step):
        self.clock.keep((Category.STEP, Flag.COMPLETE, 1, step, NONE, NONE, NONE), 0, self.host(), 0)
        self.clock.tick()

    def ops(self, category=Category.COMPUTE):
        return [record for record in self.records if record[0] == category]

    def host_times(self):
        """Begin and end of each delivered op as the merge sees them."""
        import numpy as np

        fit = fit_device_clock(self.readings)
        times = np.array([record[7:9] for record in self.ops()], np.int64)
        return fit.to_host(times[:, 0]), fit.to_host(times[:, 1]), fit


@pytest.fixture
def rig():
    made = Rig()
    made.clock.tick()
    return made


def test_the_clock_opens_when_the_process_uses_cuda_and_not_before():
    rig = Rig()
    rig.cuda.initialized = False
    rig.clock.tick()
    assert not rig.clock.active
    assert isinstance(rig.clock.instant(), int)
    assert rig.cuda.made_events == 0
    rig.cuda.initialized, rig.cuda.device = True, 3
    rig.clock.tick()
    assert rig.opened == [3]


def test_durations_are_right_to_a_microsecond_ten_minutes_into_the_run(rig):
    durations = []
    for step in range(600):
        duration_ns = 5 * MS + 7_919 * step
        durations.append(duration_ns)
        rig.op(duration_ns)
        rig.wait(S)
        rig.end_step(step)
    measured = [end - begin for *_, begin, end, _ in rig.ops()]
    assert len(measured) == 600
    assert max(abs(got - want) for got, want in zip(measured, durations, strict=True)) <= US


@pytest.mark.parametrize("drift", [50e-6, -120e-6])
def test_drift_is_removed(drift):
    """An hour: the clock goes wrong by a fifth of a second, the merged times by the width of a reading."""
    rig = Rig(drift)
    rig.cuda.latency_ns = 500
    rig.clock.tick()
    truth = []
    for step in range(1200):
        truth.append(rig.op(20 * MS))
        rig.wait(3 * S)
        rig.end_step(step)
    begin, end, fit = rig.host_times()
    off = max(max(abs(b - t[0]), abs(e - t[1])) for b, e, t in zip(begin.tolist(), end.tolist(), truth, strict=True))
    assert off < 5 * US
    assert off <= 2 * fit.uncertainty_ns + 2 * US
    assert fit.drift == pytest.approx(-drift / (1 + drift), abs=1e-7)
    assert abs(rig.ops()[-1][7] - truth[-1][0]) > 100 * MS


def test_the_base_is_renewed_every_ten_seconds_and_sooner_at_first(rig):
    for step in range(100):
        rig.wait(S)
        rig.end_step(step)
    gaps = [(b[0] - a[0]) / S for a, b in zip(rig.readings[:-1], rig.readings[1:], strict=True)]
    assert [round(gap) for gap in gaps[:5]] == [1, 2, 4, 8, 10]
    assert max(gaps) < 12


def test_a_reading_of_a_busy_gpu_is_taken_later_and_trusted_less():
    """With one hardware queue the event waits behind all that was launched."""
    rig = Rig()
    rig.clock.tick()
    for step in range(1, 60):
        busy = 20 <= step < 30
        rig.cuda.latency_ns = 400 * MS if busy else 1 * US
        rig.wait(S)
        rig.end_step(step)
    fit = fit_device_clock(rig.readings)
    assert fit.readings < len(rig.readings)
    assert fit.uncertainty_ns < 20 * US


def test_with_one_queue_for_all_streams_a_reading_is_a_step_wide_and_no_wider():
    """Every event waits 200 ms behind other work, and is looked for at the next step, half a second later."""
    rig = Rig()
    rig.cuda.latency_ns = 200 * MS
    for step in range(1, 200):
        rig.wait(500 * MS)
        rig.end_step(step)
    assert len(rig.readings) > 8
    assert max(after - before for _, before, after in rig.readings) < 600 * MS


def test_an_op_that_ends_on_a_stream_that_never_waited_for_its_begin_is_not_lost(rig):
    """The device has passed the end and not the begin: the op waits, and the clock goes on."""
    rig.cuda.launch(50 * MS)
    begin = rig.clock.instant()
    with rig.cuda.Stream():
        end = rig.clock.instant()
    rig.clock.keep((Category.COLLECTIVE, 0, 0, 1, NONE, NONE, NONE), begin, end, 0)
    rig.wait(10 * MS)
    rig.clock.tick()
    assert (rig.records, rig.errors) == ([], [])
    rig.wait(50 * MS)
    rig.clock.tick()
    assert len(rig.records) == 1


def test_streams_run_beside_each_other_and_are_drained_oldest_first(rig):
    side = rig.cuda.Stream()
    with side:
        slow = rig.op(50 * MS)
    fast = rig.op(1 * MS)
    rig.wait(10 * MS)
    rig.clock.tick()
    assert rig.ops() == []  # the older op is not done
    rig.wait(50 * MS)
    rig.clock.tick()
    begin, end, _ = rig.host_times()
    assert [round((e - b) / MS) for b, e in zip(begin, end, strict=True)] == [50, 1]
    assert abs(int(begin[0]) - slow[0]) < 10 * US
    assert abs(int(begin[1]) - fast[0]) < 10 * US


def test_an_op_begins_where_its_stream_is_free_however_early_it_was_launched(rig):
    first, second = rig.op(30 * MS), rig.op(20 * MS)
    rig.wait(100 * MS)
    rig.clock.tick()
    begin, end, _ = rig.host_times()
    assert abs(int(begin[1]) - first[1]) < 10 * US
    assert abs(int(end[1]) - second[1]) < 10 * US


def test_a_step_is_over_when_its_ops_have_been_drained(rig):
    rig.op(30 * MS, step=4)
    rig.end_step(4)
    assert rig.records == []
    rig.wait(40 * MS)
    rig.clock.tick()
    assert [record[0] for record in rig.records] == [Category.COMPUTE, Category.STEP]
    assert rig.records[1][1] == Flag.COMPLETE


def test_compute_time_is_that_of_the_device(rig):
    rig.op(30 * MS)
    rig.op(10 * MS, category=Category.OPTIMIZER)
    rig.wait(100 * MS)
    rig.clock.tick()
    assert rig.clock.take_compute_ns() == pytest.approx(30 * MS, abs=10 * US)
    assert rig.clock.take_compute_ns() == 0


@pytest.mark.slow
def test_no_event_leaks_over_ten_thousand_steps(rig):
    for step in range(10_000):
        for _ in range(4):
            rig.op(1 * MS)
        rig.wait(6 * MS)
        rig.end_step(step)
    gc.collect()
    assert len(rig.ops()) >= 39_990
    assert rig.cuda.made_events < 50
    assert rig.cuda.live_events < 50


def test_marks_that_never_become_an_op_give_their_events_back(rig):
    for _ in range(1_000):
        rig.clock.instant()
    assert rig.cuda.made_events < 10


def test_a_gpu_that_hangs_costs_a_bounded_number_of_events_and_its_steps_are_not_whole(rig):
    rig.cuda.hangs = True
    for step in range(2 * PENDING_LIMIT // 16 + 10):
        for _ in range(16):
            rig.op(1 * MS, step=step)
        rig.end_step(step)
    assert rig.clock.dropped > 0
    assert rig.cuda.live_events <= 2 * PENDING_LIMIT + POOL_LIMIT + 10
    assert rig.ops() == []
    assert rig.clock.close() > PENDING_LIMIT // 2


def test_a_step_that_lost_ops_is_not_whole():
    rig = Rig(pending_limit=3)
    rig.clock.tick()
    for _ in range(5):
        rig.op(1 * MS, step=7)
    rig.wait(50 * MS)
    rig.clock.tick()
    rig.op(1 * MS, step=7)
    rig.end_step(7)
    rig.wait(50 * MS)
    rig.end_step(8)
    flags = {record[3]: record[1] for record in rig.records if record[0] == Category.STEP}
    assert flags == {7: 0, 8: Flag.COMPLETE}
    assert rig.clock.dropped == 2


def test_nothing_is_recorded_or_asked_while_a_graph_is_captured(rig):
    """The fake GPU raises on both, which would switch the clock off."""
    before = rig.op(1 * MS)
    rig.cuda.capturing = True
    made, queries = rig.cuda.made_events, rig.cuda.queries
    rig.wait(20 * S)
    assert isinstance(rig.clock.instant(), int)
    rig.op(1 * MS, step=2)
    rig.end_step(2)
    assert (rig.cuda.made_events, rig.cuda.queries) == (made, queries)
    rig.cuda.capturing = False
    after = rig.op(1 * MS, step=3)
    rig.wait(1 * S)
    rig.end_step(3)
    assert rig.errors == []
    assert [record[1] & Flag.DEVICE_CLOCK != 0 for record in rig.ops()] == [False, True, True]
    assert before[0] < after[0]


def test_an_op_on_another_device_is_timed_on_the_host(rig):
    rig.cuda.streams.append(type(rig.cuda.streams[0])(rig.cuda, device_index=1))
    assert isinstance(rig.clock.instant(), int)


@pytest.mark.parametrize("when", ["query", "record"])
def test_a_device_that_fails_ends_the_clock_once_and_host_times_go_on(rig, when):
    rig.op(1 * MS, step=1)
    rig.cuda.broken = CudaError("an illegal memory access was encountered")
    if when == "query":
        rig.end_step(1)
    rig.op(1 * MS, step=2)
    rig.end_step(2)
    rig.op(1 * MS, step=3)
    assert len(rig.errors) == 1
    assert not rig.clock.active
    assert [record[3] for record in rig.ops()] == [1, 2, 3]
    assert all(record[1] & Flag.DEVICE_CLOCK == 0 for record in rig.records)
    assert all(record[7] <= record[8] <= rig.host.now_ns for record in rig.records)


def test_long_steps_are_drained_inside(rig):
    for _ in range(300):
        rig.op(100 * MS)
        rig.wait(101 * MS)
    assert len(rig.ops()) > 280
    assert len(rig.readings) >= 4


def test_the_wait_of_a_transfer_is_on_the_same_clock(rig):
    head = (Category.P2P, 0, 0, 1, 0, 0, 1)
    begin = rig.clock.instant()
    rig.cuda.launch(3 * MS)
    waits = rig.clock.instant()
    rig.cuda.launch(4 * MS)
    rig.clock.keep(head, begin, rig.clock.instant(), waits)
    rig.wait(20 * MS)
    rig.clock.tick()
    ((*_, begin_ns, end_ns, wait_ns),) = rig.records
    assert wait_ns - begin_ns == pytest.approx(3 * MS, abs=10 * US)
    assert end_ns - wait_ns == pytest.approx(4 * MS, abs=10 * US)


def test_closing_delivers_what_is_done_and_counts_the_rest(rig):
    rig.op(1 * MS)
    rig.wait(5 * MS)
    rig.op(500 * MS)
    rig.end_step(1)
    assert rig.clock.close() == 1
    assert len(rig.ops()) == 1
    assert isinstance(rig.clock.instant(), int)
    assert not isinstance(rig.clock.instant(), Mark)


def test_one_reading_gives_the_offset():
    fit = fit_device_clock([(1_000, 5_000, 5_400)])
    import numpy as np

    assert fit.to_host(np.array([1_000, 3_000])).tolist() == [5_200, 7_200]
    assert fit.uncertainty_ns == 200


def test_readings_while_another_process_has_the_gpu_count_for_nothing():
    """Of readings 11 us, 0.27 s and 0.81 s wide, the first alone is believed; how far the clock drifts is unknown."""
    second = 1_000_000_000
    wide = [(0, 0, 11_000), (second, second - 200_000_000, second + 65_000_000), (4 * second, 3 * second, 4 * second)]
    fit = fit_device_clock(wide)
    assert (fit.readings, fit.readings_taken, fit.drift) == (1, 3, 0.0)
    assert fit.uncertainty_ns == 200_000  # 50 ppm over 4 s


def test_a_late_reading_that_is_wider_still_shows_the_drift():
    """20 ppm over 100 s are 2 ms: more than a reading 100 us wide leaves open."""
    fit = fit_device_clock([(0, 0, 10_000), (100_000_000_000, 100_002_000_000 - 45_000, 100_002_000_000 + 55_000)])
    assert fit.drift == pytest.approx(2e-5)
