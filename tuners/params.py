"""What `kllm tune` may set, and what must hold between the settings.

A new capability (a speculative depth) is a new line here.
"""

from kllm.parallel.layout import DEGREES
from kllm.tuners.space import Constraint, Param, Settings, Site, Value

TOKEN_BUDGETS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PAGE_SIZES = (0, 16, 32, 64, 128, 256)


def _power_of_two_at_least(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def _budget_is_distinct(value: Value, site: Site) -> bool:
    # More than every prompt at once cannot be used up: those budgets are one and the same.
    everything = site.concurrency * site.prompt_tokens
    return int(value) <= _power_of_two_at_least(everything)


def _budget_meaning(value: Value, site: Site) -> Value:
    return min(int(value), _power_of_two_at_least(site.concurrency * site.prompt_tokens))


def _batch_is_distinct(value: Value, site: Site) -> bool:
    return int(value) <= _power_of_two_at_least(site.concurrency)


def _batch_meaning(value: Value, site: Site) -> Value:
    # What is never in flight is never batched.
    return min(int(value), site.concurrency)


def in_flight(settings: Settings, site: Site) -> int:
    """Most requests in flight in one request-DP group: the groups share them evenly."""
    groups = min(int(settings.get("dp", 1)), site.concurrency)
    return -(-site.concurrency // groups)


def _budget_within(value: Value, settings: Settings, site: Site) -> Value:
    everything = in_flight(settings, site) * site.prompt_tokens
    return min(int(value), _power_of_two_at_least(everything))


def _batch_within(value: Value, settings: Settings, site: Site) -> Value:
    return min(int(value), in_flight(settings, site))


def _kv_dtype_usable(value: Value, site: Site) -> bool:
    return value in site.kv_dtypes


def _kv_dtype_meaning(value: Value, site: Site) -> Value:
    return site.dtype if value == "auto" else value


def _backend_usable(value: Value, site: Site) -> bool:
    return value in site.attention_backends


def _backend_meaning(value: Value, site: Site) -> Value:
    # The engine's own choice: the first that is usable (see `attention_backends` of a site).
    return site.attention_backends[0] if value == "auto" and site.attention_backends else value


def _page_usable(value: Value, site: Site) -> bool:
    return int(value) % site.page_granule == 0


def _page_meaning(value: Value, site: Site) -> Value:
    return int(value) or site.default_page_size


PARAMS = (
    Param(
        name="token_budget",
        target="scheduler.token_budget",
        choices=TOKEN_BUDGETS,
        log=True,
        grows=True,
        usable=_budget_is_distinct,
        meaning=_budget_meaning,
        within=_budget_within,
    ),
    Param(
        name="max_batch",
        target="scheduler.max_batch",
        choices=BATCHES,
        log=True,
        grows=True,
        usable=_batch_is_distinct,
        meaning=_batch_meaning,
        within=_batch_within,
    ),
    Param(
        name="kv_dtype",
        target="cache.dtype",
        choices=("auto", "float32", "bfloat16", "float16", "fp8"),
        usable=_kv_dtype_usable,
        meaning=_kv_dtype_meaning,
    ),
    Param(
        name="page_size",
        target="cache.page_size",
        choices=PAGE_SIZES,
        log=True,
        usable=_page_usable,
        meaning=_page_meaning,
    ),
    Param(
        name="attention",
        target="attention",
        choices=("torch", "triton", "flashinfer"),
        applies=lambda site: bool(site.attention_backends),
        usable=_backend_usable,
        meaning=_backend_meaning,
    ),
    Param(
        name="graphs",
        target="graphs",
        choices=(True, False),
        applies=lambda site: site.device == "cuda",
    ),
)

# The degrees of a layout, and how context parallelism exchanges: their values come in rows, one
# for each valid layout (`kllm.tuners.layouts`). Degrees are ordered, so that what is learnt of
# one layout says something of its neighbours.
LAYOUT_PARAMS = (
    *(Param(name=n, target=f"parallel.{n}", choices=(), log=True) for n in DEGREES),
    Param(name="cp_kind", target="parallel.cp_kind", choices=()),
)


def _budget_holds_batch(settings: Settings, site: Site) -> bool:
    # Every running request decodes one token a step.
    return int(settings["token_budget"]) >= int(settings["max_batch"])


def _state_fits(settings: Settings, site: Site) -> bool:
    kv_dtype = str(_kv_dtype_meaning(settings["kv_dtype"], site))
    per_request = site.request_state_bytes.get(kv_dtype)
    if per_request is None or site.kv_memory_bytes is None:
        return True
    return int(settings["max_batch"]) * per_request <= site.kv_memory_bytes


def _page_not_longer_than_request(settings: Settings, site: Site) -> bool:
    page = int(_page_meaning(settings["page_size"], site))
    return settings["page_size"] == 0 or page <= _power_of_two_at_least(site.request_tokens)


def _backend_reads_kv(settings: Settings, site: Site) -> bool:
    kv_dtype = _kv_dtype_meaning(settings["kv_dtype"], site)
    return settings["attention"] != "flashinfer" or kv_dtype in ("bfloat16", "float16")


CONSTRAINTS = (
    Constraint(
        reason="token_budget must be at least max_batch",
        needs=("token_budget", "max_batch"),
        holds=_budget_holds_batch,
    ),
    Constraint(
        reason="the state of max_batch requests must fit the KV memory",
        needs=("max_batch", "kv_dtype"),
        holds=_state_fits,
    ),
    Constraint(
        reason="the flashinfer backend reads bfloat16 and float16 KV only",
        needs=("attention", "kv_dtype"),
        holds=_backend_reads_kv,
    ),
    Constraint(
        reason="page_size must not be longer than the longest request",
        needs=("page_size",),
        holds=_page_not_longer_than_request,
    ),
)
