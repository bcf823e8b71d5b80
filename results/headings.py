"""What people read of a result: names of columns, legends below tables, words for its fidelity."""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kllm.results.schema import RunResult

FIDELITY_MEANS = {
    "real": "ran on as many devices as the layout has ranks, with real communication",
    "rank-slice": "one rank's true share of a bigger layout on one device; collectives emulated",
    "modelled": "nothing ran; from a cost model or a simulator",
}

# A column's name ends in its unit.
UNITS = {
    "tokens_per_s": "tok/s",
    "tflops_per_s": "TFLOP/s",
    "gbytes_per_s": "GB/s",
    "gb_per_s": "GB/s",
    "per_s": "/s",
    "percent": "%",
    "pct": "%",
    "mtokens": "M tokens",
    "gib": "GiB",
    "mib": "MiB",
    "gb": "GB",
    "ms": "ms",
    "us": "µs",
    "s": "s",
}
TERMS = {
    "prompt tokens": "ISL",
    "output tokens": "OSL",
    "all gather": "all-gather",
    "pass q": "pass-Q",
}
ACRONYMS = {"kv": "KV", "ttft": "TTFT", "tpot": "TPOT", "isl": "ISL", "osl": "OSL", "slo": "SLO"}

_HIDDEN = "computing on one block takes at least as long as transferring the next"
# By bench and series: what the field's terms do not say by themselves.
LEGENDS = {
    ("fidelity", "rank-slice of real"): (
        "Values are medians; error: median over the rounds, in each of which both ran."
    ),
    ("ring-vs-allgather", "memory"): (
        "KV: of the prompt on one rank, as a ring or with all-gather. peak: KV, and the largest "
        "buffers of a step."
    ),
    ("ring-vs-allgather", "balance"): (
        "critical path over mean: work of each step's busiest rank over that of the mean rank, "
        "computed. measured over mean: the same by measured times."
    ),
    ("ring-vs-allgather", "sweep"): "ratio: throughput of a ring over that of all-gather.",
    ("ring-vs-allgather", "exposure"): (
        "transfer: communication of the context-parallel group. exposed: what of it no "
        "computation hides. exposed share: exposed over transfer. predicted hidden (modelled): "
        f"{_HIDDEN}."
    ),
    ("ring-vs-allgather", "predictions"): (
        "floor: least time of the attention alone (modelled). auto: what cp_kind=auto takes. auto "
        "loss: how much longer that took than the faster kind."
    ),
    ("ring-vs-allgather", "overlap"): (
        f"A ring's last step. hidden: {_HIDDEN}. needed: from where on it is hidden; empty: "
        "nowhere. pass-Q below: share of new tokens under which sending queries, not KV, moves "
        "fewer bytes."
    ),
    ("ring-vs-allgather", "block kernel"): (
        "One dense step of a ring. of matmul: share of the measured matmul rate."
    ),
}


def heading(name: str, unit: str = "") -> str:
    """A column's or series' name in words, with its unit: `ring_peak_gib` is "ring peak GiB".

    Args:
        unit: of the column, for names that do not end in one.
    """
    ending = next((end for end in UNITS if name == end or name.endswith(f"_{end}")), "")
    words = name.removesuffix(ending).replace("_", " ").strip()
    for plain, term in TERMS.items():
        words = words.replace(plain, term)
    words = " ".join(ACRONYMS.get(word, word) for word in words.split(" "))
    if ending:
        return f"{words} {UNITS[ending]}".strip().replace(" /s", "/s")
    return f"{words} ({unit})" if unit and not words.endswith(unit) else words


def tiny_warning(result: "RunResult") -> str:
    """What to read before the verdict of a tiny model's run; "" of any other scale."""
    if result.scale != "tiny":
        return ""
    what = "study" if result.kind == "tune" else "bench"
    return f"Tiny model: this shows that the {what} runs; its times say nothing about a deployment."


def fidelity(result: "RunResult") -> str:
    """The fidelity of a result, what ran, and the fidelities that its tables state themselves."""
    ranks = math.prod(result.layout.get(degree) or 1 for degree in ("tp", "dp", "cp", "pp"))
    words: str = result.fidelity
    if words == "real" and ranks > 1:
        on_cpu = str(result.settings.get("device", "")).startswith("cpu")
        words += f" ({ranks} {'processes on this CPU' if on_cpu else 'GPUs'})"
    elif words == "rank-slice" and ranks > 1:  # else the bench sets layouts of its own
        words += f" (one of {ranks} ranks)"
    said: set[str] = set()
    for series in result.series:
        names = {column.name for column in series.columns}
        said |= names & FIDELITY_MEANS.keys()
        if "fidelity" in names:
            said |= {str(row["fidelity"]) for row in series.to_dicts()}
    others = [name for name in FIDELITY_MEANS if name in said and name != result.fidelity]
    return words + (f"; {' and '.join(others)} where a table says so" if others else "")
