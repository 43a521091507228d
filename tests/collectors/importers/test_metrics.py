"""Sources of metrics: the same samples from every one of them, and one line for what is none."""

from __future__ import annotations

import http.server
import json
import os
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import polars as pl
import pytest

from tests.analysis.metrics.fleet import BEGAN, CLOCK, PRESSURE, Fault, fleet
from tests.cases import case
from tests.handmade import POLL_S, run
from tests.live.alert_tools import prometheus, promtool, until_ready
from tracekit.analysis.metrics.samples import Samples, TimeSpan
from tracekit.base.errors import FormatError
from tracekit.collectors.importers import metrics as reading
from tracekit.collectors.importers.metrics import open_metrics

SUSPECT = f"node-00:part=compute,excess=0.3,from={BEGAN + 300},to={BEGAN + 540}"
FRAME = fleet(1, Fault(0, "compute", 0.3, 300, 540), hosts=6, devices=1).sort("metric", "host", "device", "time")


def labels(host: str, device: str | None, metric: str) -> dict[str, str]:
    """As dcgm-exporter and node_exporter write them."""
    if metric == CLOCK:
        return {
            "gpu": str(device),
            "UUID": f"GPU-{host}",
            "device": "nvidia0",
            "Hostname": host,
            "instance": f"{host}:9400",
        }
    return {"instance": f"{host}.cluster:9100"} | ({} if device is None else {"device": device, "port": "1"})


def series(frame: pl.DataFrame) -> Iterator[tuple[str, dict[str, str], list[tuple[float, float]]]]:
    for (metric, host, device), rows in frame.group_by("metric", "host", "device", maintain_order=True):
        yield str(metric), labels(str(host), device, str(metric)), rows.select("time", "value").rows()


def as_text(frame: pl.DataFrame) -> str:
    """OpenMetrics; times to the millisecond."""
    lines = []
    for metric, named, points in series(frame):
        shown = ",".join(f'{name}="{value}"' for name, value in named.items())
        lines += [f"# TYPE {metric.removesuffix('_total')} {'counter' if metric.endswith('_total') else 'gauge'}"]
        lines += [f"{metric}{{{shown}}} {value} {time:.3f}" for time, value in points]
    return "\n".join([*lines, "# EOF", ""])


def as_answer(frame: pl.DataFrame) -> dict[str, Any]:
    """An answer of the range API."""
    result = [
        {"metric": {"__name__": metric, **named}, "values": [[time, str(value)] for time, value in points]}
        for metric, named, points in series(frame)
    ]
    return {"status": "success", "data": {"resultType": "matrix", "result": result}}


def verdicts(source: object, *more: str) -> list[dict[str, Any]]:
    ran = run("metrics", "test", source, "--suspect", SUSPECT, *more, "--json")
    assert ran.code == 0, ran.err
    found: list[dict[str, Any]] = json.loads(ran.out)["tests"]
    return found


@contextmanager
def serving(
    answer: Callable[[http.server.BaseHTTPRequestHandler], None], tls: ssl.SSLContext | None = None
) -> Iterator[str]:
    """A server on this machine; its URL."""

    class Answering(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(POLL_S,))
    thread.start()
    try:
        yield f"http{'s' if tls else ''}://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def reply(handler: http.server.BaseHTTPRequestHandler, content: object, code: int = 200) -> None:
    handler.send_response(code)
    handler.end_headers()
    handler.wfile.write(json.dumps(content).encode())


def asked(handler: http.server.BaseHTTPRequestHandler) -> tuple[str, float, float, float]:
    query = parse_qs(urlsplit(handler.path).query)
    start, end, step = (float(query[name][0]) for name in ("start", "end", "step"))
    return query["query"][0], start, end, step


def test_parquet_text_a_saved_answer_and_a_folder_of_them_give_the_same_verdict(tmp_path: Path) -> None:
    FRAME.write_parquet(tmp_path / "m.parquet")
    (tmp_path / "m.txt").write_text(as_text(FRAME))
    (tmp_path / "m.json").write_text(json.dumps(as_answer(FRAME)))
    (tmp_path / "answers").mkdir()
    for metric in (CLOCK, PRESSURE):
        answer = json.dumps(as_answer(FRAME.filter(pl.col("metric") == metric)))
        (tmp_path / "answers" / f"{metric}.json").write_text(answer)
    (first,), *others = [verdicts(tmp_path / name) for name in ("m.parquet", "m.txt", "m.json", "answers")]
    assert (first["verdict"], first["device"]) == ("confirmed", "0")
    for (other,) in others:
        assert other["predicts"] == pytest.approx(first["predicts"], abs=5e-3)
        assert {name: other[name] for name in ("verdict", "host", "device", "samples")} == {
            name: first[name] for name in ("verdict", "host", "device", "samples")
        }


