"""How much KV an engine gets: pages, state rows and the longest request, in numbers."""

from dataclasses import dataclass

import torch

from kllm.cache.spec import CacheSpec
from kllm.config import EngineConfig
from kllm.errors import CapacityError, ConfigError
from kllm.models.devices import kv_share

SMALLEST_PAGE = 16  # tokens; smaller pages only lengthen block tables
SCRATCH = 1  # page and row that no request owns: padding of captured steps goes there


@dataclass(frozen=True, slots=True)
class KVBudget:
    """The size of a rank's KV pool; scratch page and row come on top."""

    num_pages: int
    page_size: int  # tokens
    max_batch: int
    max_model_len: int  # tokens a request, output included
    kv_dtype: str
    rewind_tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens that the pages hold."""
        return self.num_pages * self.page_size


def page_size(config: EngineConfig, spec: CacheSpec) -> int:
    """The configured page size, or the smallest that suits.

    Raises:
        ConfigError: when it is no multiple of what the model's states need.
    """
    granule = spec.page_granule
    if not config.cache.page_size:
        return granule * -(-SMALLEST_PAGE // granule)
    if config.cache.page_size % granule:
        raise ConfigError(
            f"page_size {config.cache.page_size} does not suit this model: its cached states "
            f"need a multiple of {granule} tokens"
        )
    return config.cache.page_size


def plan_kv(
    config: EngineConfig,
    spec: CacheSpec,
    *,
    kv_dtype: str,
    model_len: int,
    device: torch.device,
    activation_bytes: int,
) -> KVBudget:
    """Divide the memory that is left into pages.

    Args:
        model_len: tokens that the model's positions reach.
        activation_bytes: what a full step needs besides; not given to KV.

    Raises:
        ConfigError: a length beyond the model.
        CapacityError: when the memory does not hold the requests' state and one request.
    """
    if config.max_model_len > model_len:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is beyond the model's {model_len} positions"
        )
    page = page_size(config, spec)
    cache, max_batch = config.cache, config.scheduler.max_batch
    memory = cache.memory_bytes or kv_share(device, cache.memory_fraction, activation_bytes)
    per_row = spec.bytes_per_request(kv_dtype, cache.rewind_tokens)
    per_page = spec.bytes_per_token(kv_dtype) * page
    state = per_row * (max_batch + SCRATCH)
    wanted = config.max_model_len or model_len
    # No more pages than all requests at full length can fill.
    most = max_batch * -(-wanted // page)
    # A pipeline stage may store nothing in its pages.
    num_pages = min(int((memory - state) // max(per_page, 1.0)) - SCRATCH, most)
    held = max(0, num_pages) * page
    if num_pages < 1 or held < config.max_model_len:
        need = state + per_page * (SCRATCH + -(-(config.max_model_len or page) // page))
        raise CapacityError(
            f"KV memory is {_mib(memory)} and {_mib(need)} are needed: {_mib(state)} for the "
            f"state of {max_batch} requests and the rest for one request of "
            f"{config.max_model_len or page} tokens; lower max_batch or max_model_len, or give "
            "more KV memory"
        )
    return KVBudget(
        num_pages=num_pages,
        page_size=page,
        max_batch=max_batch,
        max_model_len=min(wanted, held),
        kv_dtype=kv_dtype,
        rewind_tokens=cache.rewind_tokens,
    )


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"
