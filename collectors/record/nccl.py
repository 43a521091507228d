"""Reports the current step, and whether it is recorded, to the NCCL plugin; records which NCCL this rank has.

In: the session's steps. Out: one call into the plugin per step. It reaches the plugin that NCCL loads itself: a library
that is opened twice is loaded once, so both share its variables.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch.distributed as dist

from .gpu_state import nccl_version
from .nccl_wire_format import DEFAULT_MASK, ENV_MASK, ENV_PLUGIN
from .session import Session


def follow_steps(session: Session) -> None:
    """Switch NCCL's events on and off with the steps, if `tracekit collect --nccl` gave NCCL its plugin."""
    path = os.environ.get(ENV_PLUGIN)
    if path is None:
        return
    session.recorder.fact("nccl", {"version": nccl_version(), "backends": _backends()})
    mask = int(os.environ.get(ENV_MASK, str(int(DEFAULT_MASK))), 0)
    set_step: Any = ctypes.CDLL(path).tracekit_nccl_set_step
    set_step.argtypes, set_step.restype = (ctypes.c_int32, ctypes.c_uint32), None

    def tell() -> None:
        set_step(session.step, mask if session.recording else 0)

    tell()
    session.step_entered.append(tell)


def _backends() -> str:
    """The backends of the process groups, such as `nccl` or `cpu:gloo,cuda:nccl`."""
    return str(dist.get_backend_config()) if dist.is_available() and dist.is_initialized() else ""
