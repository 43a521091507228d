from collections.abc import Callable
from typing import Any

from tracekit.collectors.runtime.ring import PlainRing as Ring
from tracekit.collectors.runtime.state import PlainState as State

class Hooks:
    """As `PlainHooks`, on the host."""

    def __init__(
        self,
        state: State,
        ring: Ring,
        collectives: Any,
        tensor: type,
        off: set[str],
        waited_for: dict[int, Any],
        inside: dict[int, Any],
        /,
    ) -> None: ...
    def collective(self, name: str, original: Callable[..., Any], /) -> Callable[..., Any]: ...
    def wait(self, name: str, original: Callable[..., Any], /) -> Callable[..., Any]: ...
    def functional(
        self, name: str, original: Callable[..., Any], module: Any, group_at: int, /
    ) -> Callable[..., Any]: ...
    def wait_tensor(self, name: str, original: Callable[..., Any], /) -> Callable[..., Any]: ...
