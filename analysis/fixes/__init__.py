"""What to do about a slow job and what it buys: `price_fixes`.

`workers`, `layers` and `general` make plans (`plan`), with `balance` and `partition` to work them out; `price` replays
them; `first` tells which comes first.
"""

from tracekit.analysis.fixes.model import Fix, FixKind
from tracekit.analysis.fixes.price import fixes_of, price_fixes

__all__ = ["Fix", "FixKind", "fixes_of", "price_fixes"]
