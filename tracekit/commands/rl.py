"""The command `tracekit rl`: logs of post-training in; where the step went, and what alternatives cost, out."""

from __future__ import annotations

from pathlib import Path

import click

from tracekit.base.exit_codes import ExitCode
from tracekit.base.stderr import progress
from tracekit.base.text import printable
from tracekit.commands.options import OUT, PATH, console
from tracekit.trace.rl import Format


@click.command("rl")
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=PATH)
@click.option(
    "--format", "written_by", type=click.Choice(["auto", *map(str, Format)]), default="auto", show_default=True,
    help="Who wrote the files; trajectories: the generic format of docs/rl.md.",
)  # fmt: skip
@click.option("--gpus", metavar="rollout=A,trainer=B", help="GPUs of the two roles, for split=A:B.")
@click.option("--slots", type=click.IntRange(1, 1 << 30), help="Most requests that an engine runs at once.")
@click.option(
    "--what-if", "what_ifs", multiple=True, metavar="X",
    help="Price X: staleness=K, partial=Q, engines=N, split=A:B, longest-first. Repeatable.",
)  # fmt: skip
@click.option("--html", type=OUT, metavar="FILE", help="Write one page that needs no network, with pictures.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the report.")
def rl_command(
    files: tuple[Path, ...],
    written_by: str,
    gpus: str | None,
    slots: int | None,
    what_ifs: tuple[str, ...],
    html: Path | None,
    as_json: bool,
) -> int:
    """Where did the step of post-training go, and what would a step of staleness buy?

    FILE is the log of verl, OpenRLHF, slime or NeMo-RL, or trajectories and phases with their times, such as the folder
    into which tracekit.rl records. From phases alone, only staleness has a price; trajectories show queues, tails and
    uneven engines, too.

    An X may set what generation and training take then, such as "staleness=1,generate=40,train=35" in seconds, and
    several changes go together: "staleness=1,partial=0.9".
    """
    import msgspec

    from tracekit.analysis.rl.phases import analyse_phases
    from tracekit.analysis.rl.report import headline
    from tracekit.analysis.rl.scenario import USUAL, Gpus, Scenario
    from tracekit.analysis.rl.trajectories import analyse_trajectories
    from tracekit.base.atomic_write import check_writable, write_text
    from tracekit.collectors.importers.rl.reader import read_rl
    from tracekit.show.documents.rl_page import RL_PAGE_FILE, rl_page
    from tracekit.trace.rl import PhaseLog

    scenarios = [Scenario.parse(text) for text in what_ifs or USUAL]
    known = None if gpus is None else Gpus.parse(gpus)
    if html is not None:
        check_writable(html, RL_PAGE_FILE)
    with progress() as tell:
        tell("reading the log")
        log = read_rl(files, None if written_by == "auto" else Format(written_by))
        tell("replaying the steps")
        if isinstance(log, PhaseLog):
            report = analyse_phases(log, scenarios if what_ifs else scenarios[:1])
        else:
            report = analyse_trajectories(log, scenarios, known, slots)
    if html is not None:
        write_text(html, rl_page(report, log, files[0].name), RL_PAGE_FILE)
        click.echo(f"Wrote {printable(str(html))}", err=True)
    if as_json:
        click.echo(msgspec.json.encode({"headline": headline(report), **msgspec.structs.asdict(report)}))
    else:
        from tracekit.show.terminal.rl import print_rl

        print_rl(report, files[0].name, console())
    return ExitCode.DONE
