"""What the layers of DeepSeek-V4 keep for a step."""

import pytest
import torch

from kllm.attention import compressed
from kllm.attention.context import ForwardContext
from tests.models.deepseek_v4_logits import models
from tests.models.deepseek_v4_tiny import TINY
from tests.models.harness import Harness
from tests.models.logit_cases import seeded_ids
from tests.tolerances import LOGITS

LENGTHS = (60,) * 5


@torch.inference_mode()
def prefill() -> tuple[torch.Tensor, dict[int, int]]:
    """Logits of several prompts in a step, and bytes of the lists kept for it, by ratio."""
    model = models()[0]
    harness = Harness(model, num_requests=len(LENGTHS), max_len=64)
    ids = seeded_ids(max(LENGTHS), TINY["vocab_size"], seed=3)
    _, plan = harness.plan({request: ids[:length] for request, length in enumerate(LENGTHS)})
    ctx = ForwardContext.from_plan(plan, harness.pool, harness.device)
    model.prepare(ctx)
    logits = model.logits(model(ctx))
    kept: dict[int, int] = {}
    for key, value in ctx.shared.items():
        if isinstance(key, tuple) and key[0] is compressed._list_visible:
            kept[key[1]] = kept.get(key[1], 0) + value.nbytes
    return logits, kept


def test_lists_that_layers_share_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    want, kept = prefill()
    ratio, nbytes = max(kept.items())
    one = 4 * LENGTHS[0] * (LENGTHS[0] // ratio)  # bytes of the first prompt's list
    for limit in (0, one, nbytes):
        monkeypatch.setattr(compressed, "KEPT_BYTES", limit)
        logits, kept = prefill()
        assert all(nbytes <= limit for nbytes in kept.values())
        torch.testing.assert_close(logits, want, rtol=0, atol=LOGITS["deepseek_v4"])
    assert kept[ratio] == nbytes, "as many as fit together are kept"
