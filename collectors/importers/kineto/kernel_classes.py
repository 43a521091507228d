"""Classify GPU ops by the name of their kernel.

In: names. Out: classes. The table of `tracekit.trace.gpu_activity` decides; a user's own patterns come before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tracekit.base.errors import SelectionError
from tracekit.base.patterns import check_pattern, search
from tracekit.collectors.importers.published import read_mapping
from tracekit.trace.gpu_activity import KernelClass, class_of

_CLASSES = ", ".join(sorted({str(known) for known in KernelClass} - {str(KernelClass.OTHER)}))


@dataclass(frozen=True)
class KernelClasses:
    """Patterns of names. `own`: those of the user, which come before the table."""

    own: tuple[tuple[KernelClass, str], ...] = ()

    def of(self, names: Sequence[str]) -> list[KernelClass]:
        """Return the class of each kernel."""
        classes = [class_of(name) for name in names]
        for kernel_class, pattern in reversed(self.own):
            classes = [
                kernel_class if matches else known
                for matches, known in zip(search(pattern, names, any_case=True), classes, strict=True)
            ]
        return classes


def kernel_classes(stated: Sequence[str] = ()) -> KernelClasses:
    """Parse a user's patterns, each `class=regular expression` or the path of a YAML file of them.

    The file maps classes to a pattern or a list of patterns. Raises SelectionError or FormatError for anything else.
    """
    own: list[tuple[KernelClass, str]] = []
    for text in stated:
        name, equals, pattern = text.partition("=")
        if equals:
            own.append(_pattern(name, pattern, "--kernel-class"))
        else:
            own += [_pattern(known, one, text) for known, many in _read(Path(text)).items() for one in many]
    return KernelClasses(tuple(own))


def _pattern(name: str, pattern: str, where: str) -> tuple[KernelClass, str]:
    if name.strip() not in {str(known) for known in KernelClass}:
        raise SelectionError(f"{where}: {name!r:.40} is not a kernel class; expected one of {_CLASSES}")
    try:
        check_pattern(pattern, any_case=True)
    except ValueError as error:
        raise SelectionError(f"{where}: {error}") from None
    return KernelClass(name.strip()), pattern


def _read(path: Path) -> Mapping[str, Sequence[str]]:
    content = read_mapping(path, "communication: [my_all_reduce]")
    return {
        str(name): [str(one) for one in (many if isinstance(many, list) else [many])] for name, many in content.items()
    }
