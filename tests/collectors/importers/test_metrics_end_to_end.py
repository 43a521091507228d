"""Real exporters, a real Prometheus, a real CPU hog: pressure on one of five hosts confirms a slow process there."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.handmade import run
from tests.live.alert_tools import PATIENCE_S, listening, prometheus, until_ready

NODE_EXPORTER = "/usr/bin/prometheus-node-exporter"
PRESSURE = Path("/proc/pressure")
#: Of two that want the same core, one always waits.
HOG = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
while True:
    pass
"""
TICK_S = 0.1


def waited_s() -> float:
    """Seconds in which some process waited for a CPU, as the kernel counts them."""
    return int(PRESSURE.joinpath("cpu").read_text().split("total=")[1].split()[0]) / 1e6


def frozen(folder: Path) -> Path:
    """A /proc of a host without any change."""
    (folder / "pressure").mkdir(parents=True)
    for file in PRESSURE.iterdir():
        (folder / "pressure" / file.name).write_text(file.read_text())
    return folder


@contextmanager
def halved(folder: Path) -> Iterator[list[tuple[float, float]]]:
    """Write half of this machine's pressure as that of a host: on a busy machine somebody always waits, and work that
    always waits would take forever. Yields when it was how much.
    """
    over, noted = threading.Event(), list[tuple[float, float]]()

    def write() -> None:
        first_s = waited_s()
        while not over.wait(TICK_S):
            half_s = (waited_s() - first_s) / 2
            line = f"some avg10=0.00 avg60=0.00 avg300=0.00 total={int(half_s * 1e6)}\n"
            (folder / "new").write_text(line + line.replace("some", "full"))
            (folder / "new").replace(folder / "pressure" / "cpu")
            noted.append((time.time(), half_s))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield noted
    finally:
        over.set()
        writer.join()


def sampled(address: str, host: str) -> int:
    """How many samples Prometheus has of a host."""
    query = urllib.parse.quote(f'count_over_time(node_pressure_cpu_waiting_seconds_total{{instance="{host}"}}[1h])')
    with urllib.request.urlopen(f"http://{address}/api/v1/query?query={query}") as answer:
        result = json.load(answer)["data"]["result"]
    return int(result[0]["value"][1]) if result else 0


def until_sampled(address: str, host: str, more: int) -> None:
    wanted, deadline, never = sampled(address, host) + more, time.monotonic() + PATIENCE_S, threading.Event()
    while sampled(address, host) < wanted:
        assert time.monotonic() < deadline
        never.wait(TICK_S)


@pytest.mark.slow
def test_a_cpu_hog_on_one_of_five_hosts_confirms_a_slow_process(tmp_path: Path) -> None:
    with ExitStack() as stack:
        noted = stack.enter_context(halved(frozen(tmp_path / "node-0")))
        jobs = []
        for host in range(5):
            proc = tmp_path / "node-0" if host == 0 else frozen(tmp_path / f"node-{host}")
            only = ["--collector.disable-defaults", "--collector.pressure", "--web.listen-address=127.0.0.1:0"]
            exporter = listening([NODE_EXPORTER, *only, f"--path.procfs={proc}"], tmp_path)
            jobs.append(
                {"targets": [stack.enter_context(exporter)], "labels": {"instance": f"node-{host}.cluster:9100"}}
            )
        configuration = {
            "global": {"scrape_interval": "1s"},
            "scrape_configs": [{"job_name": "node", "static_configs": jobs}],
        }
        address = stack.enter_context(prometheus(json.dumps(configuration), tmp_path))
        until_ready(address)
        until_sampled(address, "node-4.cluster:9100", 6)
        hogs = [subprocess.Popen([sys.executable, "-c", HOG]) for _ in range(2)]
        for hog in hogs:
            stack.callback(hog.wait)
            stack.callback(hog.kill)
        since = len(noted)
        until_sampled(address, "node-0.cluster:9100", 10)
        (began, before_s), (ended, after_s) = noted[since], noted[-1]
        share = (after_s - before_s) / (ended - began)
        suspects = [f"node-{host}:part=process,excess={share / (1 - share)},from={began},to={ended}" for host in (0, 3)]
        ran = run(
            "metrics", "test", f"http://{address}", *(each for one in suspects for each in ("--suspect", one)), "--json"
        )
        guilty, innocent = json.loads(ran.out)["tests"]
        assert (guilty["verdict"], guilty["mechanism"]) == ("confirmed", "cpu-pressure"), guilty["sentence"]
        assert innocent["verdict"] == "refuted", innocent["sentence"]
        lacks = {
            each["metric"]
            for each in json.loads(run("metrics", "doctor", f"http://{address}", "--json").out)["missing"]
        }
        assert "node_infiniband_rate_bytes_per_second" in lacks
        assert "node_pressure_cpu_waiting_seconds_total" not in lacks
