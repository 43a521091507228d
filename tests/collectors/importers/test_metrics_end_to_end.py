"""Real exporters, a real Prometheus: pressure on one of five hosts confirms a slow process there."""

from __future__ import annotations

import json
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
TICK_S = 0.1
#: What of the time some process of the busy host waits for a CPU.
SHARE = 0.4


def write_pressure(folder: Path, resource: str, waited_s: float) -> None:
    """Write how long processes of a host have waited for a resource."""
    line = f"some avg10=0.00 avg60=0.00 avg300=0.00 total={int(waited_s * 1e6)}\n"
    (folder / "new").write_text(line + line.replace("some", "full"))
    (folder / "new").replace(folder / "pressure" / resource)


def quiet(folder: Path) -> Path:
    """A /proc of a host where nothing ever waits."""
    (folder / "pressure").mkdir(parents=True)
    for resource in ("cpu", "io", "memory"):
        write_pressure(folder, resource, 0.0)
    return folder


@contextmanager
def busy(folder: Path) -> Iterator[None]:
    """A host where some process waits for a CPU for `SHARE` of the time, until the end of the block."""
    over, began_s = threading.Event(), time.time()

    def write() -> None:
        while not over.wait(TICK_S):
            write_pressure(folder, "cpu", SHARE * (time.time() - began_s))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
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
def test_pressure_on_one_of_five_hosts_confirms_a_slow_process(tmp_path: Path) -> None:
    """Work that waits for 0.4 of the time takes 1 / (1 - 0.4) as long: 0.67 longer."""
    with ExitStack() as stack:
        folders = [quiet(tmp_path / f"node-{host}") for host in range(5)]
        jobs = []
        for host, folder in enumerate(folders):
            only = ["--collector.disable-defaults", "--collector.pressure", "--web.listen-address=127.0.0.1:0"]
            exporter = listening([NODE_EXPORTER, *only, f"--path.procfs={folder}"], tmp_path)
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
        began_s = time.time()
        with busy(folders[0]):
            until_sampled(address, "node-0.cluster:9100", 10)
            ended_s = time.time()
        suspects = [
            f"node-{host}:part=process,excess={SHARE / (1 - SHARE)},from={began_s},to={ended_s}" for host in (0, 3)
        ]
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
