"""`tracekit passport`: measure what a GPU can do, for `whatif --gpu`.

In: a GPU that nothing else uses. Out: a Parquet file.
"""

from __future__ import annotations

from pathlib import Path

import click

from tracekit.base.errors import SelectionError, extra
from tracekit.base.stderr import progress
from tracekit.base.text import counted, printable
from tracekit.commands.options import OUT


@click.command("passport")
@click.option("--out", "-o", type=OUT, required=True, metavar="FILE", help="Parquet file to write.")
@click.option("--device", default="cuda", show_default=True, help="Device of torch, such as cuda:1; cpu for a trial.")
def passport_command(out: Path, device: str) -> None:
    """Measure how long kernels take on this GPU: the passport that `whatif --gpu FILE` reads.

    Takes seconds on a data-centre GPU, three minutes at most; nothing else may use the GPU meanwhile. Under torchrun,
    all-reduces between the ranks are measured, too.
    """
    from tracekit.analysis.hardware.passport import PASSPORT_FILE
    from tracekit.base.atomic_write import check_writable

    check_writable(out, PASSPORT_FILE)
    with extra("torch", "measuring a GPU"):
        import torch

        from tracekit.collectors.measure_passport import measure
    kind = device.partition(":")[0]
    if kind not in {"cuda", "cpu"}:
        raise SelectionError(f"--device {device!r:.40}: expected cuda, cuda:1, ... or cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise SelectionError("torch sees no GPU: run this on the machine that has it, or try --device cpu")
    with progress() as tell:
        tell("measuring kernels")
        try:
            measured = measure(device)
        except (RuntimeError, ValueError) as error:
            raise SelectionError(f"--device {device!r:.40}: {str(error).splitlines()[0]:.200}") from None
    if measured is None:
        return
    passport, more = measured
    passport.write(out, more)
    count = counted(passport.kernels.height, "kernel")
    click.echo(f"Wrote {printable(str(out))}: {count} of {printable(passport.head.gpu)}")
