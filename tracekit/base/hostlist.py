"""Names of nodes as Slurm hostlists: `node-[1,3-4]`, which scontrol, sbatch and shells accept.

In: names of hosts from a trace. Out: one line. Ranges are used only if Slurm expands them to the same names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tracekit.base.text import runs

#: A valid node name: a host name without characters that mean something else to a shell or to Slurm.
_NODE_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
#: A name that ends in a number, has more than that number, and whose number fits into Slurm's 64 bits.
_NUMBERED = re.compile(r"(.*\D)(\d{1,18})")


def is_node_name(name: str) -> bool:
    """Whether a name can be passed unquoted to a shell and to Slurm."""
    return _NODE_NAME.fullmatch(name) is not None


def hostlist(names: Iterable[str]) -> str:
    """Distinct names as a hostlist, in order; names with the same prefix and a number at the end share brackets.

    Numbers with leading zeros share brackets only with those of the same length. Raises ValueError for a name that
    `is_node_name` rejects.
    """
    numbers: dict[tuple[str, int], list[int]] = {}
    plain: list[str] = []
    distinct = sorted(set(names))
    padded = {_group(name) for name in distinct if (match := _NUMBERED.fullmatch(name)) and match[2].startswith("0")}
    for name in distinct:
        if not is_node_name(name):
            raise ValueError(f"{name!r:.100} is not a valid node name")
        match = _NUMBERED.fullmatch(name)
        if match is None:
            plain.append(name)
            continue
        group = _group(name)
        key = group if group in padded and len(match[2]) > 1 else (match[1], 1)
        numbers.setdefault(key, []).append(int(match[2]))
    lists = [_with_brackets(prefix, width, found) for (prefix, width), found in sorted(numbers.items())]
    return ",".join([*plain, *lists])


def _group(name: str) -> tuple[str, int]:
    """The prefix of a numbered name, and the number of digits at its end."""
    match = _NUMBERED.fullmatch(name)
    assert match is not None
    return match[1], len(match[2])


def _with_brackets(prefix: str, width: int, numbers: list[int]) -> str:
    """The numbers after their common prefix, neighbours as ranges."""
    ranges = runs(numbers)
    words = [f"{begin:0{width}}" if begin == end else f"{begin:0{width}}-{end:0{width}}" for begin, end in ranges]
    return f"{prefix}{words[0]}" if len(numbers) == 1 else f"{prefix}[{','.join(words)}]"
