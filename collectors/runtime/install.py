"""Puts all hooks of a session in place: now for what is imported, later for what the job imports later."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from tracekit.collectors.runtime.device import DeviceClock
from tracekit.collectors.runtime.gpu_state import GpuState
from tracekit.collectors.runtime.hooks_comm import CollectiveHooks
from tracekit.collectors.runtime.hooks_compute import LoopHooks, PipelineHooks
from tracekit.collectors.runtime.hooks_host import HostHooks
from tracekit.collectors.runtime.nccl import follow_steps
from tracekit.collectors.runtime.patches import on_import
from tracekit.collectors.runtime.session import Session


def install_hooks(session: Session) -> None:
    """Install what this process can have; what cannot be installed is counted as a failed hook."""
    session.attempt_hook("install-device", _install_device, session)
    host, loop = HostHooks(session), LoopHooks(session)
    pipeline = PipelineHooks(session, loop.stop_looking)
    session.attempt_hook("install-host", host.install)
    session.attempt_hook("install-loop", loop.install)
    _later(session, "torch.distributed.pipelining.schedules", pipeline.install)
    _later(session, "torch.distributed.checkpoint.state_dict_saver", host.install_distributed_checkpoint)
    _later(session, "torch.distributed.checkpoint", host.install_distributed_checkpoint)
    _later(session, "megatron.core.timers", host.install_megatron_timers)
    session.step_listeners.append(_once(host.describe_megatron))
    session.attempt_hook("install-nccl", follow_steps, session)
    if dist.is_available() and dist.is_initialized():
        collectives = CollectiveHooks(session)
        session.attempt_hook("install-collectives", collectives.install)
        _later(session, "torch.distributed._functional_collectives", collectives.install_functional)
        _later(session, "torch.distributed.fsdp._fully_shard._fsdp_param_group", collectives.install_fsdp)
        _later(session, "torch.distributed.device_mesh", functools.partial(_watch_mesh, session))


def _install_device(session: Session) -> None:
    """Be ready to time ops on a GPU where torch can use one; whether the process does shows later."""
    if not (torch.version.cuda or torch.version.hip):
        return
    recorder = session.recorder
    clock = DeviceClock(
        torch.cuda,
        recorder.add,
        functools.partial(recorder.fact, "device-clock"),
        opened=session.device_opened,
        failed=session.device_failed,
    )
    gpu = GpuState(recorder.samples_path, session.options.gpu_sample_s, functools.partial(recorder.fact, "device"))
    session.use_device(clock, gpu)


def _later(session: Session, module: str, install: Callable[[ModuleType], None]) -> None:
    on_import(module, lambda imported: session.attempt_hook(f"install-{module}", install, imported))


def _once(body: Callable[[], None]) -> Callable[[], None]:
    """`body` on the first call only."""
    called = False

    def call() -> None:
        nonlocal called
        if not called:
            called = True
            body()

    return call


def _watch_mesh(session: Session, module: ModuleType) -> None:
    """Write down every device mesh with named or unnamed dimensions."""

    def describe(mesh: Any) -> None:
        session.recorder.fact("mesh", {"names": list(mesh.mesh_dim_names or ()), "ranks": mesh.mesh.tolist()})

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def init(mesh: Any, *args: Any, **kwargs: Any) -> None:
            original(mesh, *args, **kwargs)
            session.attempt_hook("mesh", describe, mesh)

        return init

    session.patches.add(module.DeviceMesh, "__init__", wrap)
