"""DeepSeek-V4 against `transformers`: checkpoints with released names, loaded by both."""

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from kllm.models import deepseek_v4
from tests.models.deepseek_v4_tiny import TINY, load_ours, write_checkpoint
from tests.models.harness import Harness
from tests.models.logit_cases import LogitCase, seeded_ids

PROMPT = seeded_ids(90, TINY["vocab_size"])


@cache
def models() -> tuple[deepseek_v4.DeepseekV4ForCausalLM, DeepseekV4ForCausalLM]:
    """(our network, with the MTP head; the reference) from one checkpoint."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(folder, TINY, seed=0)
        ours = load_ours(folder, mtp=True)
        config = DeepseekV4Config(**TINY)
        reference = DeepseekV4ForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    return ours, reference


def reference_logits(token_ids: Sequence[int]) -> Tensor:
    """[T, V] of the reference, in one pass."""
    with torch.no_grad():
        logits: Tensor = models()[1](torch.tensor([list(token_ids)])).logits[0]
    return logits


@cache
def pair() -> tuple[deepseek_v4.DeepseekV4ForCausalLM, Tensor]:
    """(our network, with the MTP head; the reference's logits of PROMPT)."""
    return models()[0], reference_logits(PROMPT)


def long_context() -> tuple[Tensor, Tensor]:
    """Chunks many times the rings, positions far beyond YaRN's original 64."""
    tokens = seeded_ids(1100, TINY["vocab_size"], seed=1)
    got = Harness(models()[0], max_len=1200).run(tokens, [700, 1, 333, 1, 1, 64])
    return got, reference_logits(tokens)


def chunked(chunks: Sequence[int]) -> tuple[Tensor, Tensor]:
    """One request in chunks."""
    ours, logits = pair()
    return Harness(ours).run(PROMPT, chunks), logits[: sum(chunks)]


def mixed() -> tuple[Tensor, Tensor]:
    """Three requests prefilled, chunked and decoded in the same steps."""
    ours, logits = pair()
    harness = Harness(ours, num_requests=3)
    plans = [{0: 30}, {0: 7, 1: 20}, {0: 1, 1: 1, 2: 21}, {0: 1, 1: 19}, {0: 36, 2: 1}, {2: 13}]
    parts: dict[int, list[Tensor]] = {0: [], 1: [], 2: []}
    done = [0, 0, 0]
    for plan in plans:
        tokens = {r: PROMPT[done[r] : done[r] + n] for r, n in plan.items()}
        for r, rows in harness.step(tokens).items():
            parts[r].append(rows)
            done[r] += len(rows)
    got = torch.cat([torch.cat(parts[r]) for r in range(3)])
    return got, torch.cat([logits[:n] for n in done])


_RUNS = {
    "one shot": partial(chunked, [90]),
    "prefill 21, then one by one": partial(chunked, [21] + [1] * 69),
    "one by one from the start": partial(chunked, [1] * 50),
    "prefill ends inside a group of 4": partial(chunked, [34, 1, 1, 1, 1, 52]),
    "prefill ends inside a group of 16": partial(chunked, [40] + [1] * 10),
    "chunks of 7, 1, 13, 2, 37, 30": partial(chunked, [7, 1, 13, 2, 37, 30]),
    "chunks of 3": partial(chunked, [3] * 30),
    "1100 tokens in chunks of 700, 1, 333, 1, 1, 64": long_context,
    "mixed batch": mixed,
}
CASES = [LogitCase("deepseek_v4", name, run) for name, run in _RUNS.items()]
