"""The command `tracekit rl`: `whatif` with the options that only runs of post-training have."""

from __future__ import annotations

from pathlib import Path

import click

from tracekit.base.exit_codes import ExitCode
from tracekit.base.stderr import progress
from tracekit.base.text import printable
from tracekit.commands.options import OUT, PATH, console
from tracekit.trace.post_training import Format


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

    FILE is the log of verl, OpenRLHF, slime, NeMo-RL, SkyRL or open-instruct, or trajectories and phases with their
    times, such as the folder into which tracekit.rl records. From phases alone, only staleness has a price;
    trajectories show queues, tails and uneven engines, too.

    An X may set what generation and training take then, such as "staleness=1,generate=40,train=35" in seconds, and
    several changes go together: "staleness=1,partial=0.9".
    """
    import msgspec

    from tracekit.analysis.job.rl import RlJob
    from tracekit.analysis.rl.headline import headline
    from tracekit.analysis.rl.scenario import Gpus
    from tracekit.base.atomic_write import check_writable, write_text
    from tracekit.dashboards.documents.page import PAGE_FILE, page

    if html is not None:
        check_writable(html, PAGE_FILE)
    stated = None if gpus is None else Gpus.parse(gpus)
    with progress("reading the log") as tell:
        job = RlJob.read(files, None if written_by == "auto" else Format(written_by), gpus=stated, slots=slots)
        report = job.whatif(fix=what_ifs, progress=tell)
    account = report.rl
    assert account, "the report on such a run has it"
    if html is not None:
        write_text(html, page(report), PAGE_FILE)
        click.echo(f"Wrote {printable(str(html))}", err=True)
    if as_json:
        click.echo(msgspec.json.encode({"headline": headline(account), **msgspec.structs.asdict(account)}))
    else:
        from tracekit.dashboards.terminal.report import print_report

        print_report(report, console())
    return ExitCode.DONE
