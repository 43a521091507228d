"""Pings between the launchers of a run: how far the clock of this host is from the reference.

In: an echo server at the first launcher, pings from the others. Out: lines of `ClockSample`s in the run directory, to
which `host_clocks.py` fits a line per host. Imports the standard library only: it runs where the training does.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

_PING = struct.Struct("<Qq")
#: Pings per measurement; the one with the shortest way there and back counts.
ROUNDS = 12
#: Seconds to wait for an echo.
ECHO_TIMEOUT_S = 0.5

Clock = Callable[[], int]


@dataclass(frozen=True)
class ClockSample:
    """One measurement: at `local_ns` on this host the reference clock was ahead by `offset_ns`."""

    local_ns: int
    offset_ns: int
    round_trip_ns: int


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
    """Ask the echo server `rounds` times; None if it did not answer."""
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


def append_sample(directory: Path, host: str, sample: ClockSample) -> None:
    """Add one measurement of this host to the run directory."""
    with (directory / f"clock-{host}.samples").open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(sample)) + "\n")
