"""`kllm bench vs-transformers`: decode speed against transformers' `generate`, in one process.

Both sides have the same weights, dtype and thread count, make the same number of tokens for the
same prompts, and take turns. Prompts of mixed length are left-padded for `generate`, as its users
do; kLLM needs no padding.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kllm.bench.base import Context, warming_up
from kllm.bench.record import Record
from kllm.bench.serve_loop import ServingEngine
from kllm.bench.timing import interleave, timed
from kllm.config import EngineConfig
from kllm.core import SamplingParams
from kllm.errors import ConfigError, DataError, DependencyError
from kllm.models.gguf import GGUFFile
from kllm.models.load import resolve
from kllm.results.stats import median_ci, paired_ratio

OURS, THEIRS = "kllm", "transformers"
Prompts = list[list[int]]


@dataclass(frozen=True, slots=True)
class Case:
    """One batch: its prompt lengths."""

    name: str
    isl: tuple[int, ...]


CASES = (
    Case("batch1", (32,)),
    Case("batch8-mixed", (16, 24, 40, 64, 96, 128, 192, 256)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersBench:
    """Two cases: one request, and eight with prompts of mixed length."""

    osl: int = 64  # output tokens of each request

    def __post_init__(self) -> None:
        if self.osl < 2:
            raise ConfigError(f"at least 2 output tokens are needed, got {self.osl}")

    @property
    def name(self) -> str:
        """As it is called on the command line."""
        return "vs-transformers"

    def workload(self) -> Mapping[str, Any]:
        """Options that two comparable runs share."""
        return {"osl": self.osl, "isl": {case.name: list(case.isl) for case in CASES}}

    def measure(self, ctx: Context, record: Record) -> None:
        """Alternate the two sides `ctx.repeats` times for each case.

        Raises:
            DependencyError: transformers is not installed.
            ConfigError: the model has no real weights that transformers can read, or not as many
                positions as the longest request has tokens.
        """
        most = resolve(ctx.config).config.max_position_embeddings
        longest = max(max(case.isl) for case in CASES) + self.osl
        if longest > most:
            raise ConfigError(
                f"the longest request has {longest} tokens and the model {most} positions; lower "
                "--osl"
            )
        generate = _their_generate(ctx.config)
        config = replace(
            ctx.config, scheduler=replace(ctx.config.scheduler, max_batch=max_batch(CASES))
        )
        engine = ctx.make_engine(config)
        record.notes.append(f"{torch.get_num_threads()} threads on both sides")
        try:
            for case in CASES:
                self._case(ctx, record, case, engine, generate)
        finally:
            engine.close()
        ctx.progress("done", len(CASES), len(CASES))

    def _case(
        self,
        ctx: Context,
        record: Record,
        case: Case,
        engine: ServingEngine,
        generate: Callable[[Prompts, int], Prompts],
    ) -> None:
        rng = np.random.default_rng(ctx.seed)
        prompts = [rng.integers(0, engine.vocab_size, size=n).tolist() for n in case.isl]
        tokens = self.osl * len(prompts)
        made: dict[str, Prompts] = {}

        def ours() -> float:
            seconds = timed(lambda: made.update({OURS: run_engine(engine, prompts, self.osl)}))
            return tokens / seconds

        def theirs() -> float:
            seconds = timed(lambda: made.update({THEIRS: generate(prompts, self.osl)}))
            return tokens / seconds

        at = (CASES.index(case), len(CASES))
        ctx.progress(warming_up(case.name), *at)
        ours()
        theirs()
        ctx.progress(case.name, *at)
        rates = interleave({THEIRS: theirs, OURS: ours}, repeats=ctx.repeats, warmup=0)
        for side, values in rates.items():
            for value in values:
                name = f"{side}_output_tokens_per_s.{case.name}"
                record.add(name, value, unit="tokens/s", direction="higher")
        for base, new in zip(rates[THEIRS], rates[OURS], strict=True):
            record.add(f"ratio.{case.name}", new / base, unit="x", direction="higher")
        ratio, interval = paired_ratio(rates[THEIRS], rates[OURS])
        record.row(
            "cases",
            {
                "case": case.name,
                "kllm_tokens_per_s": median_ci(rates[OURS])[0],
                "transformers_tokens_per_s": median_ci(rates[THEIRS])[0],
                "ratio": ratio,
                "ratio_lo": interval[0] if interval else None,
                "ratio_hi": interval[1] if interval else None,
                "same_tokens": agreement(made[OURS], made[THEIRS]),
            },
            {"kllm_tokens_per_s": "tokens/s", "transformers_tokens_per_s": "tokens/s"},
        )

    def conclude(self, record: Record) -> None:
        """State the ratios."""
        rows = record.ok_rows("cases")
        parts = [f"{row['case']}: {row['ratio']:.3g} times transformers" for row in rows]
        record.verdict = "; ".join(parts) or "Nothing was measured."
        slower = [row["case"] for row in rows if row["ratio"] < 1]
        if rows:
            record.boundary = (
                f"kLLM is slower at {', '.join(slower)}."
                if slower
                else f"kLLM is not slower in any of {len(rows)} cases."
            )


def max_batch(cases: Sequence[Case]) -> int:
    """Requests of the largest case."""
    return max(len(case.isl) for case in cases)


def run_engine(engine: ServingEngine, prompts: Prompts, osl: int) -> Prompts:
    """Greedy tokens of each prompt."""
    params = SamplingParams(max_tokens=osl, temperature=0.0, ignore_eos=True)
    requests = [engine.add(prompt, params) for prompt in prompts]
    while engine.has_work:
        engine.step()
    return [list(request.output_ids) for request in requests]


def agreement(one: Prompts, two: Prompts) -> float:
    """Share of equal tokens up to each pair's first difference: later ones follow from it."""
    same = total = 0
    for a, b in zip(one, two, strict=True):
        equal = [x == y for x, y in zip(a, b, strict=True)]
        same += equal.index(False) if False in equal else len(equal)
        total += len(equal)
    return same / total


