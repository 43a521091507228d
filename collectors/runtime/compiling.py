"""Detect if torch.compile is tracing the calling code, in any version of torch.

The compiler treats the results of `is_compiling` and `is_traced` as constants, so compiled code contains no hooks.
"""

from __future__ import annotations

from typing import Any

import torch

#: torch 2.2 has it under another name only.
is_compiling: Any = getattr(torch.compiler, "is_compiling", None) or torch._utils.is_compiling  # noqa: SLF001  its only other name
#: The same in two parts, at a third of the cost: `is_traced() or compiler_says(COMPILES)`, for the path of collectives.
is_traced: Any = getattr(torch.compiler, "is_dynamo_compiling", is_compiling)
compiler_says = vars(torch.compiler).get
COMPILES = "_is_compiling_flag"
