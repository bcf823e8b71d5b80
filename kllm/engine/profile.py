"""What a full step needs besides weights and KV, measured by running one."""

import numpy as np
import torch

from kllm.attention.context import ForwardContext
from kllm.cache.pool import KVPool
from kllm.config import EngineConfig
from kllm.core import Plan
from kllm.engine.memory import page_size
from kllm.errors import CapacityError
from kllm.models.base import CausalLM
from kllm.models.devices import free_bytes
from kllm.sampling.sampler import work_bytes

# A full chunk of a fresh prompt is measured, and a short one at the end of the longest context:
# what grows with the chunk and what grows with the context. Captured graphs need some more.
MARGIN = 1.25
SHORT_CHUNK = 128  # tokens


def activation_bytes(
    config: EngineConfig, model: CausalLM, kv_dtype: str, dtype: torch.dtype, device: torch.device
) -> int:
    """Peak bytes of a step that fills the token budget, with a margin; 0 on a CPU.

    Raises:
        CapacityError: when not even that step fits beside the weights.
    """
    if device.type != "cuda":
        return 0
    page = page_size(config, model.cache_spec)
    positions = config.max_model_len or model.config.max_position_embeddings
    # A pipeline stage may store nothing that grows.
    room = int(free_bytes(device) // max(1.0, model.cache_spec.bytes_per_token(kv_dtype)))
    longest = max(1, min(positions, room))
    layout = config.parallel
    # Ranks that share a prompt each run their part of a step.
    tokens = min(-(-config.scheduler.token_budget // layout.cp), longest)
    try:
        fresh, late = (
            _peak(model, count, context, page, kv_dtype, dtype, device, layout.ep)
            for count, context in ((tokens, tokens), (min(SHORT_CHUNK, tokens), longest))
        )
    except torch.OutOfMemoryError:
        raise CapacityError(
            f"a step of {tokens} tokens does not fit beside the weights; use a smaller scale "
            "or a smaller token budget"
        ) from None
    finally:
        torch.cuda.empty_cache()
    vocab_size: int = model.config.vocab_size
    sampling = work_bytes(config.scheduler.max_batch, vocab_size)
    return int(MARGIN * (fresh + late)) + sampling


@torch.inference_mode()
def _peak(
    model: CausalLM,
    tokens: int,
    context: int,
    page: int,
    kv_dtype: str,
    dtype: torch.dtype,
    device: torch.device,
    expert_ranks: int,
) -> int:
    """Bytes above weights and KV while the last `tokens` of `context` tokens run."""
    # The block table names the same few pages over and over: sizes are those of the context.
    num_pages = -(-tokens // page) + 1
    width = -(-context // page)
    pool = KVPool(
        model.cache_spec,
        num_pages=num_pages,
        page_size=page,
        max_batch=1,
        kv_dtype=kv_dtype,
        compute_dtype=dtype,
        device=device,
    )
    plan = Plan(
        step=0,
        num_decodes=int(tokens == 1),
        rows=np.zeros(1, np.int32),
        query_lens=np.array([tokens], np.int32),
        context_lens=np.array([context], np.int32),
        token_ids=np.arange(tokens, dtype=np.int64) % model.config.vocab_size,
        positions=np.arange(context - tokens, context, dtype=np.int64),
        block_tables=(np.arange(width, dtype=np.int32) % num_pages)[None],
        samples=np.ones(1, bool),
    )
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    # All ranks of the expert group profile the same step together.
    ctx = ForwardContext.from_plan(plan, pool, device, peer_tokens=(tokens,) * expert_ranks)
    model.prepare(ctx)
    state = model(ctx, [] if model.stage.first else model.stand_in(ctx))
    if model.stage.last:
        model.logits(state[-1:])
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
