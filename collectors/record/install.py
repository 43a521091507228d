"""Installs all hooks of a session: at once for imported modules, later for modules that the job imports later."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from .collectives import SessionCollectives
from .device import DeviceClock
from .hooks_comm import BUCKETS, CollectiveHooks, FunctionalHooks, ReducerHooks
from .hooks_compute import DeepSpeedHooks, LoopHooks, PipelineHooks
from .hooks_host import HostHooks
from .machine_state import Sampler, device_facts, gpu_reader, host_reader, nccl_version
from .patches import on_import
from .session import Session
from .wire_format import DEFAULT_MASK, ENV_MASK, ENV_PLUGIN, GPU_SUFFIX, HOST_SUFFIX

_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
#: A module with hooks -> the package that imports it. If only the package exists, this torch has moved the module.
_COMES_WITH = {
    "torch.distributed.pipelining.schedules": "torch.distributed.pipelining",
    "torch.distributed.checkpoint.state_dict_saver": "torch.distributed.checkpoint",
    _FSDP: "torch.distributed.fsdp",
}


def install_hooks(session: Session) -> None:
    """Install all hooks that fit this process; those that cannot be installed are reported."""
    session.recorder.fact("torch", {"version": torch.__version__, "device": _device_software()})
    session.install("the host's counters", _sample_host, session, lacks="CPU pressure and throttling")
    session.install("GPU events", _install_device, session, lacks="GPU times; ops have host times")
    host, loop = HostHooks(session), LoopHooks(session)
    pipeline = PipelineHooks(session, loop.stop_looking)
    session.install("the host", host.install, lacks="optimizer, data-load, checkpoint and gc ops")
    session.install("evaluation", session.evaluation.install, lacks="evaluation ops")
    session.install("the loop", loop.install, lacks="the forward and backward ops of plain loops")
    _later(session, "torch.distributed.pipelining.schedules", pipeline.install, lacks="the ops of pipeline stages")
    for name in ("torch.distributed.checkpoint.state_dict_saver", "torch.distributed.checkpoint"):
        _later(session, name, host.install_distributed_checkpoint, lacks="the ops of distributed checkpoints")
    _later(session, "megatron.core.timers", host.install_megatron_timers, lacks="what Megatron's timers time")
    deepspeed = DeepSpeedHooks(session, loop, host)
    _later(session, "deepspeed.runtime.engine", deepspeed.install, lacks="what DeepSpeed does beside torch's calls")
    session.step_listeners.append(_once(host.describe_megatron))
    if session.options.profiler_steps:
        session.install("torch.profiler", _install_profiler, session, lacks="the trace of torch.profiler")
    session.install("NCCL's profiler", follow_steps, session, lacks="the steps of NCCL's events")
    if dist.is_available() and dist.is_initialized():
        collectives = SessionCollectives(session)
        reducer, functional = ReducerHooks(collectives), FunctionalHooks(collectives)
        started = CollectiveHooks(collectives, reducer)
        session.install("torch.distributed", started.install, lacks="collectives")
        session.install("DistributedDataParallel", reducer.install, lacks=BUCKETS)
        _later(session, "torch.distributed._functional_collectives", functional.install, lacks="functional collectives")
        _later(session, _FSDP, started.install_fsdp, lacks="the waits of GPU computes for FSDP2's parameters")
        watch_mesh = functools.partial(_watch_mesh, session)
        _later(session, "torch.distributed.device_mesh", watch_mesh, lacks="the layout that device meshes tell")


def _install_profiler(session: Session) -> None:
    from .profiler import record_steps  # imports torch.profiler

    record_steps(session)


def _device_software() -> str | None:
    """The GPU platform of torch, such as `CUDA 13.0`; None if torch is built without one."""
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    return f"ROCm {torch.version.hip}" if torch.version.hip else None


def _install_device(session: Session) -> None:
    """Prepare to time ops on a GPU if torch can use one; if the process does use one only shows later."""
    if _device_software() is None:
        return
    recorder = session.recorder
    clock = DeviceClock(
        torch.cuda,
        recorder.add,
        functools.partial(recorder.fact, "device-clock"),
        opened=session.device_opened,
        failed=session.device_failed,
    )
    describe = functools.partial(recorder.fact, "device")

    def sampler(index: int) -> Sampler:
        prepare = functools.partial(gpu_reader, device_facts(index), describe)
        return Sampler(recorder.file(GPU_SUFFIX), session.options.gpu_sample_s, prepare)

    session.use_device(clock, sampler)


def _sample_host(session: Session) -> None:
    recorder = session.recorder
    prepare = functools.partial(host_reader, functools.partial(recorder.fact, "host-state"))
    session.sample(Sampler(recorder.file(HOST_SUFFIX), session.options.host_sample_s, prepare))


def _later(session: Session, module: str, install: Callable[[ModuleType], None], *, lacks: str) -> None:
    """Install hooks for `module` once it is imported. If it is not by the end of step 0, check whether it was moved."""

    def look() -> None:
        if _COMES_WITH.get(module) in sys.modules and module not in sys.modules:
            session.lost_hook(module, "module not found", lacks)

    on_import(module, lambda imported: session.install(module, install, imported, lacks=lacks))
    session.step_listeners.append(_once(look))


def _once(body: Callable[[], None]) -> Callable[[], None]:
    """Run `body` on the first call only."""
    called = False

    def call() -> None:
        nonlocal called
        if not called:
            called = True
            body()

    return call


def _watch_mesh(session: Session, module: ModuleType) -> None:
    """Record every device mesh, with or without named dimensions."""

    def describe(mesh: Any) -> None:
        session.recorder.fact("mesh", {"names": list(mesh.mesh_dim_names or ()), "ranks": mesh.mesh.tolist()})

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def init(mesh: Any, *args: Any, **kwargs: Any) -> None:
            original(mesh, *args, **kwargs)
            session.attempt_hook("mesh", describe, mesh)

        return init

    session.patch(module, "DeviceMesh.__init__", wrap, lacks="the layout that device meshes tell")


def follow_steps(session: Session) -> None:
    """Switch NCCL's events on and off with the steps, if `tracekit collect --nccl` gave NCCL its plugin."""
    path = os.environ.get(ENV_PLUGIN)
    if path is None:
        return
    # Such as `nccl` or `cpu:gloo,cuda:nccl`.
    backends = str(dist.get_backend_config()) if dist.is_available() and dist.is_initialized() else ""
    session.recorder.fact("nccl", {"version": nccl_version(), "backends": backends})
    # A library that is opened twice is loaded once: this is the plugin that NCCL has loaded.
    mask = int(os.environ.get(ENV_MASK, str(int(DEFAULT_MASK))), 0)
    set_step: Any = ctypes.CDLL(path).tracekit_nccl_set_step
    set_step.argtypes, set_step.restype = (ctypes.c_int32, ctypes.c_uint32), None

    def tell() -> None:
        set_step(session.step, mask if session.recording else 0)

    tell()
    session.step_entered.append(tell)
