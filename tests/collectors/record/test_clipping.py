"""Gradients that are clipped for an optimizer are part of its op."""

import pytest

from tracekit.collectors.record.wire_format import Category, RuntimeOptions

MS = 1_000_000
OPTIMIZER = object()


class Sink:
    """A recorder that keeps what it is told; `now_ns` is its clock."""

    off = None

    def __init__(self, now_ns):
        self.now_ns, self.records, self.names = now_ns, [], {}

    def add(self, record):
        self.records.append(record)

    def fact(self, kind, value):
        if kind == "name":
            self.names[value[1]] = value[0]


class Loop:
    """A loop on a clock that only it moves, with the hooks around it."""

    def __init__(self, monkeypatch):
        # Here and not above: they import torch, which whoever only collects the tests is spared.
        from tracekit.collectors.record import session as session_module
        from tracekit.collectors.record.hooks_host import HostHooks

        self.now_ns, self.sink = 10**9, Sink(lambda: self.now_ns)
        monkeypatch.setattr(session_module, "now_ns", lambda: self.now_ns)
        self.session = session_module.Session(self.sink, RuntimeOptions(), rank=0, world_size=1, attempt=0)
        self.hooks = HostHooks(self.session)
        self.optimizing = []

    def takes(self, ms):
        self.now_ns += ms * MS

    def backward(self):
        start = self.session.begin_op()
        self.takes(20)
        self.session.record_compute("backward-compute", start, self.now_ns, 0, -1)

    def clip(self, inner=None):
        def clipped():
            self.takes(1)
            self.optimizing.append(self.session.optimizing)
            if inner is not None:
                inner()
            self.takes(2)

        self.hooks._clipping(clipped)()

    def step(self, optimizer=OPTIMIZER):
        self.hooks.optimizer_begins(optimizer)
        self.takes(5)
        self.hooks.optimizer_ended(optimizer)

    @property
    def optimizers_ms(self):
        """Start and end of each optimizer op since the loop began."""
        number = self.sink.names["optimizer"]
        records = [record for record in self.sink.records if record[0] == Category.OPTIMIZER and record[2] == number]
        return [((record[7] - 10**9) / MS, (record[8] - 10**9) / MS) for record in records]


@pytest.fixture
def loop(monkeypatch):
    return Loop(monkeypatch)


@pytest.mark.slow
def test_the_optimizer_begins_where_its_gradients_are_clipped(loop):
    """A backward of 20 ms, clipping of 3, 1 of something else, a step of 5."""
    loop.backward()
    loop.clip()
    loop.takes(1)
    loop.step()
    assert loop.optimizers_ms == [(20, 29)]


def test_functions_that_clip_inside_others_do_not_move_the_start(loop):
    loop.backward()
    loop.clip(inner=loop.clip)
    loop.step()
    assert loop.optimizers_ms == [(20, 31)]
    assert loop.optimizing == [True, True]
    assert not loop.session.optimizing


def test_clipping_that_computes_go_between_is_no_part_of_the_optimizer(loop):
    """Gradients of each microbatch are clipped: only behind the last backward is the optimizer's turn."""
    loop.backward()
    loop.clip()
    loop.backward()
    loop.step()
    assert loop.optimizers_ms == [(43, 48)]


def test_each_optimizer_of_a_step_has_its_own_clipping(loop):
    loop.backward()
    loop.clip()
    loop.step()
    loop.clip()
    loop.step(optimizer=object())
    assert loop.optimizers_ms == [(20, 28), (28, 36)]
    assert loop.session.step == 0


def test_clipping_that_raises_is_over(loop):
    def fails():
        raise RuntimeError("non-finite")

    loop.backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        loop.clip(inner=fails)
    assert not loop.session.optimizing
