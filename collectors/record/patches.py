"""Wraps attributes of other modules so that hooks never raise into training, restores them, and reacts to imports."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

from .inject._tracekit_recorder import warn
from .recorder import Recorder

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


class Guard:
    """The hooks of one rank: those installed (`patches`), how often each has failed (`failures`), which are `off`.

    A hook's body runs in `attempt_hook`.
    """

    def __init__(self, recorder: Recorder, rank: int) -> None:
        self.recorder, self.rank = recorder, rank
        self.patches = PatchSet()
        self.failures: Counter[str] = Counter()
        self.off: set[str] = set()

    def failed(self, hook: str, error: BaseException) -> None:
        """Count the failure of a hook, disable that hook and warn once per attempt."""
        self.failures[hook] += 1
        self.off.add(hook)
        with contextlib.suppress(Exception):  # the words of a foreign error can raise, too
            if self.failures.total() == 1 and self.recorder.first_of_all_ranks("hook-failed"):
                warn(
                    f"rank {self.rank}: the hook {hook} failed ({type(error).__name__}: {error!s:.200}) and is now off;"
                    " training continues, and `tracekit collect` reports further failures at the end"
                )

    def attempt_hook(self, hook: str, body: Callable[..., Any], *args: Any) -> Any:
        """Run a hook's body; None if it failed or is off."""
        if hook in self.off:
            self.failures[hook] += 1
            return None
        try:
            return body(*args)
        except Exception as error:
            self.failed(hook, error)
            return None

    def patch(self, owner: Any, path: str, wrap: Wrap, *, lacks: str) -> None:
        """Hook `owner.path`. If that fails, report that the trace lacks `lacks`; training goes on."""
        self.patch_any(owner, {path: wrap}, lacks=lacks)

    def patch_any(self, owner: Any, wraps: Mapping[str, Wrap], *, lacks: str) -> None:
        """As `patch`, for a function with several names, old and new: hook those that exist."""
        hook = f"{getattr(owner, '__module__', '')}.{owner.__name__}.{next(iter(wraps))}".lstrip(".")
        try:
            added = [path for path, wrap in wraps.items() if self.patches.add(owner, path, wrap)]
        except Exception as error:
            self.lost_hook(hook, f"{type(error).__name__}: {error}", lacks)
        else:
            if not added:
                self.lost_hook(hook, "not found", lacks)

    def install(self, hook: str, body: Callable[..., Any], *args: Any, lacks: str) -> None:
        """Run `body`, which installs a hook. If it raises, report that the trace lacks `lacks`."""
        try:
            body(*args)
        except Exception as error:
            self.lost_hook(hook, f"{type(error).__name__}: {error}", lacks)

    def lost_hook(self, hook: str, reason: str, lacks: str) -> None:
        """Report a hook that could not be installed: to the user once, and in the facts of every rank."""
        self.recorder.fact("lost-hook", {"hook": hook, "reason": reason, "lacks": lacks})
        if self.recorder.first_of_all_ranks(f"lost-{hook}"):
            warn(
                f"rank {self.rank}: {hook} cannot be hooked ({reason:.200}); training continues, the trace lacks"
                f" {lacks}"
            )
