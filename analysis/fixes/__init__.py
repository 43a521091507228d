"""What to do about a slow job and how much time it saves: `price_fixes`.

`workers`, `layers` and `general` make plans (`plan`) with the help of `balance` and `partition`; `price` replays the
plans; `first` decides which fix comes first.
"""

from tracekit.analysis.fixes.model import Fix, FixKind
from tracekit.analysis.fixes.price import fixes_of, price_fixes

__all__ = ["Fix", "FixKind", "fixes_of", "price_fixes"]
