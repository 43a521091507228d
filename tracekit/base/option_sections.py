"""Help of a command with many options, in sections.

In: the names of its options by section. Out: a command whose `--help` lists them under these titles. A list of thirty
options in one piece is one that nobody reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click


class SectionedCommand(click.Command):
    """A command whose options are listed in `sections`: title -> names of parameters. Options that no section names
    follow as "Other".
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
