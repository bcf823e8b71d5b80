"""`kllm doctor`: what this machine has, what is missing, and how fast it can be at most."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kllm.cli.console import err, out, say
from kllm.cli.options import AsJson

if TYPE_CHECKING:
    from kllm.hardware import Ceilings, Machine
    from kllm.hardware.links import LinkCeilings


def doctor(
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure the ceilings again, ignoring cached ones.")
    ] = False,
    links: Annotated[
        bool,
        typer.Option("--links", help="On a CPU, measure the link between its processes as well."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show hardware, libraries and measured ceilings, and what they mean for kLLM."""
    import json
    from dataclasses import asdict

    from kllm import hardware

    machine = hardware.detect()
    with err.status("measuring ceilings (once for each machine)"):
        found = hardware.ceilings(fresh=fresh, links=links)
    if as_json:
        document = {
            "machine": asdict(machine),
            "fingerprint": hardware.fingerprint(),
            "ceilings": asdict(found),
            "advice": advice(machine),
        }
        typer.echo(json.dumps(document, indent=1))
        return
    for table in (_hardware(machine), _libraries(machine), _ceilings(found)):
        out.print(table)
    if found.links:
        out.print(_links(found.links))
    for sentence in advice(machine):
        say(out, sentence)


def advice(machine: "Machine") -> list[str]:
    """What the findings mean, one sentence each."""
    found = []
    if not machine.gpus:
        found.append("No NVIDIA GPU: runs use the CPU in float32, and `--scale auto` picks sizes.")
    elif len(machine.gpus) == 1:
        found.append("One GPU: runs are single-rank; links between GPUs were not measured.")
    if machine.threads < machine.cores:
        found.append(
            f"torch uses {machine.threads} of {machine.cores} cores; unset OMP_NUM_THREADS to use "
            "all of them."
        )
    if machine.missing:
        names = ", ".join(lib.name for lib in machine.missing)
        found.append(f"Not installed: {names}. kLLM runs without; the table says what each is for.")
    return found


def _hardware(machine: "Machine") -> Any:
    from rich.table import Table

    gib = 1 << 30
    table = Table("hardware", "")
    table.add_row("platform", machine.platform)
    table.add_row("processor", f"{machine.cpu}, {machine.cores} cores, {machine.threads} threads")
    table.add_row("memory", f"{machine.memory_bytes / gib:.1f} GiB")
    for index, gpu in enumerate(machine.gpus):
        clock = f", up to {gpu.max_sm_clock_mhz:.0f} MHz" if gpu.max_sm_clock_mhz else ""
        about = f"{gpu.name}, {gpu.memory_bytes / gib:.0f} GiB, driver {gpu.driver}{clock}"
        table.add_row(f"GPU {index}", about)
    if not machine.gpus:
        table.add_row("GPU", "none")
    table.add_row("link between GPUs", machine.link)
    table.add_row("Python", machine.python)
    return table


def _libraries(machine: "Machine") -> Any:
    from rich.markup import escape
    from rich.table import Table

    table = Table("library", "version", "for")
    table.add_column("install", overflow="fold")  # to be copied: never cut
    for lib in machine.libraries:
        if lib.version is None and lib.gpu_only and not machine.gpus:
            table.add_row(lib.name, "not needed without a GPU", lib.purpose, "")
        else:
            install = "" if lib.version else escape(lib.install)
            table.add_row(lib.name, lib.version or "[yellow]missing[/yellow]", lib.purpose, install)
    return table


def _ceilings(found: "Ceilings") -> Any:
    from rich.table import Table

    table = Table(f"ceiling ({found.device})", "measured")
    table.add_row(
        "measured at", found.measured_at or "unknown; `kllm doctor --fresh` measures again"
    )
    load = "unknown" if found.load is None else f"{found.load:.2f}"
    beaten = "; a run was faster than these" if found.beaten else ""
    again = "; measured again in a calm moment" if found.doubtful else ""
    table.add_row("load of each core then", load + beaten + again)
    table.add_row("copy, bytes read + written", f"{found.copy_bytes_per_s / 1e9:,.1f} GB/s")
    table.add_row("read", f"{found.read_bytes_per_s / 1e9:,.1f} GB/s")
    for dtype, rate in found.matmul_flops_per_s.items():
        table.add_row(f"matmul {dtype}", f"{rate / 1e12:,.3f} TFLOP/s")
    table.add_row("one small operation", f"{found.launch_s * 1e6:.1f} us")
    return table


def _links(links: "LinkCeilings") -> Any:
    """Times of each collective by the bytes that a rank sends."""
    from rich.table import Table

    names = list(links.curves)
    table = Table(f"sent by each of {links.ranks} ranks", title=f"link, {links.backend}")
    for name in names:
        table.add_column(name.replace("_", "-"), justify="right")
    for points in zip(*links.curves.values(), strict=True):
        size = f"{points[0][0] / 1024:,.0f} KiB"
        table.add_row(size, *(f"{seconds * 1e6:,.0f} us" for _, seconds in points))
    rates = (f"{links.largest(name) / 1e9:,.1f} GB/s" for name in names)
    table.add_row("at the largest", *rates)
    return table
