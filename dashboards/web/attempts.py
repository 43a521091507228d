"""Rate limit for passwords: hashing is expensive on purpose, so unlimited tries would use up the processor.

In: addresses of clients. Out: whether one more try is allowed, and when the next one is.
"""

from __future__ import annotations

import ipaddress
import math
import threading
from collections import OrderedDict, deque
from collections.abc import Callable

#: Tries in WINDOW_S from one address, and from all together: a hash takes about 60 ms, so 120 take an eighth of a core.
MOST_FROM_ONE, MOST_IN_ALL, WINDOW_S = 10, 120, 60.0
#: Addresses remembered. The total limit holds clients with more of them.
ADDRESSES_KEPT = 10_000


class Attempts:
    """Counts tries in a sliding window. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._all: deque[float] = deque(maxlen=MOST_IN_ALL)
        self._by_address: OrderedDict[str, deque[float]] = OrderedDict()

    def wait_s(self, address: str) -> int:
        """Count a try from an address; return 0 if it is allowed, else the whole seconds until the next one is."""
        with self._lock:
            now, key = self._clock(), network_of(address)
            own = self._by_address.setdefault(key, deque(maxlen=MOST_FROM_ONE))
            self._by_address.move_to_end(key)
            while len(self._by_address) > ADDRESSES_KEPT:
                self._by_address.popitem(last=False)
            for tries in (own, self._all):
                if len(tries) == tries.maxlen and (left := tries[0] + WINDOW_S - now) > 0:
                    return math.ceil(left)
            own.append(now)
            self._all.append(now)
            return 0


def network_of(address: str) -> str:
    """Return the IPv4 address, or the /64 network that an IPv6 household or machine has."""
    if (parsed := ip_address(address)) is None:
        return ""
    return str(parsed) if parsed.version == 4 else str(ipaddress.ip_network((parsed, 64), strict=False))


def ip_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return a numeric address; None for anything else."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
