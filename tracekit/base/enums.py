"""`StrEnum` of Python 3.11 for the older Python versions in which training may run.

Nothing flows in or out.
"""

from __future__ import annotations

import sys

if sys.version_info >= (3, 11):
    from enum import StrEnum
else:
    from enum import Enum

    class StrEnum(str, Enum):
        """An enum whose members are strings and print as such."""

        __str__ = str.__str__


__all__ = ["StrEnum"]
