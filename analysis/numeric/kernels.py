"""How compiled functions are compiled: one decorator for all of them.

In: a function over arrays, in the subset of Python that numba compiles. Out: the same as machine code, compiled once
per machine, cached on disk, free of the interpreter's lock so that threads run it side by side. Where nothing can be
cached it is compiled anew by every process: a cache saves time and never costs a run.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core import caching, config
from numba.core.registry import cpu_target


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` on its first call."""
    compiled: Callable[..., Any] = numba.njit(nogil=True, error_model="numpy")(function)
    with contextlib.suppress(RuntimeError):  # no place for a cache
        # What numba's `enable_caching` does, with a cache that cannot fail.
        compiled._cache = _Cache(function)  # type: ignore[attr-defined]  # noqa: SLF001
    return compiled


class _UserCache(caching.UserWideCacheLocator):
    """The user's cache folder, if there is one: without a home its name is relative to wherever tracekit runs."""

    def ensure_cache_path(self) -> None:
        if not Path(self.get_cache_path()).is_absolute():
            raise FileNotFoundError(self.get_cache_path())
        super().ensure_cache_path()


class _TemporaryCache(caching.UserWideCacheLocator):
    """A folder among temporary files that belongs to this user alone: who could write there could run code as them."""

    def __init__(self, function: Callable[..., Any], path: str) -> None:
        super().__init__(function, path)
        self._cache_path = str(_private_folder() / self.get_suitable_cache_subpath(path))

    @classmethod
    def from_function(cls, function: Callable[..., Any], path: str) -> Any:
        try:
            return super().from_function(function, path)
        except OSError:  # no temporary folder, or an unsafe one
            return None


def _private_folder() -> Path:
    """`tracekit-<user id>` in the temporary folder, made if missing. Raises OSError where others could change it."""
    temporary = Path(tempfile.gettempdir())
    shared = temporary.stat()
    others_write = bool(shared.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    if shared.st_uid not in (0, os.geteuid()) or (others_write and not shared.st_mode & stat.S_ISVTX):
        raise PermissionError(f"{temporary}: somebody else could put another folder in the place of ours")
    if not others_write and temporary.samefile(os.curdir):  # what Python takes where there is no temporary folder
        raise FileNotFoundError("no temporary folder")
    folder = temporary / f"tracekit-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"{folder}: not a folder of this user alone")
    return folder


class _CacheContent(caching.CompileResultCacheImpl):
    """What numba caches, in the first of these places that can be written."""

    _locator_classes = [caching.UserProvidedCacheLocator, caching.InTreeCacheLocator, _UserCache, _TemporaryCache]  # noqa: RUF012


class _Cache(caching.FunctionCache):
    """A cache whose damage, missing permissions or full disk mean that the function is compiled again."""

    _impl_class = _CacheContent

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(signature, target_context)
        except OSError:
            self.disable()
        except Exception:  # unpickling a damaged file can raise anything
            with contextlib.suppress(OSError):
                self.flush()
        return None

    def save_overload(self, signature: Any, data: Any) -> None:
        with contextlib.suppress(OSError):
            super().save_overload(signature, data)


def _start_lean() -> None:
    """Set numba up without optimising its own helpers.

    Every process compiles numba's memory-management helpers anew, cache or not. A dozen tiny functions gain nothing
    from the optimiser, but loading it costs 10 MB. Our kernels are compiled later, fully optimised.
    """
    settings: Any = config
    level = settings.OPT
    settings.OPT = type(level)(0)
    try:
        cpu_target.target_context.refresh()
    finally:
        settings.OPT = level


_start_lean()
