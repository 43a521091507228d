"""Installs hooks and runs them so that they never raise into training.

Failures are counted, a hook that fails is switched off, and one warning per attempt reports it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from .inject._tracekit_recorder import warn
from .patches import PatchSet, Wrap
from .recorder import Recorder


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
