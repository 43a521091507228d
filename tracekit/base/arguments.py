"""What commands share: types of the paths and numbers that they take, and help that lists many options in sections."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from tracekit.base.errors import FormatError, OutputError, SelectionError, TracekitError
from tracekit.base.paths import elsewhere, is_address, object_url, shown, unreadable


class _Path(click.Path):
    """A path; an empty one, as from a variable that is not set, would be the working directory.

    `of_store`: or the address of a store in object storage.
    """

    def __init__(self, *, of_store: bool = False) -> None:
        super().__init__(path_type=Path)
        self._of_store = of_store

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path. Raises SelectionError for an empty one; FormatError for an address that it does not take."""
        if value == "":
            raise SelectionError(f"{'PATH' if param is None else param.human_readable_name}: the path is empty")
        try:
            path = Path(os.fsdecode(super().convert(value, param, ctx)))
        except click.BadParameter:
            raise unreadable(value, PermissionError(errno.EACCES, os.strerror(errno.EACCES))) from None
        if is_address(path) and not (self._of_store and object_url(path) is not None):
            raise self._error(path)
        return path

    def _error(self, path: Path) -> TracekitError:
        return FormatError(f"{shown(path)}: {elsewhere(path)}")


#: The argument or option is a path, or the place of a store.
PATH, STORE_PATH = _Path(), _Path(of_store=True)


class _Out(_Path):
    """The path of a command's output. `stdout`: `-` means that."""

    def __init__(self, *, of_store: bool = False, stdout: bool = False) -> None:
        super().__init__(of_store=of_store)
        self._stdout = stdout

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Reject `-`, which usually means stdout: here it would become a file or folder of that name.

        Raises SelectionError; OutputError for an address.
        """
        if value in ("-", Path("-")) and not self._stdout:
            option = param.opts[-1] if isinstance(param, click.Option) else "-"
            raise SelectionError(f"{option}: '-' does not mean stdout here; name a file or folder")
        return super().convert(value, param, ctx)

    def _error(self, path: Path) -> TracekitError:
        why = "an address" if object_url(path) is None else "in object storage, which is only read"
        return OutputError(f"{shown(path)}: {why}; choose a file or folder")


#: An option for an output path, for one where `-` means stdout, and for a store that is written.
OUT, OUT_OR_STDOUT, OUT_STORE = _Out(), _Out(stdout=True), _Out(of_store=True)


class FiniteRange(click.FloatRange):
    """A number within bounds, which NaN is not, nor infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number. Raises BadParameter."""
        if not math.isfinite(number := float(super().convert(value, param, ctx))):
            self.fail(f"{number} is not in the range {self._describe_range()}.", param, ctx)
        return number


#: The price of a GPU-hour: more than any costs in any currency is a slip of the keyboard.
PRICE = FiniteRange(0, 1_000_000)


class SectionedCommand(click.Command):
    """A command whose options are listed in `sections`: title -> names of parameters. Options that no section names
    follow as "Other": nobody reads an undivided list of thirty options.
    """

    def __init__(self, *arguments: Any, sections: Mapping[str, Sequence[str]], **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, section by section."""
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        records = {option.name: option.get_help_record(ctx) for option in options}
        listed = {name for names in self.sections.values() for name in names}
        for title, names in (*self.sections.items(), ("Other", [name for name in records if name not in listed])):
            rows = [record for name in names if (record := records[name]) is not None]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
