"""A device of torch that is played: tensors without memory, and kernels that take the time that they are given."""

from __future__ import annotations

import subprocess
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from tracekit.analysis.hardware.passport import Passport
from tracekit.collectors.measure_passport import measure

ALLOCATING = {"empty", "randn", "ones"}
KERNELS = {"mm", "bmm", "_scaled_mm", "add", "mul", "gelu", "layer_norm", "softmax", "copy_"}
#: What nvidia-smi prints: clock, power limit, largest limit, mode of slices, driver.
PRINTED = "1980, 650.00, 700.00, Disabled, 550.54.15\n"


class PlayedDevice(TorchFunctionMode):
    """A kernel of `slow_s` takes that long the first time, others 1/64 s; twice as long the second time, and so on."""

    def __init__(self, slow_s: dict[str, float], broken: str) -> None:
        super().__init__()
        self.now_s, self.slow_s, self.broken = 0.0, slow_s, broken
        self.calls, self.last = 0, None
        self.flushed = self.flush_bytes = 0
        #: Calls of kernels by their type, and by whether products could use tf32.
        self.by_type: Counter[tuple[torch.dtype, bool]] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        if name in ALLOCATING:
            kwargs["device"] = "meta"
        elif name == "zero_":
            self.flushed, self.flush_bytes = self.flushed + 1, args[0].numel()
        elif name in KERNELS:
            self._takes_time(name, args[0])
            if self.calls > 1:  # torch has looked at the sizes once
                return None
        return func(*args, **kwargs)

    def _takes_time(self, name: str, tensor: torch.Tensor) -> None:
        if name == self.broken:
            raise RuntimeError("this card lacks it" + 100 * "!")
        self.calls = self.calls + 1 if tensor is self.last else 1
        self.last = tensor
        self.by_type[tensor.dtype, torch.backends.cuda.matmul.allow_tf32] += 1
        self.now_s += self.slow_s.get(name, 1 / 64) * self.calls

    def now(self) -> float:
        return self.now_s

    def event(self, *, enable_timing: bool) -> Any:
        assert enable_timing
        event = SimpleNamespace(at_s=None)
        event.record = lambda: setattr(event, "at_s", self.now_s)
        event.elapsed_time = lambda end: 1e3 * (end.at_s - event.at_s)
        return event


def played(
    device: str, slow_s: dict[str, float] | None = None, printed: str | None = PRINTED, broken: str = "", **asked: Any
) -> tuple[tuple[Passport, dict[str, Any]] | None, PlayedDevice]:
    """What is measured of a played device with 2 GiB; `printed`: by nvidia-smi, None if there is none."""
    play = PlayedDevice(slow_s or {}, broken)
    ran: dict[str, Any] = (
        {"side_effect": OSError} if printed is None else {"return_value": SimpleNamespace(stdout=printed)}
    )
    cuda = {
        "set_device": mock.DEFAULT,
        "synchronize": mock.DEFAULT,
        "current_device": lambda: 0,
        "get_device_capability": lambda: (8, 9),
        "get_device_properties": lambda _: SimpleNamespace(name="NVIDIA H200", total_memory=2 << 30, uuid="12-34"),
        "get_device_name": lambda: "NVIDIA H200 MIG 1g.18gb",
        "Event": play.event,
    }
    with (
        mock.patch.multiple(torch.cuda, **cuda),
        mock.patch.object(subprocess, "run", **ran) as run,
        mock.patch("time.perf_counter", play.now),
        play,
    ):
        measured = measure(device, **asked)
    if run.called:
        assert run.call_args.args[0][-1] == "--id=GPU-12-34"
    return measured, play