def test_times_of_a_table_may_be_of_any_unit_or_a_date(tmp_path: Path) -> None:
    time, path = pl.col("time"), tmp_path / "m[1]*.parquet"
    date = pl.from_epoch((time * 1e6).cast(pl.Int64), time_unit="us")
    FRAME.write_parquet(path)
    (as_seconds,) = verdicts(path)
    for unit, written in {
        "ms": time * 1e3, "ns": (time * 1e9).cast(pl.Int64), "text": time.cast(pl.String), "date": date,
        "ms date": date.dt.cast_time_unit("ms"),
        "zone": date.dt.replace_time_zone("UTC").dt.convert_time_zone("Asia/Tokyo"),
    }.items():  # fmt: skip
        with case(unit):
            FRAME.with_columns(time=written).write_parquet(path)
            (test,) = verdicts(path)
            assert test["verdict"] == "confirmed"
            assert test["predicts"] == pytest.approx(as_seconds["predicts"], abs=1e-3)


def test_labels_may_hold_anything(tmp_path: Path) -> None:
    odd = r"name\"with} \\ and # 1 2"
    (tmp_path / "m.txt").write_text(
        f'{CLOCK}{{gpu="0",pod="{odd}",Hostname="A.b.c"}} 1410 1700000000.5 # {{trace_id="x"}} 1 2\n'
        f'{CLOCK}{{gpu="0",Hostname="10.0.0.1"}} 1.5e3 1700000001000\n'  # milliseconds, as older text has them
        f'{CLOCK}{{gpu="0"}} 5 1700000000\nup 1 1700000000\n{CLOCK}{{Hostname="x"}} NaN 1700000000\n# EOF\n'
    )
    samples = Samples.of(open_metrics(str(tmp_path / "m.txt")).samples([CLOCK], None, None))
    assert samples.series.filter(pl.col("host") != "x").select("host", "device").rows() == [
        ("10.0.0.1", "0"),
        ("a", "0"),
    ]
    assert sorted(samples.values.select("time", "value").rows()) == [(1700000000.5, 1410.0), (1700000001.0, 1500.0)]
    assert samples.dropped == 1


def test_text_is_read_in_pieces_and_each_port_of_a_card_is_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = "".join(
        f'wait_total{{instance="a:9100",device="mlx5_0",port="{port}"}} {value} 170000000{value}\n'
        for value in range(5)
        for port in (1, 2)
    )
    path = tmp_path / "m.txt"
    path.write_text(f"# HELP wait_total\n{ports}wait_total_more 7 1700000000\n# EOF\n")
    whole = open_metrics(str(path)).samples(["wait_total"], None, None)
    monkeypatch.setattr(reading, "_PIECE_BYTES", 100)
    pieces = open_metrics(str(path)).samples(["wait_total"], None, None)
    assert pieces.sort("time", "device").equals(whole.sort("time", "device"))
    assert sorted(pieces.select("host", "device", "value").rows()) == [
        ("a", device, float(value)) for device in ("mlx5_0", "mlx5_0:2") for value in range(5)
    ]


