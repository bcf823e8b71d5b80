"""Llama against `transformers`: random checkpoints saved by it and loaded by us."""

import tempfile
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from kllm.config import EngineConfig
from kllm.models.base import CausalLM, Groups
from kllm.models.load import load_model, resolve
from tests.models.harness import Harness
from tests.models.logit_cases import LogitCase, randomise, seeded_ids

GROUPED = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    "grouped queries": GROUPED,
    "llama3 rope": {**GROUPED, "rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE},
    "tied head, full heads": {"num_attention_heads": 4, "tie_word_embeddings": True},
}
PROMPT = seeded_ids(75, 101)


def reference_config(variant: str) -> LlamaConfig:
    """A tiny config of `transformers`."""
    return LlamaConfig(
        vocab_size=101,
        hidden_size=72,
        intermediate_size=96,
        num_hidden_layers=3,
        max_position_embeddings=512,
        **VARIANTS[variant],
    )


def reference_model(variant: str) -> LlamaForCausalLM:
    """The reference with random weights."""
    model = LlamaForCausalLM(reference_config(variant)).eval()
    randomise(model, seed=len(variant))
    return model


@cache
def pair(variant: str) -> tuple[CausalLM, Tensor]:
    """(our network with the reference's weights, the reference's logits of PROMPT)."""
    reference = reference_model(variant)
    with torch.no_grad():
        logits = reference(torch.tensor([PROMPT])).logits[0]
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder, max_shard_size="100KB")
        assert len(list(Path(folder).glob("*.safetensors"))) > 1
        resolved = resolve(EngineConfig(model=folder, dtype="float32", device="cpu"))
        ours = load_model(
            resolved, device=torch.device("cpu"), dtype=torch.float32, groups=Groups.single()
        )
    return ours, logits


def chunked(variant: str, chunks: list[int]) -> tuple[Tensor, Tensor]:
    """One request in chunks."""
    ours, logits = pair(variant)
    return Harness(ours, page_size=16).run(PROMPT, chunks), logits


def mixed(variant: str) -> tuple[Tensor, Tensor]:
    """Three requests that are prefix-filled, chunked and decoded in the same steps."""
    ours, logits = pair(variant)
    harness = Harness(ours, num_requests=3, page_size=16)
    lengths, out = (75, 40, 21), {0: [], 1: [], 2: []}
    plans = [{0: 30}, {0: 7, 1: 20}, {0: 1, 1: 1, 2: 21}, {0: 1, 1: 19}, {0: 36}]
    done = [0, 0, 0]
    for plan in plans:
        tokens = {r: PROMPT[done[r] : done[r] + n] for r, n in plan.items()}
        for r, rows in harness.step(tokens).items():
            out[r].append(rows)
            done[r] += len(rows)
    assert tuple(done) == lengths
    ours_all = torch.cat([torch.cat(out[r]) for r in range(3)])
    return ours_all, torch.cat([logits[:n] for n in lengths])


def _cases(variant: str) -> list[LogitCase]:
    runs = {
        "one shot": partial(chunked, variant, [75]),
        "prefill 21, then one by one": partial(chunked, variant, [21] + [1] * 54),
        "chunks of 7, 1, 13, 30, 24": partial(chunked, variant, [7, 1, 13, 30, 24]),
        "mixed batch": partial(mixed, variant),
    }
    return [LogitCase("llama", f"{variant}: {name}", run) for name, run in runs.items()]


CASES = [case for variant in VARIANTS for case in _cases(variant)]
