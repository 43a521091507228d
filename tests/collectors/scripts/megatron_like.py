"""Trains as Megatron-LM does, with modules named and shaped as its parallel state and its timers: dp 2 x pp 2.

Two microbatches through two stages, blocking transfers, backwards that call the autograd engine directly, an optimizer
whose step clips first. The timers time all of it, some transfers two at once.
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

PARALLEL_STATE = '''
import torch.distributed as dist

_DATA, _PIPELINE, _TENSOR = None, None, None

def initialize_model_parallel(tensor_model_parallel_size=1, pipeline_model_parallel_size=1):
    """Ranks count tensor fastest, then data, then pipeline."""
    global _DATA, _PIPELINE, _TENSOR
    world = dist.get_world_size()
    data = world // pipeline_model_parallel_size
    for stage in range(pipeline_model_parallel_size):
        ranks = list(range(stage * data, (stage + 1) * data))
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            _DATA = group
    for replica in range(data):
        ranks = list(range(replica, world, data))
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            _PIPELINE = group
    for rank in range(world):
        group = dist.new_group([rank])
        if dist.get_rank() == rank:
            _TENSOR = group

def model_parallel_is_initialized():
    return _DATA is not None and _PIPELINE is not None and _TENSOR is not None

def get_data_parallel_group(with_context_parallel=False):
    return _DATA

def get_data_parallel_rank(with_context_parallel=False):
    return _DATA.rank()

def get_data_parallel_world_size(with_context_parallel=False):
    return _DATA.size()

def get_pipeline_model_parallel_rank():
    return _PIPELINE.rank()

def get_pipeline_model_parallel_world_size():
    return _PIPELINE.size()

def get_tensor_model_parallel_rank():
    return _TENSOR.rank()

def get_tensor_model_parallel_world_size():
    return _TENSOR.size()

def get_context_parallel_rank():
    return 0

def get_context_parallel_world_size():
    return 1

def get_virtual_pipeline_model_parallel_world_size():
    return None
'''
TIMERS = '''
class DummyTimer:
    name = "dummy timer"

    def start(self, barrier=False):
        return

    def stop(self, barrier=False):
        return

class Timer:
    def __init__(self, name):
        self.name = name
        self._started = False

    def start(self, barrier=False):
        assert not self._started
        self._started = True

    def stop(self, barrier=False):
        assert self._started
        self._started = False

    def elapsed(self, reset=True, barrier=False):
        """Ends what is being timed and times on."""
        started = self._started
        if started:
            self.stop(barrier=barrier)
            self.start(barrier=barrier)
        return 0.0

class Timers:
    def __init__(self, log_level):
        self._log_level, self._timers, self._dummy_timer = log_level, {}, DummyTimer()

    def __call__(self, name, log_level=None):
        if (log_level or 0) > self._log_level:
            return self._dummy_timer
        return self._timers.setdefault(name, Timer(name))
'''
MICROBATCHES, STEPS, WIDTH = 2, 5, 16


def pretend_megatron(folder):
    """Write the modules the collector knows, so that they are imported the way the real ones are."""
    core = folder / "megatron" / "core"
    core.mkdir(parents=True)
    (folder / "megatron" / "__init__.py").write_text("")
    (core / "__init__.py").write_text("")
    (core / "parallel_state.py").write_text(PARALLEL_STATE)
    (core / "timers.py").write_text(TIMERS)
    sys.path.insert(0, str(folder))


class Timed:
    """Times a block with a timer of Megatron."""

    def __init__(self, timers, name, level=2):
        self.timer = timers(name, log_level=level)

    def __enter__(self):
        self.timer.start()

    def __exit__(self, *exception):
        self.timer.stop()


def main(folder):
    dist.init_process_group("gloo")
    pretend_megatron(folder)
    from megatron.core import parallel_state
    from megatron.core.timers import Timers

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    first = parallel_state.get_pipeline_model_parallel_rank() == 0
    data_parallel = parallel_state.get_data_parallel_group()
    peer = (dist.get_rank() + 2) % 4
    timers = Timers(log_level=2)
    model = torch.nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    timers("interval-time", log_level=0).start()
    for _ in range(STEPS):
        optimizer.zero_grad()
        with Timed(timers, "forward-backward", 1):
            step_first(timers, model, peer) if first else step_last(timers, model, peer)
            with Timed(timers, "all-grads-sync", 1):
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad, group=data_parallel)
        with Timed(timers, "optimizer", 1):
            with Timed(timers, "optimizer-clip-main-grad", 1):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        timers("never-shown", log_level=3).start()
        timers("interval-time").elapsed()
    dist.destroy_process_group()


def forward(timers, model, x):
    with Timed(timers, "forward-compute"):
        return model(x)


def backward(timers, output, gradient):
    """As Megatron does for outputs it has freed: past `torch.autograd.backward`."""
    with Timed(timers, "backward-compute"):
        torch.autograd.Variable._execution_engine.run_backward(
            (output,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
        )


def both(sent, received, peer):
    """A send and a recv at once."""
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]):
        work.wait()


def step_first(timers, model, peer):
    """Both forwards, then both backwards; the second send goes together with the first recv."""
    gradient = torch.empty(4, WIDTH)
    outputs = [forward(timers, model, torch.ones(4, WIDTH))]
    with Timed(timers, "forward-send"):
        dist.send(outputs[0].detach(), peer)
    outputs.append(forward(timers, model, torch.ones(4, WIDTH)))
    with Timed(timers, "forward-send-backward-recv"):
        both(outputs[1].detach(), gradient, peer)
    backward(timers, outputs[0], gradient)
    with Timed(timers, "backward-recv"):
        dist.recv(gradient, peer)
    backward(timers, outputs[1], gradient)


def step_last(timers, model, peer):
    """Forward and backward of each microbatch; the first send goes together with the second recv."""
    x = torch.empty(4, WIDTH, requires_grad=True)
    for microbatch in range(MICROBATCHES):
        if microbatch == 0:
            with Timed(timers, "forward-recv"):
                dist.recv(x.detach(), peer)
        else:
            with Timed(timers, "backward-send-forward-recv"):
                both(x.grad, x.detach(), peer)
        x.grad = None
        loss = forward(timers, model, x).sum()
        backward(timers, loss, torch.ones(()))
    with Timed(timers, "backward-send"):
        dist.send(x.grad, peer)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        main(Path(directory))
