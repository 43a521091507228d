"""Waits for a store that a watch is about to make.

In: a store, perhaps not there yet. Out: it is there. A dashboard or a screen is often opened before the job has its
first window.
"""

from __future__ import annotations

import os
import time

from tracekit.base.object_storage import object_url
from tracekit.base.stderr import say
from tracekit.base.text import printable
from tracekit.live.watch import POLL_S
from tracekit.store import Store

#: How the names of stores end.
STORE_ENDING = ".store"


def await_store(store: Store) -> None:
    """Wait until the store is there, and say so. Raises StoreError if something else is in its place, or if it is in
    object storage and not there.
    """
    path = store.path
    if object_url(path) is None and path.name.endswith(STORE_ENDING) and not os.path.lexists(path):
        say(f"tracekit: {printable(str(path))}: no store there yet; waiting for its first window (Ctrl-C ends it)")
        while not (store.is_store() or path.is_file()):
            time.sleep(POLL_S)
    store.check()
