"""Tables of `kllm models MODEL --layout`."""

from typing import TYPE_CHECKING, Any

from kllm.cli.console import out, say

if TYPE_CHECKING:
    from kllm.models.deployment import Deployment, Sequence, Transfer


def print_deployment(found: "Deployment", memory_fraction: float) -> None:
    """Memory and capacity, then the transfers of a step, then the kinds of context parallelism."""
    out.print(_memory(found, memory_fraction))
    if found.dequantised:
        say(
            out,
            "Weights are counted for an engine that keeps them as released; kLLM itself "
            "dequantises them: --dtype bfloat16 counts that.",
        )
    cached = f" behind {found.load.cached:,} cached ones" if found.load.cached else ""
    steps = (
        (f"prefill of {found.load.tokens:,} tokens{cached}", found.prefill),
        (f"decode of {found.load.batch:,} requests", found.decode),
    )
    for title, transfers in steps:
        if transfers:
            out.print(_transfers(f"one rank's transfers, {title}", transfers))
        else:
            say(out, f"No transfers in a {title}.")
    if found.sequence:
        out.print(_hiding(found.sequence))
        for sentence in _sentences(found.sequence):
            say(out, sentence)
    link = found.device.link
    say(
        out,
        "Modelled, for the load of one request-DP group, over a link of "
        f"{size(link.bytes_per_s)}/s and {link.latency_s * 1e6:.3g} us a call. Times are those of "
        "the link, nothing hidden.",
    )


def _memory(found: "Deployment", fraction: float) -> Any:
    from rich.table import Table

    held, gpu = found.capacity, found.device
    worst = held.heaviest
    table = Table(f"{found.model} {found.short_name}", f"{found.layout.world} x {gpu.name}")
    stage = f" (heaviest of {len(held.stages)} stages)" if len(held.stages) > 1 else ""
    table.add_row(f"weights a rank, {found.dtype}", size(worst.weight_bytes) + stage)
    table.add_row(
        f"weights and KV, {fraction:.0%} of {size(gpu.memory_bytes)}", size(held.budget_bytes)
    )
    table.add_row("left for activations", size(found.activation_bytes))
    per_token = max(s.kv_bytes_per_token for s in held.stages)
    table.add_row(f"KV a token on a rank, {found.kv_dtype}", f"{exact(per_token)} bytes")
    copies = f", each entry {held.copies} times" if held.copies > 1 else ""
    table.add_row("KV a token over all ranks", f"{exact(held.kv_bytes_per_token)} bytes{copies}")
    state = max(s.state_bytes_per_request for s in held.stages)
    if state:
        table.add_row("constant state a request on a rank", f"{state:,} bytes")
    if held.rank_tokens:
        beside = f" beside {found.load.batch:,} requests' state" if state else ""
        table.add_row("KV capacity of a rank", f"{held.rank_tokens:,} tokens{beside}")
        table.add_row("KV capacity of the deployment", f"{found.kv_tokens:,} tokens")
        if held.prompt_share > 1:
            share = f"each held {held.prompt_share:.3g} times by its cp ranks"
            table.add_row("prompts computed at a time", f"{held.prompt_tokens:,} tokens, {share}")
    else:
        table.add_row("KV capacity", "none: the weights do not fit")
    return table


def _transfers(title: str, transfers: "tuple[Transfer, ...]") -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("what")
    table.add_column("collective", no_wrap=True)
    for column in ("ranks", "calls", "sent", "time"):
        table.add_column(column, justify="right", no_wrap=True)
    for t in transfers:
        table.add_row(
            t.what,
            t.collective,
            f"{t.ranks}",
            f"{t.calls:,}",
            size(t.sent_bytes),
            f"{t.seconds * 1e3:,.3f} ms",
        )
    seconds, sent = sum(t.seconds for t in transfers), sum(t.sent_bytes for t in transfers)
    table.add_row("all", "", "", "", size(sent), f"{seconds * 1e3:,.3f} ms", style="bold")
    return table


def _hiding(found: "Sequence") -> Any:
    from rich import box
    from rich.table import Table

    title = f"when a ring step hides its transfer, at {found.flops / 1e12:,.0f} TFLOP/s"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("attention")
    table.add_column("entries")
    for column in ("layers", "new tokens a rank from", "link from"):
        table.add_column(column, justify="right")
    for h in found.hiding:
        table.add_row(
            h.attention,
            h.entries,
            f"{h.layers}",
            "never" if h.rows is None else f"{h.rows:,.0f}",
            "none" if h.bytes_per_s is None else f"{size(h.bytes_per_s)}/s",
        )
    return table


def _sentences(found: "Sequence") -> list[str]:
    times = (
        ("ring", found.ring_s),
        ("all-gather", found.all_gather_s),
        ("replicated", found.replicated_s),
    )
    said = [
        "attention of the prefill step: "
        + ", ".join(f"{kind} {seconds * 1e3:,.2f} ms" for kind, seconds in times)
        + f" (computing alone {found.compute_s * 1e3:,.2f} ms)."
    ]
    for edge in found.break_even:
        at = f"{edge.at:,.0f} new tokens" if edge.variable == "tokens" else f"{size(edge.at)}/s"
        below, above = (kind.replace("_", "-") for kind in (edge.below, edge.above))
        said.append(f"Break-even at {at}: {below} is faster below, {above} above.")
    return said


def exact(number: float) -> str:
    """A number with its hundredths, if it has any."""
    return f"{number:,.2f}".removesuffix(".00")


def size(nbytes: float) -> str:
    """Bytes in decimal units, as checkpoints are published."""
    return scaled(nbytes, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")), "B")


def scaled(number: float, units: tuple[tuple[float, str], ...], plain: str) -> str:
    """Three digits of a number in the largest unit below it."""
    for unit, name in units:
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:.0f} {plain}".rstrip()
