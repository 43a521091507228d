"""What timing on a GPU costs the training thread beside CUDA's own calls: those are no-ops here."""

import gc
import tempfile
import time
import types
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.measure import table

#: Ops between two drains, a step's worth.
OPS_PER_STEP = 100
AIM_US = 5.0
ROUNDS = 5


class _Event:
    """An event of a GPU that is always done."""

    def record(self, stream: object) -> None:
        """Nothing to record."""

    def query(self) -> bool:
        """Done."""
        return True

    def elapsed_time(self, _end: object) -> float:
        """A millisecond."""
        return 1.0


class _Cuda:
    """`torch.cuda` with one stream and nothing on it."""

    def __init__(self) -> None:
        self.stream = types.SimpleNamespace(device_index=0)
        self.Event = lambda enable_timing: _Event() if enable_timing else None

    def is_initialized(self) -> bool:
        return True

    def is_current_stream_capturing(self) -> bool:
        return False

    def current_stream(self) -> object:
        return self.stream

    def current_device(self) -> int:
        return 0

    def Stream(self, priority: int = 0) -> object:  # noqa: N802  torch's name
        return types.SimpleNamespace(device_index=0, priority=priority)


def section() -> str:
    """Cost per recorded op: two marks, the record, and its share of draining."""
    if find_spec("torch") is None:
        return "## Timing on a GPU\n\nNot measured: torch is not installed (extra `torch`)."
    with tempfile.TemporaryDirectory() as folder:
        on_host, on_device, reading = costs_us(Path(folder), _Cuda())
    rows = [
        ["forward or backward, host clock", f"{on_host:.2f} us"],
        ["forward or backward, device clock, drained", f"{on_device:.2f} us"],
        ["reading the clock, once in 10 s", f"{reading:.1f} us"],
    ]
    intro = (
        "Added to the training thread per recorded op by Python, on a GPU that is played: CUDA's own calls come on\n"
        f"top (`python -m benchmarks gpu` measures them). Aim: under {AIM_US:.0f} us."
    )
    return f"## Timing on a GPU\n\n{intro}\n\n{table(['what', 'cost'], rows)}"


def costs_us(folder: Path, cuda: Any) -> tuple[float, float, float]:
    """Microseconds of a compute on the host's clock, of one on the device's, and of a reading."""
    from tracekit.collectors.runtime.device import DeviceClock
    from tracekit.collectors.runtime.recorder import Recorder
    from tracekit.collectors.runtime.session import Session
    from tracekit.collectors.runtime.wire_format import RuntimeOptions

    options = RuntimeOptions(ring_capacity=1 << 22)
    recorder = Recorder(folder, 0, 0, options)
    session = Session(recorder, options, rank=0, world_size=1, attempt=0)
    session.start()

    def compute() -> None:
        start = session.begin_op()
        session.record_compute("forward-compute", start, session.instant(), 0, 0)

    gc.disable()
    on_host = _per_call_us(compute, 20_000)
    clock = DeviceClock(cuda, recorder.add, lambda _: None, opened=session.device_opened, failed=session.device_failed)
    session.use_device(clock, types.SimpleNamespace(start=lambda _: None, close=lambda: None))
    clock.tick()

    def step() -> None:
        for _ in range(OPS_PER_STEP):
            compute()
        clock.tick()

    on_device = _per_call_us(step, 200) / OPS_PER_STEP
    reading = _per_call_us(clock._read_clock, 2_000)
    gc.enable()
    session.close()
    return on_host, on_device, reading


def _per_call_us(function: Callable[[], None], calls: int) -> float:
    """Microseconds per call, the best of some rounds."""
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(calls):
            function()
        best = min(best, time.perf_counter() - began)
    return best / calls * 1e6
