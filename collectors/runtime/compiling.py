"""Whether torch.compile is tracing the code that asks, in any version of torch.

The compiler takes the answer for a constant, so that hooks vanish from what it compiles.
"""

from __future__ import annotations

from typing import Any

import torch

#: torch 2.2 has it under another name only.
is_compiling: Any = getattr(torch.compiler, "is_compiling", None) or torch._utils.is_compiling  # noqa: SLF001  its only other name
