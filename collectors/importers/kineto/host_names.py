"""Classify calls by the names of the operators and annotations around them.

In: names. Out: steps, phases of a step, actions of a pipeline schedule, collectives.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

COLLECTIVE_OPERATOR = "record_param_comms"
STEP = re.compile(r"ProfilerStep#(\d{1,9})(?!\d)")
#: Names that mark the phase of a step; the first match counts.
_PHASE_PATTERNS = (
    ("optimizer", re.compile(r"^Optimizer\.(step|zero_grad)#|^optimizer", re.IGNORECASE)),
    ("backward", re.compile(r"^autograd::engine::evaluate_function|^#*\s*backward|^PP:\d+[BIW]\d", re.IGNORECASE)),
)
#: Phases by number; the first is the default.
PHASES = ("forward", *(phase for phase, _ in _PHASE_PATTERNS))
#: Calls that make the GPU do something.
LAUNCHES = re.compile(r"Launch|Memcpy|Memset")
#: Those that run something on a GPU, at once or as soon as its stream is free.
RUNS_ON_GPU = re.compile(r"^(cuda|hip|cu)((Graph)?Launch(?!HostFunc)|Mem(cpy|set))")
#: The calls around what is captured into a graph instead of run.
BEGINS_CAPTURE, ENDS_CAPTURE = re.compile(r"StreamBeginCapture"), re.compile(r"StreamEndCapture")
#: Annotations of torch, which its versions before 1.11 call operators.
ANNOTATION = re.compile(r"^(ProfilerStep|enumerate\(DataLoader\)|Optimizer\.(step|zero_grad))#")
#: Calls that wait for the GPU whatever they were given.
SYNCHRONISES = re.compile(r"(Device|Stream|Event|Ctx|Context)Synchronize")
#: Copies of which one side is the host: neither within a GPU nor between two.
HOST_COPY = re.compile(r"^(?!.*(DtoD|PtoP))")
#: Actions of torch.distributed.pipelining: PP:2F0 is the forward of microbatch 0 on stage 2.
PIPELINE_ACTION = re.compile(r"^PP:\d{1,6}(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)\d{1,9}$")
#: An annotation of a module's forward, backward or weight gradients, such as "attn(F)".
PASS_OF_MODULE = re.compile(r"\w+\([FBW]\)")
#: Functions that compute activations again, of torch, Megatron and DeepSpeed; and the backward inside of some of them.
RECOMPUTES = (
    re.compile(
        r"(^|/)torch/utils/checkpoint\.py\(\d+\): (recompute_fn|backward)$"
        r"|(^|/)(tensor_parallel/random|activation_checkpointing/checkpointing)\.py\(\d+\): backward$"
    ),
    re.compile(r"(^|/)torch/autograd/__init__\.py\(\d+\): backward$"),
)
NCCL_ANNOTATION = re.compile(r"^(?:nccl|rccl):(\w+)")


def codes_of_phases(names: Sequence[str]) -> list[list[int]]:
    """Return, for each of PHASES but the first, the positions of the names that mark it."""
    return [[code for code, name in enumerate(names) if pattern.search(name)] for _, pattern in _PHASE_PATTERNS]
