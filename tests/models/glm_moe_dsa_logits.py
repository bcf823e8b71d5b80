"""GLM-5.2, DeepSeek-V3 and V3.2 against `transformers`: released names, loaded by both."""

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from kllm.attention import mla
from kllm.models import glm_moe_dsa
from tests.models.glm_moe_dsa_tiny import GLM, TINY, load_ours, write_checkpoint
from tests.models.harness import Harness
from tests.models.logit_cases import LogitCase, seeded_ids

PROMPT = seeded_ids(41, GLM["vocab_size"])


@cache
def models(model_type: str) -> tuple[glm_moe_dsa.GlmMoeDsaForCausalLM, Any]:
    """(our network, with the MTP head; the reference) from one checkpoint."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(folder, TINY[model_type])
        ours = load_ours(folder, mtp=True)
        config = AutoConfig.from_pretrained(folder)
        reference = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    return ours, reference


@cache
def reference_logits(model_type: str, token_ids: tuple[int, ...]) -> Tensor:
    """[T, V] of the reference, in one pass."""
    with torch.no_grad():
        logits: Tensor = models(model_type)[1](torch.tensor([token_ids])).logits[0]
    return logits


def pair(model_type: str = "glm_moe_dsa") -> tuple[glm_moe_dsa.GlmMoeDsaForCausalLM, Tensor]:
    """(our network, with the MTP head; the reference's logits of PROMPT)."""
    return models(model_type)[0], reference_logits(model_type, tuple(PROMPT))


def harness(model_type: str = "glm_moe_dsa", **settings: Any) -> Harness:
    """With pages so small that a prompt has many."""
    return Harness(models(model_type)[0], **{"page_size": 4, **settings})


def chunked(model_type: str, chunks: Sequence[int]) -> tuple[Tensor, Tensor]:
    """One request in chunks."""
    got = harness(model_type).run(PROMPT, chunks)
    return got, pair(model_type)[1][: sum(chunks)]


def forced(expanded: bool, model_type: str, chunks: Sequence[int]) -> tuple[Tensor, Tensor]:
    """As `chunked`, with one form of attention for all chunks."""
    with patch.object(mla, "expanding_pays", lambda *_: expanded):
        return chunked(model_type, chunks)


def mixed(model_type: str) -> tuple[Tensor, Tensor]:
    """Three requests prefilled, chunked and decoded in the same steps."""
    shared = harness(model_type, num_requests=3)
    plans = [{0: 5}, {0: 13, 1: 7}, {0: 1, 1: 1, 2: 21}, {0: 1, 1: 19}, {0: 21, 2: 1}, {2: 13}]
    parts: dict[int, list[Tensor]] = {0: [], 1: [], 2: []}
    done = [0, 0, 0]
    for plan in plans:
        tokens = {r: PROMPT[done[r] : done[r] + n] for r, n in plan.items()}
        for r, rows in shared.step(tokens).items():
            parts[r].append(rows)
            done[r] += len(rows)
    got = torch.cat([torch.cat(parts[r]) for r in range(3)])
    return got, torch.cat([pair(model_type)[1][:n] for n in done])


def long_context(model_type: str) -> tuple[Tensor, Tensor]:
    """Chunks many times the selection."""
    tokens = seeded_ids(600, GLM["vocab_size"], seed=1)
    got = harness(model_type, max_len=600).run(tokens, [300, 1, 233, 1, 1, 64])
    return got, reference_logits(model_type, tuple(tokens))


def cases(model_type: str) -> list[LogitCase]:
    """The comparisons of one member of the family."""
    runs = {
        "one shot": partial(chunked, model_type, [41]),
        "prefill 13, then one by one": partial(chunked, model_type, [13] + [1] * 28),
        "one by one from the start": partial(chunked, model_type, [1] * 41),
        "chunks of 7, 1, 13, 2, 18": partial(chunked, model_type, [7, 1, 13, 2, 18]),
        "chunks of 3": partial(chunked, model_type, [3] * 13),
        "expanded, chunks of 17, 3, 21": partial(forced, True, model_type, [17, 3, 21]),
        "absorbed, chunks of 17, 3, 21": partial(forced, False, model_type, [17, 3, 21]),
        "mixed batch": partial(mixed, model_type),
        "600 tokens in chunks of 300, 1, 233, 1, 1, 64": partial(long_context, model_type),
    }
    member = "" if model_type == "glm_moe_dsa" else f"{model_type}: "
    return [LogitCase("glm_moe_dsa", member + name, run) for name, run in runs.items()]


CASES = [case for model_type in TINY for case in cases(model_type)]
