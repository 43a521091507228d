"""Replacing attributes of foreign modules and taking it back; reacting to imports.

In: what to wrap and how. Out: the wrapped attribute, or, removed, the very object that was there before.
"""

from __future__ import annotations

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
        """Put the wrapper in place."""
        self.original = (
            self.owner.__dict__[self.name] if isinstance(self.owner, type) else getattr(self.owner, self.name)
        )
        setattr(self.owner, self.name, self.wrap(self.original))
        self.installed = True

    def remove(self) -> None:
        """Put the original back."""
        setattr(self.owner, self.name, self.original)
        self.installed = False


class Installable(Protocol):
    """Anything that can be put in place and taken back; `installed` says where it stands."""

    installed: bool

    def install(self) -> None:
        """Put it in place."""

    def remove(self) -> None:
        """Take it back."""


@dataclass
class PatchSet:
    """Patches that come and go together. While `active`, an added patch is installed at once."""

    active: bool = True
    patches: list[Installable] = field(default_factory=list)

    def add(self, owner: Any, path: str, wrap: Wrap) -> bool:
        """Wrap `owner.path` (dots lead through inner objects); False where this version of the library has none."""
        *inner, name = path.split(".")
        for part in inner:
            owner = getattr(owner, part, None)
        if not hasattr(owner, name) or (isinstance(owner, type) and name not in owner.__dict__):
            return False
        self.add_patch(Patch(owner, name, wrap))
        return True

    def add_patch(self, patch: Installable) -> None:
        """Let `patch` come and go with the others. Raises where it cannot be put in place; then it is not kept."""
        patch.install()
        if not self.active:
            patch.remove()
        self.patches.append(patch)

    def install(self) -> None:
        """Put all wrappers in place."""
        self.active = True
        for patch in self.patches:
            if not patch.installed:
                patch.install()

    def remove(self) -> None:
        """Put all originals back, the latest first."""
        self.active = False
        for patch in reversed(self.patches):
            if patch.installed:
                patch.remove()


class _ImportWatcher(importlib.abc.MetaPathFinder):
    """Calls back once a watched module has been imported."""

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

        vars(loader)["exec_module"] = exec_and_tell  # one loader per module
        return spec


_watcher = _ImportWatcher()


def on_import(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Call `callback(module)` when module `name` has been imported; at once where it already is."""
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        callback(module)
        return
    if _watcher not in sys.meta_path:
        sys.meta_path.insert(0, _watcher)
    _watcher.watched.setdefault(name, []).append(callback)