def test_a_server_is_asked_in_pieces_for_the_hosts_needed_and_how_often_it_samples() -> None:
    """It repeats the last value, as Prometheus does; the pieces have every point once."""
    spans: list[tuple[float, float, float]] = []

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        selector, start, end, step = asked(handler)
        assert selector == f'{CLOCK}{{Hostname=~"(?i:node\\\\-00|node\\\\-01)([.:].*)?"}}'
        assert (end - start) / step <= 11_000
        spans.append((start, end, step))
        times = [start + step * at for at in range(int((end - start) / step + 1.000001))]
        values = [[time, str(1900 + int(time // 20) % 7)] for time in times]  # sampled every 20 s
        result = [
            {"metric": {"__name__": CLOCK, "gpu": "0", "Hostname": f"node-0{host}"}, "values": values}
            for host in (0, 1)
        ]
        reply(handler, {"status": "success", "data": {"resultType": "matrix", "result": result}})

    with serving(answer) as url:
        frame = open_metrics(url).samples([CLOCK], TimeSpan(BEGAN, BEGAN + 100_000), {"node-00.cluster", "NODE-01"})
    assert {step for _, _, step in spans[1:]} == {20.0}
    assert len(spans) > 2
    assert frame["time"].n_unique() * 2 == frame.height
    assert frame["time"].min() == BEGAN - 200_000


def test_what_a_server_can_do_wrong_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "ANSWER_S", 0.5)
    released = threading.Event()
    refusal = {"status": "error", "errorType": "execution", "error": "query processing would load too many samples"}
    answers: dict[str, Callable[[http.server.BaseHTTPRequestHandler], object]] = {
        "answers 422: query processing would load too many samples": lambda handler: reply(handler, refusal, 422),
        "answers 404: Not Found": lambda handler: handler.send_error(404),
        "no whole answer within 0.5 s": lambda _: released.wait(30),
        "not an answer of Prometheus": lambda handler: reply(handler, {"data": 1}),
        "no samples of": lambda handler: reply(handler, as_answer(FRAME.clear())),
        "an answer has more than 0 MiB": lambda handler: reply(handler, " " * 10_000),
    }
    monkeypatch.setattr(reading, "MOST_ANSWER_BYTES", 5_000)
    for why, answer in answers.items():
        with case(why), serving(lambda handler, answer=answer: answer(handler)) as url:  # type: ignore[misc]
            ran = run("metrics", "test", url, "--suspect", SUSPECT)
            if why.startswith("no whole answer"):
                released.set()
            assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
            assert why in ran.err


def test_a_server_that_never_answers_is_given_the_time_that_the_line_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "SILENCE_S", 0.5)
    released = threading.Event()
    with serving(lambda _: released.wait(30)) as url:
        ran = run("metrics", "doctor", url)
        released.set()
    assert (ran.code, ran.err) == (2, f"tracekit: {url}: no answer within 0.5 s\n")


def test_a_server_that_is_silent_is_named_while_it_is_waited_for(
    said_at_once: tuple[list[str], threading.Event],
) -> None:
    """It answers once the line is out: each of the requests after that one is waited for in silence."""
    lines, said = said_at_once

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        said.wait(30)
        reply(handler, as_answer(FRAME))

    with serving(answer) as url:
        ran = run("metrics", "doctor", url)
    assert lines == [f"tracekit: {url}: waiting for an answer, at most 30 s"]
    assert ran.code == 0


def test_a_password_stays_with_the_server_that_it_is_for() -> None:
    """One that sends on to another is refused, and the other is not asked."""
    elsewhere: list[str | None] = []

    def send_on(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", other)
        handler.end_headers()

    with (
        serving(lambda handler: elsewhere.append(handler.headers["Authorization"])) as other,
        serving(send_on) as url,
    ):
        ran = run("metrics", "doctor", url.replace("//", "//user:secret@"))
    assert (ran.code, elsewhere) == (2, [])
    assert "answers 302" in ran.err


def test_a_certificate_that_nobody_knows_is_named_and_a_password_is_not(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=127.0.0.1"]
    subprocess.run([*made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with serving(lambda handler: reply(handler, {}), context) as url:
        ran = run("metrics", "doctor", url.replace("//", "//user:secret@"))
    assert ran.code == 2
    assert "its certificate is not trusted: self-signed certificate" in ran.err
    assert "secret" not in ran.err


def test_files_that_are_no_metrics_are_one_line(tmp_path: Path) -> None:
    FRAME.write_parquet(tmp_path / "whole.parquet")
    contents: dict[str, bytes] = {
        "empty; expected samples": b"",
        "neither Parquet nor text": b"\xff\xfe\x00junk" * 100,
        "no metrics; expected OpenMetrics": b"hello world\n",
        "samples without timestamps": b'up{instance="a:1"} 1\n',
        "not a readable Parquet file": (tmp_path / "whole.parquet").read_bytes()[:5000],
        "not an answer of Prometheus' range API": b'{"status": "success"}',
        "range API, with resultType matrix": b'{"data":' * 100_000,
        "no samples of": b'up{instance="a:1"} 1 1700000000\n',
    }
    for why, content in contents.items():
        with case(why):
            (tmp_path / "file").write_bytes(content)
            ran = run("metrics", "test", tmp_path / "file", "--suspect", SUSPECT)
            assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
            assert why in ran.err
    FRAME.drop("metric").write_parquet(tmp_path / "file")
    with pytest.raises(FormatError, match="no column 'metric'"):
        open_metrics(str(tmp_path / "file"))
    assert "absent: no such file or folder" in run("metrics", "doctor", tmp_path / "absent").err
    assert "gs://bucket/samples: in object storage: " in run("metrics", "doctor", "gs://bucket/samples").err
    (tmp_path / "folder").mkdir()
    assert "a folder without answers of Prometheus (*.json)" in run("metrics", "doctor", tmp_path / "folder").err
    FRAME.with_columns(value=pl.lit("high")).write_parquet(tmp_path / "file")
    assert "its columns cannot be read as times, names and numbers" in run("metrics", "doctor", tmp_path / "file").err
    os.mkfifo(tmp_path / "pipe")
    assert "neither a file nor a folder" in run("metrics", "doctor", tmp_path / "pipe").err


@pytest.mark.slow
def test_prometheus_itself_serves_what_a_file_holds(tmp_path: Path) -> None:
    (tmp_path / "m.txt").write_text(as_text(FRAME))
    made = promtool("tsdb", "create-blocks-from", "openmetrics", tmp_path / "m.txt", tmp_path / "prometheus")
    assert made.returncode == 0, made.stderr
    with prometheus("global: {}\n", tmp_path, "--storage.tsdb.retention.time=50y") as address:
        until_ready(address)
        (test,) = verdicts(f"http://{address}")
    assert (test["verdict"], test["sampling_s"]) == ("confirmed", 2.0)
    assert test["predicts"] == pytest.approx(0.3, abs=0.02)


def test_a_suspicion_that_cannot_be_meant_is_quoted(tmp_path: Path) -> None:
    for text, reason in (
        ("node-00", "expected HOST:part=compute"),
        ("node-00:part=compute,from=1,to=2", "expected HOST:part=compute"),
        ("node-00:part=compute,excess=much,from=1,to=2", "expected HOST:part=compute"),
        ("node-00:part=compute,excess=1,from=noon,to=2", "expected HOST:part=compute"),
        ("node-00:part=disk,excess=1,from=1,to=2", "no metric shows the part 'disk'; one of compute, network, process"),
        (":part=compute,excess=1,from=1,to=2", "excess above 0, and from before to"),
        ("node-00:part=compute,excess=0,from=1,to=2", "excess above 0, and from before to"),
        ("node-00:part=compute,excess=inf,from=1,to=2", "excess above 0, and from before to"),
        ("node-00:part=compute,excess=1,from=2,to=2", "excess above 0, and from before to"),
        ("node-00:part=compute,excess=1,from=2,to=inf", "excess above 0, and from before to"),
        ("node-00:part=compute,excess=1,from=1,to=2,why=3", "excess above 0, and from before to"),
    ):
        with case(text):
            ran = run("metrics", "test", tmp_path / "absent", "--suspect", text)
            assert ran.code == 2
            assert reason in ran.message


def test_the_times_of_a_suspicion_may_be_dates_in_utc_or_with_an_offset(tmp_path: Path) -> None:
    """1,700,000,000 s after 1970 it was 22:13:20 on 14 November 2023."""
    FRAME.write_parquet(tmp_path / "metrics.parquet")
    dates = "node-00:part=compute,excess=0.3,from=2023-11-14T22:18:20,to=2023-11-14T23:22:20+01:00"
    told = [run("metrics", "test", tmp_path / "metrics.parquet", "--suspect", text) for text in (SUSPECT, dates)]
    assert told[0] == told[1]
    assert told[0].out.startswith("node-00, compute: ")


def test_samples_that_come_twice_are_counted(tmp_path: Path) -> None:
    pl.concat([FRAME, FRAME.filter(host="node-00")[:1]]).write_parquet(tmp_path / "metrics.parquet")
    ran = run("metrics", "test", tmp_path / "metrics.parquet", "--suspect", SUSPECT)
    assert ran.out.endswith("\n1 sample dropped: no numbers, or twice\n")


def test_what_the_doctor_misses_is_all_that_it_misses(tmp_path: Path) -> None:
    FRAME.write_parquet(tmp_path / "metrics.parquet")
    doctor = ("metrics", "doctor", tmp_path / "metrics.parquet")
    missing = [each["metric"] for each in json.loads(run(*doctor, "--json").out)["missing"]]
    assert missing
    clocks = FRAME.filter(metric=CLOCK)
    more = [clocks.with_columns(metric=pl.lit(name, FRAME["metric"].dtype)) for name in missing]
    pl.concat([FRAME, *more]).write_parquet(tmp_path / "metrics.parquet")
    assert run(*doctor).out == "All metrics that tests read are there.\n"


def test_a_healthy_fleet_has_no_alarm(tmp_path: Path) -> None:
    FRAME.filter(pl.col("host") != "node-00").write_parquet(tmp_path / "metrics.parquet")
    assert run("metrics", "scan", tmp_path / "metrics.parquet").out == "No host departs from its peers.\n"
