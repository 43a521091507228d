"""The reference clock of a run: the first launcher serves it, launchers on other hosts measure against it.

In: a run directory that launchers share. Out: samples of the clocks of the other hosts in it. The clock is served only
once a launcher on another host records. Its file in the run directory, which only this user can read, holds its address
and the token that a ping must carry.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

from tracekit.base.atomic_write import Kind, starting_with, write_text
from tracekit.base.errors import OutputError
from tracekit.collectors.record.small_file import create, read_small
from tracekit.collectors.run_directory.clock_pings import EchoServer, append_sample, measure
from tracekit.collectors.run_directory.launchers import hosts_of_launchers

#: How often launchers measure the reference clock, or look whether another host needs one, seconds.
CLOCK_PERIOD_S = 10.0
_LOOK_PERIOD_S = 1.0
_CLOCK_FILE = "clock-server.json"
_CLOCK_KIND = Kind("the address of a run's reference clock", starting_with(b'{"host": '))


def launched_elsewhere(directory: Path) -> bool:
    """True if another launcher was the first of the run."""
    return (directory / _CLOCK_FILE).exists()


class ClockKeeper:
    """Serves or measures the clock. `first`: this launcher is the first of the run. `tick` does what is due."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / _CLOCK_FILE
        self._host = socket.gethostname()
        self._server: EchoServer | None = None
        self._due = 0.0
        self.first = self._claim()

    def _claim(self) -> bool:
        try:
            with create(self._path) as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(json.dumps({"host": self._host}).encode())
        except FileExistsError:
            return False
        except OSError:  # the command removed the folder at once, or the disk is full: no other launcher finds this one
            return True
        return True

    def tick(self) -> None:
        """Measure, or serve, if it is time to. Raises OSError, ValueError, OutputError and errors of a damaged file."""
        if self._server is not None or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + (_LOOK_PERIOD_S if self.first else CLOCK_PERIOD_S)
        if not self.first:
            self._measure()
        elif hosts_of_launchers(self._directory) - {self._host}:
            self._serve()

    def close(self) -> None:
        """Measure for the last time, or stop serving."""
        if self._server is not None:
            self._server.close()
        elif not self.first and self._due:
            self._measure()

    def _serve(self) -> None:
        server = EchoServer()
        about = {"host": self._host, "port": server.port, "token": server.token.hex()}
        try:
            write_text(self._path, json.dumps(about), _CLOCK_KIND)
        except OutputError:
            server.close()
            raise
        self._server = server

    def _measure(self) -> None:
        server = json.loads(read_small(self._path) or b"{}")  # the first launcher is about to write it
        if server.get("host") == self._host:
            return
        if "token" not in server:  # it has not seen this launcher yet
            self._due = time.monotonic() + _LOOK_PERIOD_S
            return
        sample = measure(str(server["host"]), int(server["port"]), bytes.fromhex(server["token"]))
        if sample is not None:
            append_sample(self._directory, self._host, sample)
