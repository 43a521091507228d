"""Pickles of plain values: containers, numbers and strings. Anything that would import or run code is refused."""

from __future__ import annotations

import io
import pickle
from typing import Any, NoReturn


class RefusedPickleError(pickle.UnpicklingError):
    """A pickle that asks for more than plain values; says it in a clause that follows its name."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise RefusedPickleError(f"refused: it asks for {module}.{name}, but a dump holds only plain values")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise RefusedPickleError(f"refused: it refers to an object outside itself, by a {type(pid).__name__}")


def load_plain(content: bytes) -> Any:
    """What a pickle holds. Raises RefusedPickleError, or for a damaged one any of `DAMAGE`."""
    return _PlainUnpickler(io.BytesIO(content)).load()


#: What unpickling damaged bytes raises; MemoryError, which they can ask for, is left to the caller.
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
