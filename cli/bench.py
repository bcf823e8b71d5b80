"""`kllm bench`: the table of its commands; results on stdout, progress on stderr."""

from collections.abc import Callable, Mapping

import typer

from kllm.cli.bench_engine import compare_power, latency, overhead, throughput, vs_transformers
from kllm.cli.bench_experts import expert_balance
from kllm.cli.bench_parallel import fidelity, ring_vs_allgather, tp_vs_dp_attention
from kllm.cli.bench_progress import watched
from kllm.cli.console import out
from kllm.cli.options import AsJson

bench_app = typer.Typer(no_args_is_help=True, help="Measure the engine on this machine.")
COMMANDS: Mapping[str, Callable[..., None]] = {
    "latency": latency,
    "throughput": throughput,
    "overhead": overhead,
    "vs-transformers": vs_transformers,
    "compare-power": compare_power,
    "fidelity": fidelity,
    "ring-vs-allgather": ring_vs_allgather,
    "tp-vs-dp-attention": tp_vs_dp_attention,
    "expert-balance": expert_balance,
}


def list_benches(as_json: AsJson = False) -> None:
    """List the benches and what each sweeps."""
    import json

    from rich.table import Table

    from kllm.bench.base import BENCHES

    if as_json:
        rows = {n: {"summary": e.summary, "sweeps": e.sweeps} for n, e in BENCHES.items()}
        typer.echo(json.dumps(rows, indent=1))
        return
    table = Table("bench", "measures", "boundary along")
    for name, entry in BENCHES.items():
        table.add_row(name, entry.summary, entry.sweeps)
    out.print(table)


bench_app.command("list")(list_benches)
for _name, _command in COMMANDS.items():
    bench_app.command(_name)(watched(_name, _command))