def _their_generate(config: EngineConfig) -> Callable[[Prompts, int], Prompts]:
    # Both set before the import: no look-ups on the network, no progress bars on stderr.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers
    except ImportError:
        raise DependencyError(
            "transformers is not installed; pip install 'transformers>=5.24,<6'"
        ) from None
    log: Any = transformers.utils.logging
    log.disable_progress_bar()
    log.set_verbosity_error()
    resolved = resolve(config)
    if resolved.weights is None:
        raise ConfigError(
            f"model '{config.model}' has random weights here, which transformers cannot load; "
            "use smollm2-135m or a model folder"
        )
    model = _their_model(resolved.weights, getattr(torch, resolved.dtype)).to(resolved.device)

    def generate(prompts: Prompts, osl: int) -> Prompts:
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        with torch.inference_mode():
            out = model.generate(
                ids.to(resolved.device),
                attention_mask=mask.to(resolved.device),
                do_sample=False,
                min_new_tokens=osl,
                max_new_tokens=osl,
                pad_token_id=0,
                eos_token_id=None,
            )
        tokens: Prompts = out[:, width:].tolist()
        return tokens

    return generate


def _their_model(weights: Path, dtype: torch.dtype) -> Any:
    """transformers' network with the weights of a folder or a GGUF file."""
    import transformers

    if weights.is_dir():
        loader: Any = transformers.AutoModelForCausalLM
        return loader.from_pretrained(weights, dtype=dtype).eval()
    # transformers reads GGUF only with accelerate installed; its names are the same as ours.
    source = GGUFFile(weights)
    config = transformers.LlamaConfig(**source.config)
    model: Any = transformers.LlamaForCausalLM(config)
    state = {
        name: source.read(name, tuple(slice(0, n) for n in source.shape(name)))
        for name in source.names()
    }
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if unexpected or set(missing) - tied:
        names = ", ".join([*unexpected, *(set(missing) - tied)])
        raise DataError(f"{weights} does not fit transformers' llama: {names}")
    model.tie_weights()
    return model.to(dtype).eval()
