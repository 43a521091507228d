"""Device timing with a device played by the test."""

from dataclasses import dataclass, field

from tracekit.collectors.runtime.device import REBASE_AFTER_NS, DeviceTimer


@dataclass
class FakeDevice:
    """A stream whose clock the test moves; a mark is passed once the stream has come that far."""

    host_ns: int = 1_000
    passed: int = 0
    placed: list = field(default_factory=list)
    free: list = field(default_factory=list)

    def clock(self) -> int:
        return self.host_ns

    def place(self):
        mark = self.free.pop() if self.free else object()
        self.placed.append([mark, self.host_ns])
        return mark

    def done(self, mark) -> bool:
        return any(held is mark for held, _ in self.placed[: self.passed])

    def elapsed_ms(self, earlier, later) -> float:
        when = {id(mark): at for mark, at in self.placed}
        return (when[id(later)] - when[id(earlier)]) / 1e6

    def release(self, mark) -> None:
        self.free.append(mark)


def timer():
    """A timer with its base mark placed and passed."""
    device = FakeDevice()
    made = DeviceTimer(device, device.clock, pending_limit=3)
    device.passed = 1
    made.rebase()
    return device, made


def timed(device, made, delivered, start, end):
    """One op on the device."""
    device.host_ns = start
    begin = made.begin()
    device.host_ns = end
    made.end(begin, lambda *times: delivered.append(times))


def test_only_what_the_device_has_passed_is_drained_oldest_first():
    """Nobody waits for the rest."""
    device, made = timer()
    delivered = []
    timed(device, made, delivered, 5_000, 9_000)
    timed(device, made, delivered, 10_000, 30_000)
    assert made.drain() == 0
    device.passed = 3
    assert made.drain() == 1
    device.passed = 5
    assert made.drain() == 1
    assert delivered == [(5_000, 9_000), (10_000, 30_000)]
    assert len(device.free) == 4


def test_a_device_that_hangs_costs_a_bounded_number_of_marks():
    """More is dropped and counted."""
    device, made = timer()
    for at in range(5):
        timed(device, made, [], at * 100, at * 100 + 50)
    assert made.dropped == 2


def test_the_base_moves_on():
    """A new base after a while, once nothing is pending on the old one."""
    device, made = timer()
    delivered = []
    device.host_ns = REBASE_AFTER_NS + 5_000
    device.passed = 2
    made.rebase()
    timed(device, made, delivered, device.host_ns + 100, device.host_ns + 400)
    device.passed = 4
    made.drain()
    assert delivered == [(REBASE_AFTER_NS + 5_100, REBASE_AFTER_NS + 5_400)]
