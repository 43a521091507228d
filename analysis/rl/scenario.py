"""Changes of a run of post-training: without a loss, or what-ifs as people type them (`split=6:2,generate=40`).

In: text. Out: `Scenario`s.
"""

from __future__ import annotations

import math
import re

from msgspec import Struct

from tracekit.analysis.rl.account import Loss
from tracekit.base.errors import SelectionError
from tracekit.base.text import quoted

#: What is priced if nothing is asked for; without trajectories, the first alone.
USUAL = ("staleness=1", "partial=0.9", "longest-first")
#: ... and more engines by this share, if requests queue.
_MORE_ENGINES = 0.25
_WORDS = re.compile(
    r"staleness=(?P<staleness>-?\d{1,18})|partial=(?P<partial>[-+\w.]+)|engines=(?P<engines>-?\d{1,18})"
    r"|split=(?P<rollout>-?\d{1,18}):(?P<trainer>-?\d{1,18})|(?P<longest_first>longest-first)"
    r"|generate=(?P<generate>[-+\w.]+)|train=(?P<train>[-+\w.]+)"
)
_MOST_STEPS, _MOST_GPUS = 9_999, 999_999


def more_engines(engines: int) -> int:
    """The number of engines to price where requests queue."""
    return math.ceil(engines * (1 + _MORE_ENGINES))


class Without(Struct, frozen=True):
    """A run without one of its losses."""

    loss: Loss


class Scenario(Struct, frozen=True):
    """A run changed in some ways; None: as recorded.

    `staleness`: steps that the weights of a generation may lag behind. `partial`: share of its requests after which a
    generation ends. `engines`: their number. `rollout`, `trainer`: GPUs of each. `longest_first`: requests start and
    are dealt out by length. `generate_s`, `train_s`: seconds that these phases take.
    """

    text: str
    staleness: int | None = None
    partial: float | None = None
    engines: int | None = None
    rollout: int | None = None
    trainer: int | None = None
    longest_first: bool = False
    generate_s: float | None = None
    train_s: float | None = None

    @classmethod
    def parse(cls, text: str) -> Scenario:
        """Read a scenario. Raises SelectionError."""
        settings: dict[str, str] = {}
        for part in re.split(r",| \+ ", text):
            match = _WORDS.fullmatch(part.strip())
            if match is None:
                raise SelectionError(
                    f"{quoted(text)}: {quoted(part)} is none of staleness=K, partial=Q, engines=N, split=A:B,"
                    " longest-first, generate=S, train=S"
                )
            stated = {key: value for key, value in match.groupdict().items() if value is not None}
            if not settings.keys().isdisjoint(stated):
                raise SelectionError(f"{quoted(text)}: {quoted(part)} states once more what is stated before")
            settings |= stated

        def whole(key: str, least: int, most: int) -> int | None:
            value = int(settings[key]) if key in settings else None
            if value is not None and not least <= value <= most:
                raise SelectionError(f"{quoted(text)}: {value} is not in the range {least} to {most:,}")
            return value

        def real(key: str, most: float) -> float | None:
            try:
                value = float(settings[key]) if key in settings else None
            except ValueError:
                value = math.nan
            if value is not None and not 0 < value <= most:
                raise SelectionError(f"{quoted(text)}: {settings[key]} is not a number above 0 and at most {most:g}")
            return value

        return cls(
            text,
            staleness=whole("staleness", 0, _MOST_STEPS),
            partial=real("partial", 1.0),
            engines=whole("engines", 1, _MOST_GPUS),
            rollout=whole("rollout", 1, _MOST_GPUS),
            trainer=whole("trainer", 1, _MOST_GPUS),
            longest_first="longest_first" in settings,
            generate_s=real("generate", 1e12),
            train_s=real("train", 1e12),
        )

    @property
    def regenerates(self) -> bool:
        """Whether the generation itself has to be replayed."""
        return bool(self.partial or self.engines or self.rollout or self.longest_first)


class Gpus(Struct, frozen=True):
    """GPUs of the rollout and of the trainer, as recorded."""

    rollout: int
    trainer: int

    @classmethod
    def parse(cls, text: str) -> Gpus:
        """Read `rollout=A,trainer=B`. Raises SelectionError."""
        match = re.fullmatch(r"rollout=([1-9]\d{0,5}),trainer=([1-9]\d{0,5})", text.replace(" ", ""))
        if match is None:
            raise SelectionError(f"--gpus {quoted(text)}: expected the GPUs of both roles, such as rollout=6,trainer=2")
        return cls(int(match[1]), int(match[2]))
