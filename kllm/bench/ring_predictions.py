"""What is predicted of a layout that `ring-vs-allgather` measures, and when its ring pays.

Times are floors of the attention alone at rates of this machine: fidelity "modelled".
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kllm.config import EngineConfig
from kllm.engine.cp_kind import cp_setting, with_cp_kind
from kllm.models.load import ResolvedModel
from kllm.parallel.footprint import ModelShape
from kllm.parallel.overlap import (
    ALL_GATHER,
    RING,
    AttentionShape,
    Phase,
    PromptChunk,
    Setting,
    Times,
    crossings,
    hiding_bandwidth,
    hiding_rows,
    pass_q_share,
    predict_prompt,
)
from kllm.results.compare import number

BANDWIDTHS = (1e9, 4e12)  # bytes a second, where predicted crossings are looked for
LAYOUT = ("model", "cp", "chunk")  # columns that say what ran
UNITS = {
    "ring_s": "s",
    "all_gather_s": "s",
    "ring_floor_s": "s",
    "all_gather_floor_s": "s",
    "auto_loss_pct": "%",
    "link_gb_per_s": "GB/s",
    "needed_gb_per_s": "GB/s",
    "new_tokens_pct": "%",
    "pass_q_below_pct": "%",
}


@dataclass(frozen=True, slots=True)
class Sweep:
    """A layout of a model whose prompts were measured."""

    config: EngineConfig
    resolved: ResolvedModel
    shape: ModelShape
    chunk: int

    @property
    def attention(self) -> tuple[AttentionShape, ...]:
        """The attention of the layers."""
        return self.shape.attention

    @property
    def attention_names(self) -> str:
        """The kinds of attention of the layers."""
        return "+".join(dict.fromkeys(kind.name.partition(",")[0] for kind in self.attention))

    @property
    def about(self) -> dict[str, Any]:
        """What all rows of the layout begin with: `LAYOUT`."""
        found = (self.resolved.name, self.config.parallel.cp, self.chunk)
        return dict(zip(LAYOUT, found, strict=True))

    def on(self, link: str) -> EngineConfig:
        """The config over a link; over the machine's own where ranks really run."""
        return replace(self.config, link=link) if self._sliced else self.config

    @property
    def _sliced(self) -> bool:
        return self.config.fidelity == "rank-slice"

    def setting(self, link: str) -> Setting:
        """What predictions over a link are made with: rates measured on this machine."""
        return cp_setting(self.on(link), self.resolved)

    def chosen(self, link: str) -> str:
        """The kind that the engine takes by itself."""
        config = self.on(link)
        left_open = replace(config, parallel=replace(config.parallel, cp_kind="auto"))
        return with_cp_kind(left_open, self.resolved).parallel.cp_kind


def prediction(sweep: Sweep, isl: int, link: str, seconds: Mapping[str, float]) -> dict[str, Any]:
    """Ring and all-gather: measured, floors of the attention alone, and what the engine chooses.

    Args:
        seconds: of the prompt by each of these kinds, measured.
    """
    times = predict_prompt(
        sweep.attention, sweep.setting(link), tokens=isl, chunk_tokens=sweep.chunk
    )
    chosen = sweep.chosen(link)
    return {
        "ring_s": seconds[RING],
        "all_gather_s": seconds[ALL_GATHER],
        "ring_floor_s": times.ring,
        "all_gather_floor_s": times.all_gather,
        "auto": chosen,
        "auto_loss_pct": 100 * (seconds[chosen] / min(seconds.values()) - 1),
    }


def overlap(sweep: Sweep, isl: int, link: str) -> Iterator[dict[str, Any]]:
    """When the last step of a prompt hides its transfers, for each kind of entries that travels.

    Kinds of attention that travel alike are told once.
    """
    setting = sweep.setting(link)
    new = min(sweep.chunk, isl)
    chunk = PromptChunk(new=new, cached=isl - new)
    told: list[Phase] = []
    for kind in sweep.attention:
        for phase in kind.phases:
            if phase in told:
                continue
            told.append(phase)
            rows = hiding_rows(
                phase,
                block_tokens=isl / setting.ranks,
                setting=setting,
                visible=chunk.visible,
            )
            bandwidth = hiding_bandwidth(phase, chunk, setting)
            yield {
                "link": link,
                "prompt_tokens": isl,
                "attention": kind.name,
                "transferred": phase.name,
                "new_tokens_per_rank": new / setting.ranks,
                "needed_tokens_per_rank": rows if math.isfinite(rows) else None,
                "link_gb_per_s": setting.link.bytes_per_s / 1e9,
                "needed_gb_per_s": bandwidth / 1e9 if math.isfinite(bandwidth) else None,
                "hidden": new / setting.ranks >= rows,
                "new_tokens_pct": 100 * new / isl,
                "pass_q_below_pct": 100 * pass_q_share(phase, setting),
                "fidelity": "modelled",
            }


def pass_kv_or_q(sweep: Sweep, isl: int, link: str) -> str:
    """When what a ring sends is hidden, and when queries would be less to send, in words."""
    rows = list(overlap(sweep, isl, link))
    hidden = [
        f"{row['transferred']} from {number(row['needed_tokens_per_rank'])} new tokens a rank on"
        if row["needed_tokens_per_rank"] is not None
        else f"{row['transferred']} never"
        for row in rows
    ]
    shares = [f"{row['pass_q_below_pct']:.3g} % ({row['transferred']})" for row in rows]
    return (
        f"{sweep.resolved.name}, cp {sweep.config.parallel.cp}, ISL {tokens(isl)}, over {link}: a "
        f"ring is predicted to hide the transfer of {', of '.join(hidden)}; a step has "
        f"{number(rows[0]['new_tokens_per_rank'])}. Passing queries in place of KV would send less "
        f"where the new tokens are less than {' or '.join(shares)} of the prompt so far; those of "
        f"the last step are {rows[0]['new_tokens_pct']:.3g} %."
    )


def predicted_crossings(sweep: Sweep, isl: int, link: str) -> str:
    """One sentence: where along the bandwidth of the link the better kind would change."""
    setting = sweep.setting(link)

    def times(bandwidth: float) -> Times:
        faster = replace(setting.link, bytes_per_s=bandwidth, curves={})
        on_it = replace(setting, link=faster)
        return predict_prompt(sweep.attention, on_it, tokens=isl, chunk_tokens=sweep.chunk)

    low, high = BANDWIDTHS
    spots = [
        f"{found.below} is better below {found.at / 1e9:.3g} GB/s, {found.above} above"
        for found in crossings(times, low, high)
    ] or [f"{times(low).best} is better from {number(low / 1e9)} to {number(high / 1e9)} GB/s"]
    return (
        f"Predicted for the attention alone of {sweep.resolved.name}, cp {setting.ranks}, chunk "
        f"{tokens(sweep.chunk)}, ISL {tokens(isl)}: {'; '.join(spots)}."
    )


def tokens(count: float) -> str:
    """A number of tokens as people write it."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if count >= size:
            return f"{count / size:.4g}{unit}"
    return f"{count:.0f}"
