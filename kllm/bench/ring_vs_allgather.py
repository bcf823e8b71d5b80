"""`kllm bench ring-vs-allgather`: a prompt's prefill with each kind of context parallelism.

The ranks of a layout are built once and take turns: a pass over the places of the prompts as a
ring, one with all-gather, one with replicated prompts, over each link, in an order that turns
round after each round. Every place is a real step of the engine; the time of a prompt is put
together from them (`kllm.bench.prompt_time`).

A ring is compared with all-gather, which keeps as little KV on a rank. Replicated prompts stand
beside them: they move less and keep N times as much.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from kllm.bench import ring_findings as findings
from kllm.bench import ring_rows
from kllm.bench.base import Context
from kllm.bench.record import Record
from kllm.bench.ring_arms import Arm, arms_of
from kllm.bench.ring_balance import measure_ranks
from kllm.bench.ring_estimate import layout_seconds
from kllm.bench.ring_predictions import Sweep
from kllm.bench.ring_setup import MODEL, attention_folder, cut, link_here, with_ranks
from kllm.bench.shared_prompt import KINDS, SharedPrompt
from kllm.bench.timing import Failed, attempt
from kllm.config import EngineConfig
from kllm.engine.rank_pool import RankPool, launch
from kllm.errors import CapacityError, ConfigError
from kllm.hardware import ceilings, release_memory
from kllm.models.load import ResolvedModel, resolve
from kllm.models.shape import model_shape
from kllm.parallel.link import Link, parse_link
from kllm.parallel.overlap import RING
from kllm.results.schema import LEFT_OUT


@dataclass(frozen=True, slots=True, kw_only=True)
class RingVsAllGatherBench:
    """Sweep over prompt length, step length, context-parallel degree, link and model.

    `limit_s` bounds the rounds of a layout: after the first one none begins that would end later.
    """

    models: Sequence[str]
    attentions: Sequence[str] = (MODEL,)
    isls: Sequence[int]  # prompt tokens
    cps: Sequence[int]  # context-parallel ranks
    links: Sequence[str]  # of rank-slices
    chunks: Sequence[int]  # tokens of a step
    limit_s: float = math.inf

    def __post_init__(self) -> None:
        for what, values, least in (
            ("isl", self.isls, 1),
            ("cp", self.cps, 2),
            ("chunk", self.chunks, 1),
        ):
            if not values or min(values) < least:
                raise ConfigError(f"{what} must be {least} or more, got {list(values)}")
        if not self.models or not self.links or not self.attentions:
            raise ConfigError(
                "ring-vs-allgather needs a model, a link and an attention; name one of each"
            )
        for link in self.links:
            parse_link(link)

    @property
    def name(self) -> str:
        """As it is called on the command line."""
        return "ring-vs-allgather"

    def workload(self) -> Mapping[str, Any]:
        """Options that two comparable runs share."""
        return {
            "models": list(self.models),
            "attentions": list(self.attentions),
            "isl": list(self.isls),
            "cp": list(self.cps),
            "links": list(self.links),
            "chunk": list(self.chunks),
        }

    def estimate_s(self, config: EngineConfig, repeats: int) -> float:
        """Seconds that a run will take, roughly, from rates of this machine or presets.

        Raises:
            ConfigError: what is wrong with the config of any layout.
        """
        sliced = config.fidelity == "rank-slice"
        total = 0.0
        for layout in self._layouts(config):
            sweep = _sweep(layout, resolve(layout))
            links = self.links if sliced else (link_here(sweep.resolved.device),)
            total += layout_seconds(sweep, self.isls, links, repeats, self.limit_s)
        return total

    def measure(self, ctx: Context, record: Record) -> None:
        """Measure each model and context-parallel degree; lengths that do not fit are marked."""
        record.claims.append(findings.CLAIM)
        ctx.progress("checking models", 0, 1)
        for _ in self._layouts(ctx.config):
            pass  # what is wrong with any of them is said before work starts
        ctx.progress("measuring this machine", 0, 1)
        ceilings(resolve(ctx.config).device)  # predictions and the automatic choice use them
        sliced = ctx.config.fidelity == "rank-slice"
        record.notes += findings.conditions(sliced, ctx.config)
        with nullcontext() if sliced else launch(max(self.cps)) as pool:
            for config in self._layouts(ctx.config):
                self._layout(ctx, record, config, pool)
                release_memory()  # the next scale is chosen by what is free

    def _layouts(self, config: EngineConfig) -> Iterator[EngineConfig]:
        """A config of each layout and step length, valid until the next one is asked for."""
        for model in self.models:
            for attention in self.attentions:
                with attention_folder(model, attention, config.scale) as name:
                    load = config.load if attention == MODEL else "random"
                    named = replace(config, model=name, load=load)
                    for cp, chunk in product(self.cps, self.chunks):
                        yield self._config(named, cp, chunk)

    def _config(self, config: EngineConfig, cp: int, chunk: int) -> EngineConfig:
        scheduler = replace(config.scheduler, max_batch=1, token_budget=chunk)
        config = with_ranks(replace(config, scheduler=scheduler, graphs=False), cp)
        # The pool that an engine would start with is only as large as one step.
        config = replace(cut(config), max_model_len=chunk)
        self._within(resolve(config))
        return config

    def _within(self, resolved: ResolvedModel) -> list[int]:
        """The lengths that the model has positions for, rising.

        Raises:
            ConfigError: there is none.
        """
        most, shortest = _positions(resolved), min(self.isls)
        if shortest > most:
            raise ConfigError(
                f"{resolved.name} has {most} positions, too few for a prompt of {shortest} tokens; "
                "choose a shorter --isl"
            )
        return sorted({isl for isl in self.isls if isl <= most})

    def _layout(
        self, ctx: Context, record: Record, config: EngineConfig, pool: RankPool | None
    ) -> None:
        sliced = config.fidelity == "rank-slice"
        resolved = resolve(config)
        cp = config.parallel.cp
        links: dict[str, Link | None] = {link_here(resolved.device): None}
        if sliced:
            links = {name: parse_link(name, resolved.device) for name in self.links}
            config = replace(config, link=self.links[0])
        within = self._within(resolved)
        ctx.progress(f"{resolved.name}, cp {cp}: timing the block kernel", 0, 1)
        sweep = _sweep(config, resolved)
        timed = attempt(lambda: ring_rows.block_kernel(record, sweep, max(within)))
        if isinstance(timed, Failed):
            record.notes.append(f"{resolved.name}: the block kernel was not timed: {timed.reason}.")
        ctx.progress(f"{resolved.name}, cp {cp}: loading", 0, 1)
        made = attempt(lambda: SharedPrompt(config, resolved, pool))
        if isinstance(made, Failed):
            self._unbuilt(record, sweep, links, made.reason)
            return
        prompt = made
        try:
            arms = arms_of(KINDS, within)
            here = 1 if sliced or resolved.device.startswith("cuda") else cp
            for arm in arms.values():
                arm.fit(prompt, sliced=sliced, ranks_here=here)
            title = f"{resolved.name} cp{cp} chunk{prompt.chunk}"
            try:
                self._rounds(ctx, record, prompt, arms, links, title)
            finally:  # an interrupt leaves the rounds that are complete
                if all(arm.rounds for arm in arms.values()):
                    ring_rows.report(record, sweep, prompt, arms, within, links)
                    reason = f"the model has {_positions(resolved)} positions"
                    beyond = set(self.isls) - set(within)
                    ring_rows.mark(record, sweep, beyond, links, LEFT_OUT, reason)
        finally:
            prompt.close()

    def _unbuilt(
        self, record: Record, sweep: Sweep, links: Mapping[str, Link | None], reason: str
    ) -> None:
        """Mark the points of a layout that cannot be built; raise if there is no other."""
        others = len(self.models) * len(self.attentions) * len(self.cps) * len(self.chunks) - 1
        if not others:
            raise CapacityError(reason)
        ring_rows.mark(record, sweep, self.isls, links, "failed", reason)

    def _rounds(
        self,
        ctx: Context,
        record: Record,
        prompt: SharedPrompt,
        arms: Mapping[str, Arm],
        links: Mapping[str, Link | None],
        title: str,
    ) -> None:
        sliced = ctx.config.fidelity == "rank-slice"
        total = sum(arm.steps(prompt.chunk, len(links), ctx.repeats) for arm in arms.values())
        total += prompt.stripes.ranks * sliced
        done = 0

        def tell(what: str) -> None:
            nonlocal done
            ctx.progress(f"{title}: {what}", done, total)
            done += 1

        begin = lap = time.monotonic()
        took = 0.0
        for number in range(ctx.repeats):
            if number > 0 and lap + took > begin + self.limit_s:
                fit = f"{number} of {ctx.repeats} rounds fit the limit of {self.limit_s:g} s"
                record.notes.append(f"{title}: {fit}.")
                break
            for kind in KINDS if number % 2 == 0 else KINDS[::-1]:
                arms[kind].run(prompt, dict(links), tell, warm_up=number == 0)
            self._store(record, arms, links, title, prompt.chunk)
            if number == 0 and sliced:
                left_s = begin + self.limit_s - time.monotonic()
                measure_ranks(prompt, arms[RING], links, left_s, tell)
            took, lap = time.monotonic() - lap, time.monotonic()

    def _store(
        self,
        record: Record,
        arms: Mapping[str, Arm],
        links: Mapping[str, Link | None],
        title: str,
        chunk: int,
    ) -> None:
        """Keep what the latest round says of every prompt."""
        for link in links:
            for isl in self.isls:
                tag = f"{title}.{link}.isl{isl}".replace(" ", ".")
                for kind in KINDS:
                    for cost in arms[kind].prompts(link, isl, chunk)[-1:]:
                        record.add(f"{kind}_s.{tag}", cost.seconds, unit="s", direction="lower")
                        if cost.transfer_s:
                            share = cost.exposed_s / cost.transfer_s
                            name = f"{kind}_exposed_share.{tag}"
                            record.add(name, share, unit="", direction="lower")

    def conclude(self, record: Record) -> None:
        """Say which kind is faster where, and how the published figure stands."""
        findings.conclude(record)


def _sweep(config: EngineConfig, resolved: ResolvedModel) -> Sweep:
    shape = model_shape(resolved.family, resolved.config)
    return Sweep(config, resolved, shape, config.scheduler.token_budget)


def _positions(resolved: ResolvedModel) -> int:
    return int(resolved.config.max_position_embeddings)
