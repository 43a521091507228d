"""Clocks of several hosts."""

import json
import select
import socket
import stat
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import case
from tests.properties import examples
from tracekit.base.errors import FormatError
from tracekit.collectors.launch.launcher import ClockKeeper
from tracekit.collectors.run_directory.launchers import ClockSample, EchoServer, announce, append_sample, measure
from tracekit.collectors.run_directory.segments import fit_clock, read_clocks


def test_an_offset_is_measured():
    """A reference clock one hour ahead is found so, within the shortest round trip."""
    ahead = 3_600_000_000_000
    local = iter(range(0, 10**9, 1000))
    server = EchoServer("127.0.0.1", clock=lambda: ahead)
    try:
        sample = measure("127.0.0.1", server.port, server.token, clock=lambda: next(local))
    finally:
        server.close()
    assert sample is not None
    assert sample.offset_ns == pytest.approx(ahead, abs=50_000)
    assert sample.round_trip_ns == 1000


def test_nobody_answers():
    """A server that is gone is no measurement."""
    server = EchoServer("127.0.0.1")
    port = server.port
    server.close()
    assert measure("127.0.0.1", port, server.token, rounds=1) is None


@pytest.fixture
def served():
    """A reference clock that is at 7 ns."""
    server = EchoServer("127.0.0.1", clock=lambda: 7)
    yield server
    server.close()


def test_only_pings_with_the_token_of_the_run_are_answered(served):
    """Datagrams of any other shape or token neither get an answer nor end the clock."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.connect(("127.0.0.1", served.port))
        for datagram in (b"", b"x", bytes(31), bytes(32), bytes(33), served.token, served.token + bytes(17)):
            stranger.send(datagram)
        assert measure("127.0.0.1", served.port, bytes(16), rounds=1) is None
        sample = measure("127.0.0.1", served.port, served.token, rounds=1)
        assert select.select([stranger], [], [], 0)[0] == []  # the server has read them all by now
    assert sample is not None
    assert sample.local_ns + sample.offset_ns == 7


def test_answers_that_are_none_are_passed_over(monkeypatch):
    """A server that answers with something else first is still measured; so is one that then answers twice."""
    token, answers = bytes(16), []

    def answer():
        while len(answers) < 2:
            ping, sender = server.recvfrom(64)
            answers.append(ping)
            for datagram in (b"", b"junk", bytes(16), ping[16:] + (42).to_bytes(8, "little"), ping[16:] + bytes(8)):
                server.sendto(datagram, sender)

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=answer)
        thread.start()
        sample = measure("127.0.0.1", server.getsockname()[1], token, rounds=2)
        thread.join()
    assert sample.local_ns + sample.offset_ns == 42
    assert answers[0] != answers[1]


def test_a_clock_is_served_once_another_host_records(tmp_path):
    """A single host opens no port. The address and the token are for this user only."""
    keeper = ClockKeeper(tmp_path)
    assert (keeper.first, ClockKeeper(tmp_path).first) == (True, False)
    announce(tmp_path)
    keeper.tick()
    file = tmp_path / "clock-server.json"
    assert set(json.loads(file.read_text())) == {"host"}
    (tmp_path / "launcher-other-17.running").touch()
    keeper._due = 0
    keeper.tick()
    try:
        about = json.loads(file.read_text())
        assert measure("127.0.0.1", about["port"], bytes.fromhex(about["token"]), rounds=1) is not None
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    finally:
        keeper.close()


def test_a_launcher_of_another_host_measures_the_clock(tmp_path, served, monkeypatch):
    """As soon as the first one serves it."""
    first = {"host": "127.0.0.1", "port": served.port, "token": served.token.hex()}
    (tmp_path / "clock-server.json").write_text(json.dumps({"host": "127.0.0.1"}))
    keeper = ClockKeeper(tmp_path)
    keeper.tick()
    assert list(tmp_path.glob("*.samples")) == []
    (tmp_path / "clock-server.json").write_text(json.dumps(first))
    keeper.close()
    assert read_clocks(tmp_path).keys() == {socket.gethostname()}


@examples(25)
@given(
    offset=st.integers(-(10**15), 10**15),
    drift=st.floats(-1e-4, 1e-4),
    noise=st.lists(st.integers(0, 20_000), min_size=3, max_size=30),
)
def test_offset_and_drift_are_fitted(offset, drift, noise):
    """Samples on a line, some with a long way back: the fit puts times back within its uncertainty."""
    samples = [
        ClockSample(at * 10**10, round(offset + drift * at * 10**10) + delay // 2, 10_000 + delay)
        for at, delay in enumerate(noise)
    ]
    fit = fit_clock(samples)
    times = np.arange(0, len(noise) * 10**10, 10**9, dtype=np.int64)
    expected = times + np.round(offset + drift * times)
    assert np.abs(fit.to_reference(times) - expected).max() <= 10 * (fit.uncertainty_ns + max(noise)) + 2


@pytest.mark.parametrize("slow", [1, 2, 3])
def test_the_worse_half_of_the_samples_does_not_count(slow):
    """Of 3, two count, of 5 three, and of 7 four: they are on a line, the others, which took longer, far from it."""
    good = [ClockSample(at * 10**9, 1000 + 10 * at, 40 + 2 * at) for at in range(slow + 1)]
    bad = [ClockSample(at * 10**9, 10**6 * at, 10_000) for at in range(slow)]
    fit = fit_clock([*bad, *good])
    assert (fit.local_ns, fit.samples) == (0, 2 * slow + 1)
    assert (fit.offset_ns, fit.drift) == (pytest.approx(1000), pytest.approx(1e-8))
    assert fit.uncertainty_ns == pytest.approx(20)


def test_one_sample_gives_the_offset():
    """Without a second sample there is no drift."""
    fit = fit_clock([ClockSample(5, 100, 8)])
    assert (fit.drift, fit.samples) == (0.0, 1)
    assert fit.to_reference(np.array([7])).tolist() == [107]


def test_samples_of_a_run(tmp_path):
    """Each host has its file; a damaged one is an error that names it."""
    append_sample(tmp_path, "node1", ClockSample(0, 50, 10))
    append_sample(tmp_path, "node1", ClockSample(10**10, 60, 10))
    assert read_clocks(tmp_path)["node1"].drift == pytest.approx(1e-9)
    for damaged in (
        "{",
        '{"local_ns": "x", "offset_ns": 1, "round_trip_ns": 1}',
        '{"local_ns": 1}',
        "[" * 9999,
        "\xff",
    ):
        (tmp_path / "clock-node2.samples").write_bytes(f"{damaged}\n".encode("latin-1"))
        with case(damaged), pytest.raises(FormatError, match=r"clock-node2.samples: damaged"):
            read_clocks(tmp_path)


def test_a_clock_can_be_read_from_its_newest_samples(tmp_path):
    """A long run is not read from its beginning for each window: here its clock drifted only at first."""
    for number in range(400):
        offset_ns = 1000 * number if number < 200 else 200_000
        append_sample(tmp_path, "node1", ClockSample(number * 10**10, offset_ns, 100))
    assert read_clocks(tmp_path)["node1"].drift > 0
    newest = read_clocks(tmp_path, 64)["node1"]
    assert newest.drift == pytest.approx(0, abs=1e-15)
    assert 32 <= newest.samples <= 128
