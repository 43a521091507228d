"""The kinds of GPU ops, calls and idle time: the closed sets of a GPU recording. Processes that read traces import
these without the libraries of the analysis.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from typing import NamedTuple

#: Lines of torch's profiler itself, which a job without it does not run.
PROFILER_LINE = re.compile(r"(.*/)?torch/profiler(/|\.py)")


class KernelClass(StrEnum):
    """The kind of work of a GPU op."""

    COMMUNICATION = "communication"
    ATTENTION = "attention"
    MATRIX_PRODUCT = "matrix-product"
    ELEMENT_WISE = "element-wise"
    OPTIMIZER = "optimizer"
    MEMORY = "memory"
    OTHER = "other"


#: Searched in the lower-case name, in this order.
PATTERNS: Mapping[KernelClass, tuple[str, ...]] = {
    KernelClass.MEMORY: (r"^mem(cpy|set)\b",),
    KernelClass.COMMUNICATION: (
        r"nccl|rccl|msccl|nvshmem|rocshmem|symm_?mem|multimem_|userbuffers",
        # All-reduce of serving engines: vLLM, SGLang, TensorRT-LLM, FlashInfer, AITER.
        r"cross_device_reduce|custom_?all_?reduce|(one|two)_?shot_?all_?reduce|all_?reduce_(fusion_)?kernel",
        r"allreduce_fusion|lamport|moe_?all_?to_?all|quick_?reduce",
        # Expert dispatch and combine: DeepEP and its relatives, PPLX.
        r"deep_?ep|\b(internode(_ll)?|intranode)::|notify_dispatch|cached_notify|all_to_all::|a2a_?(dispatch|combine)",
    ),
    KernelClass.ATTENTION: (r"flash_?(fwd|bwd|attn|attention|mla|infer)|fmha|attention|attn|_mla_|sdpa|paged_kv",),
    KernelClass.OPTIMIZER: (r"multi_tensor_apply|adam|lamb_|sgd|adagrad|fused_?optim|muon|newton_?schulz",),
    KernelClass.MATRIX_PRODUCT: (
        r"gemm|cutlass|cublas|cijk_|matmul|nvjet|splitk|gemv|xmma|_mm_|bmm",
        r"conv|winograd|wgrad|dgrad|implicit",
    ),
    KernelClass.ELEMENT_WISE: (
        r"elementwise|element_wise|pointwise|reduce|softmax|norm|dropout|copy|fill|catarray|index|gather|scatter",
        r"embedding|relu|gelu|silu|swiglu|activation|cast|transpose|permute|triton_(poi|red|per)|bernoulli|cunn_",
        r"nll_loss|where|distribution|random|sort|scan|cumsum|topk|arange|compare|add_|mul_|pool|upsample|rope|rotary",
        r"padding|subtensorop|nchw_?(to|2)_?nhwc|nhwc_?(to|2)_?nchw",
    ),
}


def class_of(name: str) -> KernelClass:
    """Return the class of a kernel of that name, `other` if no pattern matches: libraries rename their kernels."""
    return next((kind for kind, pattern in _compiled() if pattern.search(name.lower())), KernelClass.OTHER)


@cache
def _compiled() -> tuple[tuple[KernelClass, re.Pattern[str]], ...]:
    return tuple((kernel_class, re.compile("|".join(patterns))) for kernel_class, patterns in PATTERNS.items())


class Activity(StrEnum):
    """The profiler's category of a GPU op."""

    KERNEL = "kernel"
    MEMCPY = "memcpy"
    MEMSET = "memset"


class IdleReason(StrEnum):
    """Why a GPU is idle: what the thread that launches its next op does meanwhile; each moment has one reason."""

    LOADER = "loader"  #: it fetches the next batch from a data loader
    GC = "gc"  #: Python collects garbage
    SYNCHRONISE = "synchronise"  #: it waits for the GPU
    ALLOCATION = "allocation"  #: it allocates or frees memory of the GPU
    RUNTIME_CALL = "runtime-call"  #: another call of the runtime
    OPERATOR = "operator"  #: the framework prepares the launch
    PYTHON = "python"  #: Python outside of any operator, or nothing that was recorded
    LAUNCH_CALL = "launch-call"  #: the call that launches
    LAUNCH_LATENCY = "launch-latency"  #: launched, and not yet arrived
    QUEUED = "queued"  #: the op was launched long before, and waits for something else
    UNKNOWN = "unknown"  #: its launch was not recorded
    CHECKPOINT = "checkpoint"  #: it writes a checkpoint


#: Reasons for which the host is not to blame, as far as the recording shows.
NOT_THE_HOST = (IdleReason.LAUNCH_LATENCY, IdleReason.QUEUED, IdleReason.UNKNOWN)


class CallRole(StrEnum):
    """The purpose of a GPU runtime call."""

    LAUNCH = "launch"  #: starts a GPU op of the recording
    SYNCHRONISE = "synchronise"  #: returns once the GPU has done something
    STREAM_WAIT = "stream-wait"  #: makes a stream wait for an event


class LostOps(NamedTuple):
    """The launches of a rank, those of them without a GPU op in the file, and the share of the GPU's time that they
    stand for.
    """

    launches: int
    without_op: int
    share: float


class ProfilerCost(NamedTuple):
    """What recording one event costs the host, seconds: an `operator`, a Python `function`, a `call` of the runtime, a
    `launch` with the calls around it that no recording shows.

    `before_launch`, `in_launch`: what of a launch lies before the call and within it. `stacks`: whether functions were
    recorded.

    A job does not spend it in production.
    """

    operator: float
    function: float
    call: float
    launch: float
    before_launch: float
    in_launch: float
    stacks: bool

    @property
    def words(self) -> str:
        """The costs by part, in words."""
        parts = [("an operator", self.operator), ("a launch", self.launch), ("a Python function", self.function)]
        costs = ", ".join(f"{1e6 * cost:.1f} us {part_name}" for part_name, cost in parts if cost)
        wider = "" if self.stacks else "; without stacks, less of it shows, so the interval is wider"
        return (
            f"recording costs the host {costs}, by the shortest gaps between events; without that, the hosts' work was"
            f" replayed with the GPU's as recorded{wider}"
        )
