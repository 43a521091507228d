"""Login sessions: a secret for each, of which only the hash is kept, in memory.

In: users who have given their password. Out: secrets for a cookie, and the users behind them until they expire, log
out, or lose or change their password.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

#: Longest age of a session, and longest time without a request.
LONGEST_S, IDLE_S = 12 * 3600.0, 3600.0
#: Sessions kept; the one unused for longest goes first.
SESSIONS_KEPT = 10_000


@dataclass(slots=True)
class _Session:
    user: str
    hashed: str  # of the password at login: a new password ends the session
    since_s: float
    used_s: float


class Sessions:
    """Sessions of users. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._open: OrderedDict[bytes, _Session] = OrderedDict()

    def begin(self, user: str, hashed: str, secret: str | None = None) -> str:
        """Begin a session of a user with that password hash; return its secret, a new one unless given."""
        secret = secret or secrets.token_urlsafe(32)
        with self._lock:
            now = self._clock()
            self._open[_key(secret)] = _Session(user, hashed, now, now)
            while len(self._open) > SESSIONS_KEPT:
                self._open.popitem(last=False)
        return secret

    def user(self, secret: str, hashes: Mapping[str, str]) -> str | None:
        """Return the user of a secret; None if it is unknown or expired, or if the user's hash has changed."""
        with self._lock:
            now, key = self._clock(), _key(secret)
            found = self._open.get(key)
            if found is None:
                return None
            fresh = now - found.since_s < LONGEST_S and now - found.used_s < IDLE_S
            if not fresh or hashes.get(found.user) != found.hashed:
                del self._open[key]
                return None
            found.used_s = now
            self._open.move_to_end(key)
            return found.user

    def end(self, user: str) -> None:
        """End all sessions of a user, on every device."""
        with self._lock:
            for key in [key for key, one in self._open.items() if one.user == user]:
                del self._open[key]


def _key(secret: str) -> bytes:
    """Return the hash of a secret: identifies it, but cannot be used to log in."""
    return hashlib.sha256(secret.encode()).digest()
