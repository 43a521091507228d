"""Classify GPU ops by the name of their kernel.

In: names. Out: classes. One table of patterns decides, and the first match counts; a user's own patterns come before
it. Libraries rename their kernels with every release: a name without a match is `other`, listed by time in the report.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tracekit.base.errors import SelectionError
from tracekit.base.patterns import check_pattern, search
from tracekit.collectors.importers.published import read_mapping
from tracekit.trace.gpu_activity import KernelClass

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
_CLASSES = ", ".join(sorted({str(known) for known in KernelClass} - {str(KernelClass.OTHER)}))


@dataclass(frozen=True)
class KernelClasses:
    """Patterns of names. `own`: those of the user, which come before the table."""

    own: tuple[tuple[KernelClass, str], ...] = ()

    def of(self, names: Sequence[str]) -> list[KernelClass]:
        """Return the class of each kernel."""
        classes = [
            next((known for known, pattern in _TABLE if pattern.search(name.lower())), KernelClass.OTHER)
            for name in names
        ]
        for kernel_class, pattern in reversed(self.own):
            classes = [
                kernel_class if matches else known
                for matches, known in zip(search(pattern, names, any_case=True), classes, strict=True)
            ]
        return classes


def kernel_classes(stated: Sequence[str] = ()) -> KernelClasses:
    """Parse a user's patterns, each `class=regular expression` or the path of a YAML file of them.

    The file maps classes to a pattern or a list of patterns. Raises SelectionError or FormatError for anything else.
    """
    own: list[tuple[KernelClass, str]] = []
    for text in stated:
        name, equals, pattern = text.partition("=")
        if equals:
            own.append(_pattern(name, pattern, "--kernel-class"))
        else:
            own += [_pattern(known, one, text) for known, many in _read(Path(text)).items() for one in many]
    return KernelClasses(tuple(own))


_TABLE = tuple((kernel_class, re.compile("|".join(patterns))) for kernel_class, patterns in PATTERNS.items())


def _pattern(name: str, pattern: str, where: str) -> tuple[KernelClass, str]:
    if name.strip() not in {str(known) for known in KernelClass}:
        raise SelectionError(f"{where}: {name!r:.40} is not a kernel class; expected one of {_CLASSES}")
    try:
        check_pattern(pattern, any_case=True)
    except ValueError as error:
        raise SelectionError(f"{where}: {error}") from None
    return KernelClass(name.strip()), pattern


def _read(path: Path) -> Mapping[str, Sequence[str]]:
    content = read_mapping(path, "communication: [my_all_reduce]")
    return {
        str(name): [str(one) for one in (many if isinstance(many, list) else [many])] for name, many in content.items()
    }
