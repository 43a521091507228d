"""Clocks of several hosts: an echo server at the launcher of rank 0, pings from the others, a line fitted per host.

In: UDP pings between launchers, repeated through the run. Out: a `ClockFit` per host, applied when segments are merged.
Ranks of one host share its monotonic clock.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tracekit.errors import FormatError

_PING = struct.Struct("<Qq")
#: Pings per measurement; the one with the shortest way there and back counts.
ROUNDS = 12
#: Seconds to wait for an echo.
ECHO_TIMEOUT_S = 0.5

Clock = Callable[[], int]


@dataclass(frozen=True, slots=True)
class ClockSample:
    """One measurement: at `local_ns` on this host the reference clock was ahead by `offset_ns`."""

    local_ns: int
    offset_ns: int
    round_trip_ns: int


@dataclass(frozen=True, slots=True)
class ClockFit:
    """reference = local + `offset_ns` + `drift` x (local - `local_ns`).

    `uncertainty_ns`: half the shortest round trip plus the residual of the fit.
    """

    local_ns: int
    offset_ns: float
    drift: float
    uncertainty_ns: float
    samples: int

    def to_reference(self, local_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Times of this host on the reference clock, ns."""
        since = local_ns - self.local_ns
        return local_ns + np.round(self.offset_ns + self.drift * since).astype(np.int64)


#: About so long is a line of a file of samples.
_SAMPLE_BYTES = 100


class EchoServer:
    """Answers each ping with the reference clock, until closed."""

    def __init__(self, host: str = "", clock: Clock = time.monotonic_ns) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((host, 0))
        self._clock = clock
        self._thread = threading.Thread(target=self._answer, name="tracekit-clock", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Stop answering."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as waker:
            waker.sendto(b"", ("127.0.0.1", self.port))
        self._thread.join()
        self._socket.close()

    def _answer(self) -> None:
        while True:
            ping, sender = self._socket.recvfrom(64)
            if not ping:
                return
            if len(ping) == _PING.size:
                number, _ = _PING.unpack(ping)
                self._socket.sendto(_PING.pack(number, self._clock()), sender)


def measure(host: str, port: int, clock: Clock = time.monotonic_ns, *, rounds: int = ROUNDS) -> ClockSample | None:
    """Ask the echo server `rounds` times; None where nobody answered."""
    best: ClockSample | None = None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        asker.settimeout(ECHO_TIMEOUT_S)
        for number in range(rounds):
            sent_ns = clock()
            asker.sendto(_PING.pack(number, 0), (host, port))
            try:
                answer, _ = asker.recvfrom(64)
            except (TimeoutError, ConnectionRefusedError):
                if best is None:
                    return None
                continue
            received_ns = clock()
            echoed, reference_ns = _PING.unpack(answer)
            if echoed != number:
                continue
            middle_ns = (sent_ns + received_ns) // 2
            if best is None or received_ns - sent_ns < best.round_trip_ns:
                best = ClockSample(middle_ns, reference_ns - middle_ns, received_ns - sent_ns)
    return best


def fit_clock(samples: Iterable[ClockSample]) -> ClockFit:
    """Offset and drift by least squares over the better half of the samples; a single one gives the offset only."""
    ordered = sorted(samples, key=lambda sample: sample.round_trip_ns)
    if not ordered:
        raise ValueError("no clock samples; expected at least one")
    best = ordered[: max(2, (len(ordered) + 1) // 2)]
    origin = min(sample.local_ns for sample in best)
    offset = np.array([sample.offset_ns for sample in best], np.float64)
    base = float(offset[0])
    since = np.array([sample.local_ns - origin for sample in best], np.float64)
    drift, intercept = np.polyfit(since, offset - base, 1) if np.ptp(since) > 0 else (0.0, 0.0)
    residual = offset - base - (intercept + drift * since)
    return ClockFit(
        local_ns=origin,
        offset_ns=base + float(intercept),
        drift=float(drift),
        uncertainty_ns=ordered[0].round_trip_ns / 2 + float(np.abs(residual).max()),
        samples=len(ordered),
    )


def append_sample(directory: Path, host: str, sample: ClockSample) -> None:
    """Add one measurement of this host to the run directory."""
    with (directory / f"clock-{host}.samples").open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(sample)) + "\n")


def read_clocks(directory: Path, newest: int | None = None) -> dict[str, ClockFit]:
    """The fit of each host that measured, to all samples or to about the `newest`.

    Raises FormatError where a file is damaged.
    """
    fits = {}
    for path in sorted(directory.glob("clock-*.samples")):
        try:
            samples = [ClockSample(**json.loads(line)) for line in _lines(path, newest)]
        except (ValueError, TypeError) as error:
            raise FormatError(f"{path}: damaged ({error}); delete it to merge without correcting this clock") from None
        if samples:
            fits[path.name.removeprefix("clock-").removesuffix(".samples")] = fit_clock(samples)
    return fits


def _lines(path: Path, newest: int | None) -> list[bytes]:
    """The whole lines at the end of a file, about `newest` of them, or all."""
    with path.open("rb") as file:
        skipped = 0 if newest is None else max(0, path.stat().st_size - newest * _SAMPLE_BYTES)
        file.seek(skipped)
        lines = file.read().split(b"\n")
    return [line for line in lines[bool(skipped) :] if line]
