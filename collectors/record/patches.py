"""Wraps attributes of other modules, restores them, and reacts to imports.

In: attributes and wrappers. Out: the wrapped attribute; once removed, the original object again.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass
class Patch:
    """One attribute of one object, wrapped while installed."""

    owner: Any
    name: str
    wrap: Wrap
    original: Any = None
    installed: bool = False

    def install(self) -> None:
        """Install the wrapper."""
        self.original = (
            self.owner.__dict__[self.name] if isinstance(self.owner, type) else getattr(self.owner, self.name)
        )
        setattr(self.owner, self.name, self.wrap(self.original))
        self.installed = True

    def remove(self) -> None:
        """Restore the original."""
        setattr(self.owner, self.name, self.original)
        self.installed = False


class Installable(Protocol):
    """Anything that can be installed and removed; `installed` is its current state."""

    installed: bool

    def install(self) -> None:
        """Install it."""

    def remove(self) -> None:
        """Remove it."""


@dataclass
class PatchSet:
    """Patches that are installed and removed together. While `active`, an added patch is installed at once."""

    active: bool = True
    patches: list[Installable] = field(default_factory=list)

    def add(self, owner: Any, path: str, wrap: Wrap) -> bool:
        """Wrap `owner.path` (dotted for inner objects); False if this version of the library does not have it."""
        *inner, name = path.split(".")
        for part in inner:
            owner = getattr(owner, part, None)
        if not hasattr(owner, name) or (isinstance(owner, type) and name not in owner.__dict__):
            return False
        self.add_patch(Patch(owner, name, wrap))
        return True

    def add_patch(self, patch: Installable) -> None:
        """Add a patch. Raises if it cannot be installed; it is not kept then."""
        patch.install()
        if not self.active:
            patch.remove()
        self.patches.append(patch)

    def install(self) -> None:
        """Install all wrappers."""
        self.active = True
        for patch in self.patches:
            if not patch.installed:
                patch.install()

    def remove(self) -> None:
        """Restore all originals, the latest first."""
        self.active = False
        for patch in reversed(self.patches):
            if patch.installed:
                patch.remove()


class _ImportWatcher(importlib.abc.MetaPathFinder):
    """Calls back after a watched module has been imported."""

    def __init__(self) -> None:
        self.watched: dict[str, list[Callable[[ModuleType], None]]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.watched:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                break
        else:
            return None
        loader = spec.loader
        if loader is None or not hasattr(loader, "exec_module"):
            return spec
        execute = loader.exec_module

        def exec_and_tell(module: ModuleType) -> None:
            execute(module)
            for callback in self.watched.pop(fullname, []):
                callback(module)

        with contextlib.suppress(AttributeError, TypeError):  # a loader that cannot be changed: no hooks for its module
            vars(loader)["exec_module"] = exec_and_tell  # one loader per module
        return spec


_watcher = _ImportWatcher()


def on_import(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Call `callback(module)` once module `name` has been imported; at once if it already is."""
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        callback(module)
        return
    if _watcher not in sys.meta_path:
        sys.meta_path.insert(0, _watcher)
    _watcher.watched.setdefault(name, []).append(callback)
