"""Load pickles of plain values: containers, numbers and strings. Pickles that would import or run code are refused."""

from __future__ import annotations

import io
import pickle
from typing import Any, NoReturn


class RefusedPickleError(pickle.UnpicklingError):
    """A pickle that contains more than plain values; the message is a clause to follow the pickle's name."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise RefusedPickleError(f"refused: it asks for {module}.{name}, but a dump holds only plain values")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise RefusedPickleError(f"refused: it refers to an object outside itself, by a {type(pid).__name__}")


def load_plain(content: bytes) -> Any:
    """The contents of a pickle. Raises RefusedPickleError, or any of `DAMAGE` if the pickle is damaged."""
    return _PlainUnpickler(io.BytesIO(content)).load()


#: Errors of unpickling damaged bytes, except MemoryError, which is left to the caller.
DAMAGE = (
    pickle.UnpicklingError,
    EOFError,
    ImportError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    ArithmeticError,
    RecursionError,
)
