"""Pings between the launchers of a run: the offset of this host's clock from the reference.

In: an echo server at the first launcher, pings from the others, with its token from the run directory. Out: lines of
`ClockSample`s there, to which `host_clocks.py` fits a line per host. Imports the standard library only: it runs where
the training does.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from tracekit.collectors.record.small_file import create

#: The token of the run, and a number that only this ping has.
_PING = struct.Struct("<16s8s")
#: That number, and the reference clock.
_ECHO = struct.Struct("<8sq")
TOKEN_BYTES = 16
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
    """Answers pings that carry its `token` with the reference clock, until closed; ignores everything else.

    It listens on all interfaces, because which one leads to other hosts is unknown. Raises OSError, or RuntimeError if
    the process may start no more threads.
    """

    def __init__(self, host: str = "", clock: Clock = time.monotonic_ns) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._clock = clock
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._over, self._end = os.pipe()
        try:
            self._socket.bind((host, 0))
            self._socket.setblocking(False)
            self._thread = threading.Thread(target=self._answer, name="tracekit-clock", daemon=True)
            self._thread.start()
        except BaseException:
            self._release()
            raise

    @property
    def port(self) -> int:
        """The port of the server."""
        return int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Stop answering."""
        os.write(self._end, b"!")
        self._thread.join()
        self._release()

    def _release(self) -> None:
        self._socket.close()
        os.close(self._over)
        os.close(self._end)

    def _answer(self) -> None:
        watched = [self._over, self._socket.fileno()]
        while self._over not in select.select(watched, [], [])[0]:
            with contextlib.suppress(OSError):  # the sender is unreachable by now
                ping, sender = self._socket.recvfrom(_PING.size + 1)
                if len(ping) != _PING.size:
                    continue
                token, number = _PING.unpack(ping)
                if secrets.compare_digest(token, self.token):
                    self._socket.sendto(_ECHO.pack(number, self._clock()), sender)


def measure(
    host: str, port: int, token: bytes, clock: Clock = time.monotonic_ns, *, rounds: int = ROUNDS
) -> ClockSample | None:
    """Ping the echo server `rounds` times; None if it did not answer. Raises OSError if it cannot be reached."""
    best: ClockSample | None = None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        asker.connect((host, port))  # others cannot answer
        for _ in range(rounds):
            sample = _ping(asker, token, clock)
            if sample is None and best is None:
                return None
            if sample is not None and (best is None or sample.round_trip_ns < best.round_trip_ns):
                best = sample
    return best


def _ping(asker: socket.socket, token: bytes, clock: Clock) -> ClockSample | None:
    number = secrets.token_bytes(8)
    deadline = time.monotonic() + ECHO_TIMEOUT_S
    sent_ns = clock()
    try:
        asker.send(_PING.pack(token, number))
        while (remaining_s := deadline - time.monotonic()) > 0:
            asker.settimeout(remaining_s)
            answer = asker.recv(_ECHO.size + 1)
            received_ns = clock()
            if len(answer) == _ECHO.size and answer[:8] == number:
                middle_ns = (sent_ns + received_ns) // 2
                return ClockSample(middle_ns, _ECHO.unpack(answer)[1] - middle_ns, received_ns - sent_ns)
    except (socket.timeout, ConnectionRefusedError):
        pass
    return None


def append_sample(directory: Path, host: str, sample: ClockSample) -> None:
    """Add one measurement of this host to the run directory."""
    with create(directory / f"clock-{host}.samples", append=True) as file:
        file.write(f"{json.dumps(asdict(sample))}\n".encode())
