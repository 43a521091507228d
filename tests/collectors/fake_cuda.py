"""A GPU played in Python, behind the names of `torch.cuda` that the collector uses.

Kernels take the time they are given, streams run beside each other, the device's clock drifts, elapsed times are
float32 milliseconds as CUDA's are. What waits for the device, or is forbidden while a graph is captured, raises.
"""

import time
import types

import numpy as np

NEVER = 1 << 62


class WouldWaitError(AssertionError):
    """Somebody waited for the device."""


class CudaError(RuntimeError):
    """What torch raises when CUDA refuses."""


class FakeStream:
    """Work in order; `tail_ns` is when the last of it ends, on the device's clock."""

    def __init__(self, cuda, device_index=0):
        self.cuda, self.device_index, self.tail_ns = cuda, device_index, 0

    def wait_event(self, event):
        self.tail_ns = max(self.tail_ns, event.at_ns)

    def synchronize(self):
        raise WouldWaitError("Stream.synchronize")

    def __enter__(self):
        self.cuda.streams.append(self)
        return self

    def __exit__(self, *exception):
        self.cuda.streams.pop()


class FakeEvent:
    """Passed when its stream has come as far."""

    def __init__(self, cuda, enable_timing):
        self.cuda, self.timing, self.at_ns = cuda, enable_timing, None
        cuda.live_events += 1
        cuda.made_events += 1

    def __del__(self):
        self.cuda.live_events -= 1

    def record(self, stream=None):
        self.cuda.check("record")
        stream = stream or self.cuda.current_stream()
        self.at_ns = NEVER if self.cuda.hangs else max(stream.tail_ns, self.cuda.device_ns() + self.cuda.latency_ns)
        stream.tail_ns = self.at_ns

    def query(self):
        self.cuda.check("query")
        self.cuda.queries += 1
        return self.at_ns is None or self.cuda.device_ns() >= self.at_ns

    def elapsed_time(self, end):
        assert self.timing
        assert end.timing
        if not (self.query() and end.query()):
            raise CudaError("device not ready")
        return float(np.float32((end.at_ns - self.at_ns) / 1e6))

    def synchronize(self):
        raise WouldWaitError("Event.synchronize")


class FakeCuda:
    """`torch.cuda`. `clock` is the host's; the device's runs `drift` faster and started somewhere else."""

    def __init__(self, clock=time.monotonic_ns, drift=0.0, latency_ns=4_000):
        self.clock, self.drift, self.latency_ns = clock, drift, latency_ns
        self.origin_ns = clock()
        self.live_events = self.made_events = self.queries = 0
        self.initialized = True
        self.capturing = self.hangs = False
        self.broken = None
        self.device = 0
        self.streams = [FakeStream(self)]
        self.Stream, self.Event = self._stream, self._event

    def device_ns(self):
        """Now on the device's clock; starts at a number of its own."""
        since = self.clock() - self.origin_ns
        return 77_000_000_000 + since + round(since * self.drift)

    def host_ns(self, device_ns):
        """The truth: when it was on the host that the device's clock said so."""
        return self.origin_ns + (device_ns - 77_000_000_000) / (1 + self.drift)

    def launch(self, duration_ns, stream=None):
        """A kernel; returns when it begins and ends on the host's clock, as nobody but the test can know."""
        stream = stream or self.current_stream()
        begin_ns = max(stream.tail_ns, self.device_ns())
        stream.tail_ns = begin_ns + duration_ns
        return self.host_ns(begin_ns), self.host_ns(stream.tail_ns)

    def check(self, what):
        """CUDA's word on a call."""
        if self.broken is not None:
            raise self.broken
        if self.capturing:
            raise CudaError(f"{what}: operation not permitted when stream is capturing")

    def is_initialized(self):
        return self.initialized

    def is_current_stream_capturing(self):
        return self.capturing

    def current_stream(self, _device=None):
        return self.streams[-1]

    def current_device(self):
        return self.device

    def _stream(self, **_options):
        return FakeStream(self, self.device)

    def _event(self, *, enable_timing=False):
        return FakeEvent(self, enable_timing)

    def synchronize(self, _device=None):
        raise WouldWaitError("synchronize")

    def get_device_properties(self, _index):
        return types.SimpleNamespace(
            name="Fake H200",
            uuid="5a3f0c1e-0000-4000-8000-000000000007",
            pci_bus_id=0x1B,
            pci_device_id=0,
            pci_domain_id=0,
            total_memory=1 << 37,
        )

    def pretend(self, torch):
        """Put this GPU in the place of torch's, for good: a process of its own does this before it trains."""
        for name in (
            "is_initialized",
            "is_current_stream_capturing",
            "current_stream",
            "current_device",
            "Stream",
            "Event",
            "synchronize",
            "get_device_properties",
        ):
            setattr(torch.cuda, name, getattr(self, name))
        torch.version.cuda = "13.0-fake"
