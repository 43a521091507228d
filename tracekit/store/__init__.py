"""The store: many jobs in one folder, each with its windows.

In: validated traces of any kind and findings of the analysis. Out: the same by job and window, and lists of both.
`folder.py` describes the files.
"""

from tracekit.store.catalogue_rows import Incoming, StoredJob, StoredWindow, WindowPart
from tracekit.store.incidents import HANG, Incident
from tracekit.store.store import STORE_VARIABLE, Store, default_store
from tracekit.trace.model import TraceKind

__all__ = [
    "HANG",
    "STORE_VARIABLE",
    "Incident",
    "Incoming",
    "Store",
    "StoredJob",
    "StoredWindow",
    "TraceKind",
    "WindowPart",
    "default_store",
]
