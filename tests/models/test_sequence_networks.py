"""Whole networks whose prompts are shared by context-parallel ranks, against one rank alone."""

from functools import cache

import pytest
import torch
from torch import Tensor

from kllm.models import llama
from kllm.models.base import CausalLM, Groups
from kllm.models.random import fill_random
from tests.attention.sequence_harness import SequenceHarness
from tests.models import glm_moe_dsa_logits
from tests.models.harness import Harness
from tests.models.logit_cases import randomise, seeded_ids
from tests.tolerances import LAYOUT

PROMPT = seeded_ids(301, 96, seed=3)
OTHER = seeded_ids(142, 96, seed=4)
KINDS = pytest.mark.parametrize("kind", ["ring", "all_gather", "replicated"])


@cache
def network(name: str) -> CausalLM:
    """A tiny network in which every weight matters."""
    if name != "llama":
        return glm_moe_dsa_logits.models(name)[0]
    model = llama.build(llama.tiny_config(), Groups.single())
    fill_random(model, llama, seed=0)
    randomise(model, seed=1)
    return model.eval()


def tolerance(name: str) -> dict[str, float]:
    """Of logits."""
    return {"rtol": 0, "atol": LAYOUT["llama" if name == "llama" else "glm_moe_dsa"]}


@cache
def alone(name: str, token_ids: tuple[int, ...]) -> Tensor:
    """[T, V] of one rank, in one pass."""
    harness = Harness(network(name), max_len=len(token_ids))
    return harness.run(token_ids, [len(token_ids)])


CASES = [
    ("llama", 2, [90, 1, 110, 90]),
    ("llama", 4, [30, 171, 2, 88]),
    ("llama", 8, [291]),
    ("glm_moe_dsa", 2, [90, 1, 200]),
    ("glm_moe_dsa", 4, [30, 171, 90]),
    ("deepseek_v3", 2, [90, 1, 200]),
    ("deepseek_v3", 4, [30, 171, 90]),
    ("deepseek_v32", 4, [130, 161]),
]


@KINDS
@pytest.mark.parametrize(("name", "ranks", "chunks"), CASES, ids=str)
def test_prompt_and_decode_give_the_logits_of_one_rank(
    name: str, ranks: int, chunks: list[int], kind: str
) -> None:
    """Ten tokens are decoded by the owner after the prompt."""
    owners = [ranks - 1]
    harness = SequenceHarness(network(name), ranks, kind=kind, owners=owners, max_len=301)
    parts = [harness.run(PROMPT, chunks)]
    harness.finish([0])
    parts += [harness.step({0: [token]}, decodes={0})[0] for token in PROMPT[-10:]]
    torch.testing.assert_close(torch.cat(parts), alone(name, tuple(PROMPT)), **tolerance(name))


@KINDS
@pytest.mark.parametrize("name", ["llama", "glm_moe_dsa", "deepseek_v3"])
def test_owners_decode_while_other_prompts_go_on(name: str, kind: str) -> None:
    """Two prompts in one step, then one decodes beside the other, then both decode."""
    harness = SequenceHarness(network(name), 2, kind=kind, owners=[1, 0], max_len=301)
    prompts = {0: PROMPT, 1: OTHER}
    plans: list[tuple[dict[int, int], set[int]]] = [
        ({0: 97, 1: 139}, set()),  # 1 is done after this step
        ({0: 150, 1: 1}, {1}),
        ({0: 52, 1: 1}, {1}),  # 0 is done
        ({0: 1, 1: 1}, {0, 1}),
        ({0: 1}, {0}),  # one rank has nothing to do
    ]
    ends = {0: 1, 2: 0}  # after which step which prompt is done
    got: dict[int, list[Tensor]] = {0: [], 1: []}
    for i, (lengths, decodes) in enumerate(plans):
        done = {r: sum(map(len, got[r])) for r in lengths}
        tokens = {r: prompts[r][done[r] : done[r] + n] for r, n in lengths.items()}
        for r, rows in harness.step(tokens, decodes).items():
            got[r].append(rows)
        if i in ends:
            harness.finish([ends[i]])
    for r, prompt in prompts.items():
        logits = torch.cat(got[r])
        torch.testing.assert_close(
            logits, alone(name, tuple(prompt))[: len(logits)], **tolerance(name)
        )


@KINDS
def test_a_long_request_decodes_beside_a_prompt_too_short_to_select(kind: str) -> None:
    """Only the owner of the first has an indexer to ask; the ranks still exchange the same."""
    name, short = "glm_moe_dsa", OTHER[:5]
    model = network(name)
    assert len(short) <= model.config.indexer.topk < len(PROMPT)
    harness = SequenceHarness(model, 2, kind=kind, owners=[1, 0], max_len=301)
    harness.run(PROMPT, [300])
    harness.finish([0])
    got = harness.step({0: PROMPT[-1:], 1: short}, decodes={0})
    for found, prompt in ((got[0], PROMPT), (got[1], short)):
        want = alone(name, tuple(prompt))[-len(found) :]
        torch.testing.assert_close(found, want, **tolerance(name))
