"""Prompts shared by context-parallel ranks on a GPU: ranks as threads, against one rank alone."""

import copy
from functools import cache

import pytest
import torch
from torch import Tensor

from kllm.models.base import CausalLM
from tests.attention.sequence_harness import SequenceHarness
from tests.gpu.test_models import tiny_on_cpu
from tests.models.harness import Harness
from tests.models.logit_cases import seeded_ids
from tests.tolerances import GPU_SLACK, LAYOUT

PROMPT = seeded_ids(301, 96, seed=3)


@cache
def network(name: str) -> CausalLM:
    model = copy.deepcopy(tiny_on_cpu(name)[0]).to("cuda")
    model.use_attention("triton" if name == "llama" else "auto", "float32")
    return model


@cache
def alone(name: str) -> Tensor:
    return Harness(network(name), max_len=len(PROMPT)).run(PROMPT, [len(PROMPT)]).cpu()


@pytest.mark.parametrize("kind", ["ring", "all_gather", "replicated"])
@pytest.mark.parametrize(("ranks", "chunks"), [(2, [90, 1, 200]), (4, [30, 171, 90])], ids=str)
@pytest.mark.parametrize("name", sorted(LAYOUT))
def test_prompt_and_decode_give_the_logits_of_one_rank(
    cuda: torch.device, name: str, ranks: int, chunks: list[int], kind: str
) -> None:
    harness = SequenceHarness(network(name), ranks, kind=kind, owners=[ranks - 1], max_len=301)
    parts = [harness.run(PROMPT, chunks)]
    harness.finish([0])
    parts += [harness.step({0: [token]}, decodes={0})[0] for token in PROMPT[-10:]]
    atol = GPU_SLACK * LAYOUT[name]
    torch.testing.assert_close(torch.cat(parts).cpu(), alone(name), rtol=0, atol=atol)
