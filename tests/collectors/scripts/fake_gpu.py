"""A training loop whose model, loss and optimizer launch kernels on a GPU that is played in Python.

Two microbatches per step: forward 9 ms, loss 3 ms, backward 18 ms; optimizer 6 ms. The host runs ahead of the GPU and
waits for it, as a user does who prints the loss, every fourth step. FAILS_AT: the step from which CUDA refuses.
CAPTURES_AT: the step in which a graph is captured. NVML: a library that is loaded before anybody asks for it by name. A
collection of garbage hides behind long backwards in step 5 and keeps the GPU waiting in step 7. Under torchrun it
trains with DistributedDataParallel over gloo, whose buckets count as the GPU's.
"""

import ctypes
import gc
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3]))
from _tracekit_recorder.collectors.record.device import DeviceClock  # the recorder in a job

import tracekit
from tests.collectors.fake_cuda import CudaError, FakeCuda

if "NVML" in os.environ:
    ctypes.CDLL(os.environ["NVML"])
MS = 1_000_000
GPU = FakeCuda(drift=float(os.environ.get("DRIFT", "0.002")), latency_ns=1_000)
GPU.pretend(torch)
STEPS = int(os.environ.get("STEPS", "40"))


class Kernel(torch.autograd.Function):
    """Takes 9 ms forward and `backward_ms` backward."""

    backward_ms = 18

    @staticmethod
    def forward(_ctx, x):
        GPU.launch(9 * MS)
        return x.clone()

    @staticmethod
    def backward(_ctx, gradient):
        GPU.launch(Kernel.backward_ms * MS)
        return gradient


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return Kernel.apply(self.layer(x))


class Optimizer(torch.optim.SGD):
    def step(self, closure=None):
        GPU.launch(6 * MS)
        return super().step(closure)


def wait_for_gpu():
    """What a user's `.item()` does."""
    while GPU.device_ns() < GPU.streams[0].tail_ns:
        time.sleep(0.0005)


def slow_collection(phase, _info):
    """Makes a collection take 10 ms, less than what the GPU has to do."""
    if phase == "start":
        time.sleep(0.01)


def main():
    gc.disable()
    model = Model()
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
        DeviceClock.owns = lambda _clock, tensor: tensor is not None
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = Optimizer(model.parameters(), lr=0.01)
    for step in range(STEPS):
        if step == int(os.environ.get("FAILS_AT", "-1")):
            GPU.broken = CudaError("an illegal memory access was encountered")
        GPU.capturing = step == int(os.environ.get("CAPTURES_AT", "-1"))
        Kernel.backward_ms = 200 if step == 5 else 18
        for _ in range(2):
            output = model(torch.ones(1, 4))
            GPU.launch(3 * MS)  # the loss
            output.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        tracekit.log(tokens=100 + step, loss=1 / (1 + step))
        if step == 3:
            gc.freeze()  # so that collections find little
        if step in (5, 7):
            if step == 7:
                wait_for_gpu()
            gc.callbacks.append(slow_collection)
            gc.collect(0)
            gc.callbacks.remove(slow_collection)
        if step % 4 == 3 and step != 7:
            wait_for_gpu()
    print("trained", flush=True)


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
