"""Names of nodes as Slurm's hostlists: `node-[1,3-4]`, the form that scontrol and sbatch take and shells pass on.

In: names of hosts from a trace. Out: one line. Ranges are used only where Slurm reads them back as the same names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

#: What a node can be called: a host name, nothing that a shell or Slurm reads otherwise.
_NODE_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
#: A name that ends in a number; not one that is nothing else, nor one whose number Slurm cannot count, in 64 bits.
_NUMBERED = re.compile(r"(.*\D)(\d{1,18})")


def is_node_name(name: str) -> bool:
    """Whether a name can be passed to a shell and to Slurm as it is."""
    return _NODE_NAME.fullmatch(name) is not None


def hostlist(names: Iterable[str]) -> str:
    """Distinct names as a hostlist, in order; numbers at the end of names that begin alike share brackets.

    Numbers written with leading zeros share brackets only with those of the same length. Raises ValueError for what
    `is_node_name` refuses.
    """
    numbers: dict[tuple[str, int], list[int]] = {}
    plain: list[str] = []
    found = sorted(set(names))
    padded = {_group(name) for name in found if (match := _NUMBERED.fullmatch(name)) and match[2].startswith("0")}
    for name in found:
        if not is_node_name(name):
            raise ValueError(f"{name!r:.100} is not a name of a node")
        match = _NUMBERED.fullmatch(name)
        if match is None:
            plain.append(name)
            continue
        group = _group(name)
        key = group if group in padded and len(match[2]) > 1 else (match[1], 1)
        numbers.setdefault(key, []).append(int(match[2]))
    lists = [_with_brackets(prefix, width, sorted(found)) for (prefix, width), found in sorted(numbers.items())]
    return ",".join([*plain, *lists])


def _group(name: str) -> tuple[str, int]:
    """What a numbered name begins with, and how many digits end it."""
    match = _NUMBERED.fullmatch(name)
    assert match is not None
    return match[1], len(match[2])


def _with_brackets(prefix: str, width: int, numbers: list[int]) -> str:
    """The numbers after what they have in common, neighbours as ranges."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [f"{run[0]:0{width}}" if len(run) == 1 else f"{run[0]:0{width}}-{run[-1]:0{width}}" for run in runs]
    return f"{prefix}{words[0]}" if len(numbers) == 1 else f"{prefix}[{','.join(words)}]"
