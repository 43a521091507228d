"""What DeepSpeed's engine does around a backward and an optimizer is part of their ops."""

from types import SimpleNamespace

import pytest

from tests.collectors.record.test_clipping import MS, Sink
from tracekit.collectors.record.wire_format import RuntimeOptions


class Job:
    """An engine of two microbatches a step, on a clock that only it moves."""

    def __init__(self, monkeypatch):
        from tracekit.collectors.record import session as session_module
        from tracekit.collectors.record.hooks_compute import DeepSpeedHooks, LoopHooks
        from tracekit.collectors.record.hooks_host import HostHooks

        self.now_ns, self.sink, self.microbatches = 10**9, Sink(lambda: self.now_ns), 0
        monkeypatch.setattr(session_module, "now_ns", lambda: self.now_ns)
        self.session = session_module.Session(self.sink, RuntimeOptions(), rank=0, world_size=1, attempt=0)
        self.host, loop = HostHooks(self.session), LoopHooks(self.session)
        job, autograd = self, SimpleNamespace(__name__="autograd", backward=lambda: job.takes(20))
        self.session.patch(autograd, "backward", loop.around_backward, lacks="backwards")

        class DeepSpeedEngine:
            def backward(self):
                job.takes(1)
                autograd.backward()
                job.takes(4)

            def step(self):
                job.microbatches += 1
                job.takes(2)
                if job.microbatches % 2 == 0:
                    job.host.optimizer_begins(job)  # the optimizer that ZeRO wraps
                    job.takes(5)
                    job.host.optimizer_ended(job)
                    job.takes(3)

            def is_gradient_accumulation_boundary(self):
                return job.microbatches % 2 == 1

        engine = SimpleNamespace(__name__="engine", DeepSpeedEngine=DeepSpeedEngine)
        DeepSpeedHooks(self.session, loop, self.host).install(engine)
        self.engine = DeepSpeedEngine()

    def takes(self, ms):
        self.now_ns += ms * MS

    def ops_ms(self, name):
        """Start and end of each op of that name since the job began."""
        number = self.sink.names[name]
        records = [record for record in self.sink.records if record[2] == number]
        return [((record[7] - 10**9) / MS, (record[8] - 10**9) / MS) for record in records]


@pytest.fixture
def job(monkeypatch):
    return Job(monkeypatch)


def test_the_engine_s_backward_and_step_are_the_ops(job):
    """1 + 20 + 4 ms of backward, twice; 2 of counting between; 2 + 5 + 3 ms of step."""
    for _ in range(2):
        job.engine.backward()
        job.engine.step()
    assert job.ops_ms("backward-compute") == [(0, 25), (27, 52)]
    assert job.ops_ms("optimizer") == [(52, 62)]
