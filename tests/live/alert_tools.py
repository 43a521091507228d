"""Prometheus and Alertmanager as processes of a test."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: Where Debian's packages put them; `make test-all` installs them.
PROMETHEUS, ALERTMANAGER, PROMTOOL = "/usr/bin/prometheus", "/usr/bin/prometheus-alertmanager", "/usr/bin/promtool"
PATIENCE_S = 120.0


@contextmanager
def listening(command: list[str], folder: Path) -> Iterator[str]:
    """Run a server until the end of the block; the address that it says it listens on."""
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.put(line)
        lines.put("")

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield _address(lines)
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
        reader.join()
        assert process.stderr is not None
        process.stderr.close()


def _address(lines: queue.Queue[str]) -> str:
    said = []
    deadline = time.monotonic() + PATIENCE_S
    while line := lines.get(timeout=max(0.1, deadline - time.monotonic())):
        said.append(line)
        if match := re.search(r'msg="Listening on" address=(\S+)', line):
            return match[1]
    raise AssertionError("".join(said))


@contextmanager
def alertmanager(configuration: str, folder: Path) -> Iterator[str]:
    """Alertmanager with this configuration; its address."""
    (folder / "alertmanager.yml").write_text(configuration)
    options = ["--storage.path=alertmanager", "--web.listen-address=127.0.0.1:0", "--cluster.listen-address="]
    with listening([ALERTMANAGER, "--config.file=alertmanager.yml", *options], folder) as address:
        yield address


@contextmanager
def prometheus(configuration: str, folder: Path, *more: str) -> Iterator[str]:
    """Prometheus with this configuration, and `more` options; its address."""
    (folder / "prometheus.yml").write_text(configuration)
    options = ["--storage.tsdb.path=prometheus", "--web.listen-address=127.0.0.1:0"]
    with listening([PROMETHEUS, "--config.file=prometheus.yml", *options, *more], folder) as address:
        yield address


def until_ready(address: str) -> None:
    """Wait until a Prometheus that listens has read what it stores."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(f"http://{address}/-/ready"):
            return
    raise AssertionError("Prometheus does not get ready")


def promtool(*arguments: str | os.PathLike[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PROMTOOL, *map(str, arguments)], capture_output=True, text=True, timeout=PATIENCE_S)
