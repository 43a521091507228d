"""Detect if torch.compile is tracing the calling code, in any version of torch.

The compiler treats the result of `is_compiling` as a constant, so compiled code contains no hooks.
"""

from __future__ import annotations

from typing import Any

import torch

#: torch 2.2 has it under another name only.
is_compiling: Any = getattr(torch.compiler, "is_compiling", None) or torch._utils.is_compiling  # noqa: SLF001  its only other name
