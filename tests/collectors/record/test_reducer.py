"""What DistributedDataParallel reduces on the host: one collective for all buckets of a backward."""

import dataclasses
import threading
from types import SimpleNamespace

import pytest

from tests.collectors.record.test_clipping import MS, Loop
from tracekit.collectors.record.wire_format import Category

#: Parameters of a model of two layers, and their bytes: 4 x 4 weights and 4 biases each.
BYTES = 2 * (4 * 4 + 4) * 4
#: A thread that waits for what never comes gives up, and the test fails.
TIMEOUT_S = 20.0


@pytest.fixture
def job(monkeypatch):
    return Job(monkeypatch)


@pytest.fixture(autouse=True)
def world():
    """A process group of one rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Job:
    """A loop with a real reducer, on a clock that only the job moves."""

    def __init__(self, monkeypatch):
        from tracekit.collectors.record import hooks_comm
        from tracekit.collectors.record.collectives import SessionCollectives

        self.loop = Loop(monkeypatch)
        self.computed = threading.Event()
        monkeypatch.setattr(hooks_comm, "now_ns", self._now_ns)
        self.hooks = hooks_comm.ReducerHooks(SessionCollectives(self.loop.session))
        self.hooks.install()

    def _now_ns(self):
        self.computed.set()
        return self.loop.now_ns

    def model(self, layers=2, **options):
        import torch
        from torch.nn.parallel import DistributedDataParallel

        layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers)))
        return DistributedDataParallel(layers, bucket_cap_mb=1e-5, **options)

    def backward(self, model):
        import torch

        model(torch.ones(2, 4)).sum().backward()

    @property
    def reductions(self):
        """Length in ms and bytes of each collective."""
        records = [one for one in self.loop.sink.records if one[0] == Category.COLLECTIVE]
        return [((record[8] - record[7]) / MS, record[9]) for record in records]

    def close(self):
        self.loop.session.patches.remove()


@pytest.fixture(autouse=True)
def closed(job):
    yield
    job.close()


@pytest.mark.slow
def test_the_buckets_of_a_backward_are_one_collective(job):
    model = job.model()
    for _ in range(3):
        job.backward(model)
    assert job.reductions == [(0.0, BYTES)] * 3


@pytest.mark.slow
def test_backwards_that_do_not_reduce_have_none(job):
    model = job.model()
    with model.no_sync():
        job.backward(model)
    assert job.reductions == []
    job.backward(model)
    assert len(job.reductions) == 1


def test_it_lasts_from_the_last_gradient_until_the_reducer_has_waited(job):
    """A bucket comes back 7 ms after all gradients were there."""
    import torch

    def reduce(_state, bucket):
        future = torch.futures.Future()

        def complete():
            if job.computed.wait(TIMEOUT_S):
                job.loop.takes(7)
            future.set_result(bucket.buffer())

        threading.Thread(target=complete).start()
        return future

    model = job.model(layers=1)
    model.register_comm_hook(None, reduce)
    job.backward(model)
    assert job.reductions == [(7.0, BYTES / 2)]


def test_a_backward_inside_another_that_computes_the_last_gradient_ends_it(job):
    """As the checkpoints of reentrant activation checkpointing do."""
    import torch
    from torch.utils.checkpoint import checkpoint

    model = job.model(static_graph=True)
    x = torch.ones(2, 4, requires_grad=True)
    for _ in range(3):
        checkpoint(model, x, use_reentrant=True).sum().backward()
    assert len(job.reductions) == 3


def test_nothing_is_kept_while_nothing_is_recorded(job):
    model = job.model()
    job.loop.session.recording = False
    job.backward(model)
    assert job.reductions == []


def test_a_model_without_a_gradient_for_its_first_parameter_has_its_buckets_recorded_one_by_one(job):
    """The first such step shows it: it has no record, and from the next one on each bucket has its own."""
    import torch

    class Partly(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.unused, self.used = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.used(x)

    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(Partly(), find_unused_parameters=True, bucket_cap_mb=1e-5)
    job.backward(model)
    assert job.reductions == []
    job.backward(model)
    job.hooks.collectives._callbacks.wait_for_all()
    assert len(job.reductions) > 1


def test_a_model_can_be_saved_without_a_warning(job, tmp_path, recwarn):
    import torch

    model = job.model()
    job.backward(model)
    torch.save(model.module, tmp_path / "model.pt")
    assert [str(one.message) for one in recwarn] == []


def test_gradients_are_recorded_by_layer(job):
    from tracekit.collectors.record.hooks_comm import bytes_of_layers, bytes_of_stage

    parameters = [
        ("embed.weight", 8),
        ("layers.0.attention.weight", 4),
        ("layers.0.mlp.weight", 2),
        ("layers.1.attention.weight", 4),
        ("head.weight", 16),
        ("head.bias", 1),
    ]
    assert list(bytes_of_layers(parameters).values()) == [8, 6, 4, 17]

    class Stage:
        def __init__(self, parameters):
            self.parameters = parameters

        def named_parameters(self):
            return ((name, SimpleNamespace(nbytes=size, requires_grad=True)) for name, size in self.parameters)

    # An embedding, a norm and a head move with the layer next to them.
    assert bytes_of_stage(Stage(parameters)) == [14, 21]
    assert bytes_of_stage(Stage([("norm.weight", 3), ("head.weight", 16)])) == [3, 16]
    assert bytes_of_stage(Stage([])) == []


def test_a_wrapped_model_says_how_large_its_gradients_are(job, monkeypatch):
    facts = []
    monkeypatch.setattr(type(job.loop.sink), "fact", lambda _, *fact: facts.append(fact))
    job.model(layers=3)
    (figures,) = [value for kind, value in facts if kind == "gradients"]
    cap_mb = pytest.approx(1e-5, rel=0.1)
    assert figures == {"bytes": [80, 80, 80], "bucket_cap_mb": cap_mb, "first_bucket_mb": cap_mb}


def test_buckets_are_recorded_one_by_one_on_request(job, monkeypatch):
    options = dataclasses.replace(job.loop.session.options, buckets=True)
    monkeypatch.setattr(job.loop.session, "options", options)
    model = job.model(layers=2)
    for _ in range(2):  # the reducer makes its buckets in the first one
        job.backward(model)
    assert len(job.reductions) > 2
