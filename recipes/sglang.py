"""The command line of SGLang, `python -m sglang.launch_server`.

Names and meanings are of SGLang 0.5.23: `python/sglang/srt/arg_groups/` (`fields/`, and the hooks
that change what is given) and `server_args.py`. `--tp-size` counts all ranks of a pipeline stage,
attention is divided inside of them. Attention by request (`--attn-dp-size`) divides the limits of
requests and tokens by its groups; `--dp-size` starts whole replicas, each with limits of its own.
"""

from kllm.config import EngineConfig
from kllm.recipes import checkpoints
from kllm.recipes.translation import (
    MEASUREMENT,
    SAME,
    Target,
    Translation,
    choice,
    flag,
    missing,
    stage_ranks,
)

KV_DTYPES = {"bfloat16": "bfloat16", "fp8": "fp8_e4m3"}


def _attention_groups(config: EngineConfig) -> int:
    """Request-DP groups that share experts; without expert parallelism they are replicas."""
    return config.parallel.dp if config.parallel.ep > 1 else 1


def _kv_dtype(value: str, config: EngineConfig) -> Translation:
    stored = config.dtype if value == "auto" else value
    if stored in KV_DTYPES:
        return Translation(
            flags=(("--kv-cache-dtype", KV_DTYPES[stored]),),
            approximate="kLLM scales every entry; SGLang does so for DeepSeek's latent KV, and for "
            "other models takes the checkpoint's scales or 1.0, which may cost quality"
            if stored == "fp8"
            else "",
        )
    if stored == config.dtype:
        return SAME
    return Translation(
        missing=f"SGLang stores KV as the model dtype ({config.dtype}), bfloat16 or quantised, not "
        f"as {value}; how many tokens fit changes with it"
    )


def _max_batch(value: int, config: EngineConfig) -> Translation:
    return Translation(flags=(("--max-running-requests", str(value * _attention_groups(config))),))


def _token_budget(value: int, config: EngineConfig) -> Translation:
    return Translation(
        flags=(("--chunked-prefill-size", str(value * _attention_groups(config))),),
        approximate="a step of kLLM holds prompt chunks and decoding requests under one budget; "
        "SGLang's counts prompts only, and decoding waits for their step unless "
        "--enable-mixed-chunk is given: other TTFT and TPOT for the same number",
    )


def _page_size(value: int, config: EngineConfig) -> Translation:
    if not value:
        return SAME
    return Translation(
        flags=(("--page-size", str(value)),),
        approximate="SGLang puts its own size in its place for DeepSeek-V4 (256) and models with "
        "DSA (64)",
    )


def _memory_fraction(value: float, config: EngineConfig) -> Translation:
    if config.cache.memory_bytes:
        return SAME
    return Translation(
        approximate=f"kLLM gives KV {value:g} of what weights and activations leave free; "
        "--mem-fraction-static, here left to SGLang, is the share of the whole GPU for weights and "
        f"KV: for as much KV set it to (weights + {value:g} x (memory - weights - activations)) / "
        "memory"
    )


def _tp(value: int, config: EngineConfig) -> Translation:
    ranks = value * _attention_groups(config) * config.parallel.cp
    return Translation(flags=(("--tp-size", str(ranks)),)) if ranks > 1 else SAME


def _dp(value: int, config: EngineConfig) -> Translation:
    if value == 1:
        return SAME
    if config.parallel.ep == 1:
        return Translation(flags=(("--dp-size", str(value)),))
    return Translation(
        flags=(("--attn-dp-size", str(value)),),
        approximate=f"SGLang divides --max-running-requests and --chunked-prefill-size by {value}, "
        f"so both are {value} times the recipe's; what is neither attention nor expert is cut over "
        "all ranks there (--enable-dp-lm-head changes the LM head), in kLLM each group has it; "
        f"releases without --attn-dp-size take --dp-size {value} --enable-dp-attention",
    )


def _cp(value: int, config: EngineConfig) -> Translation:
    if value == 1:
        return SAME
    return Translation(
        flags=(
            ("--attn-cp-size", str(value)),
            ("--enable-prefill-cp",),
            ("--cp-strategy", "interleave"),
        ),
        approximate="SGLang deals tokens to ranks one by one, kLLM in stripes; DeepSeek-V4 and "
        "models with DSA take at most 8 ranks with it, and DeepSeek-V4 on a GPU neither tensor "
        "parallel attention nor attention by request",
    )


def _cp_kind(value: str, config: EngineConfig) -> Translation:
    if config.parallel.cp == 1 or value == "replicated":
        return SAME
    copies = f"every rank keeps all KV, {config.parallel.cp} times the memory of the recipe"
    if value == "ring":
        return Translation(
            missing=f"SGLang has no ring: it gathers each layer's KV, and {copies}",
        )
    return Translation(approximate=copies)


def _ep(value: int, config: EngineConfig) -> Translation:
    parallel, ranks = config.parallel, stage_ranks(config)
    if value == 1:
        if parallel.cp == 1:
            return SAME
        return Translation(
            approximate=f"the recipe keeps all experts {parallel.cp} times; SGLang cuts those of "
            f"an MoE model over {parallel.tp * parallel.cp} ranks, which saves memory and makes "
            "smaller products"
        )
    if value == ranks:
        differs = ""
    elif parallel.ep_backend == "deep_ep":
        differs = f"with DeepEP SGLang spreads experts over all {ranks} ranks instead"
    else:
        differs = (
            f"the recipe keeps {ranks // value} copies of each expert; SGLang cuts each over as "
            "many ranks, which saves memory and makes smaller products"
        )
    return Translation(flags=(("--ep-size", str(value)),), approximate=differs)


def _ep_backend(value: str, config: EngineConfig) -> Translation:
    return SAME if config.parallel.ep == 1 else _EXCHANGES(value, config)


_EXCHANGES = choice(
    {
        "auto": SAME,
        "all_gather": Translation(flags=(("--moe-a2a-backend", "none"),)),
        # DeepEP's normal kernels for prefill and the low-latency ones for decode, as in kLLM.
        "deep_ep": Translation(flags=(("--moe-a2a-backend", "deepep"), ("--deepep-mode", "auto"))),
    },
    "SGLang has no plain {value}; without DeepEP or the like it gathers every token on every rank",
)


def _redundant_experts(value: int, config: EngineConfig) -> Translation:
    if not value:
        return SAME
    return Translation(
        flags=(("--ep-num-redundant-experts", str(value)), ("--enable-eplb",)),
        approximate="kLLM places copies once, by a measured routing; SGLang moves them while it "
        "serves, by the load that it sees",
    )


def _graphs(value: bool, config: EngineConfig) -> Translation:
    flags = (("--disable-decode-cuda-graph",), ("--disable-prefill-cuda-graph",))
    return SAME if value else Translation(flags=flags)


def _load(value: str, config: EngineConfig) -> Translation:
    if config.model.endswith(".gguf") and value != "random":
        return Translation(flags=(("--load-format", "gguf"),))
    return checkpoints.load(value, config)


def _device(value: str, config: EngineConfig) -> Translation:
    kind, _, index = value.partition(":")
    if kind == "cpu":
        return Translation(
            flags=(("--device", "cpu"),),
            approximate="SGLang's own CPU build is needed; expect other numbers than on the "
            "recipe's processor",
        )
    return Translation(flags=(("--base-gpu-id", index),)) if index else SAME


SGLANG = Target(
    title="SGLang 0.5.23",
    program=("python", "-m", "sglang.launch_server", "--model-path"),
    rules={
        **MEASUREMENT,
        "dtype": checkpoints.dtype,
        "cache.dtype": _kv_dtype,
        "max_model_len": flag("--context-length", unless=0),
        "scheduler.max_batch": _max_batch,
        "scheduler.token_budget": _token_budget,
        "cache.page_size": _page_size,
        "cache.memory_bytes": missing(
            "SGLang has no limit of KV in bytes ({value}); --max-total-tokens limits a rank's "
            "tokens: divide by the bytes that `kllm models` shows for one",
            unless=0,
        ),
        "cache.memory_fraction": _memory_fraction,
        "parallel.tp": _tp,
        "parallel.dp": _dp,
        "parallel.cp": _cp,
        "parallel.cp_kind": _cp_kind,
        "parallel.pp": flag("--pp-size", unless=1),
        "parallel.ep": _ep,
        "parallel.ep_backend": _ep_backend,
        "parallel.redundant_experts": _redundant_experts,
        "expert_placement": missing(
            "SGLang's --init-expert-location reads recordings of its own format, not {value}; "
            "experts lie in order, and a rank with popular ones is waited for",
            unless="",
        ),
        "attention": choice(
            {
                "auto": SAME,
                "flashinfer": Translation(flags=(("--attention-backend", "flashinfer"),)),
                "triton": Translation(flags=(("--attention-backend", "triton"),)),
                "torch": Translation(flags=(("--attention-backend", "torch_native"),)),
            },
            "SGLang has no '{value}' attention backend; it takes one of its own, at another speed",
        ),
        "graphs": _graphs,
        "load": _load,
        "seed": flag("--random-seed"),
        "device": _device,
    },
    differs={
        "prefix caching": "on in SGLang, kLLM has none: to compare the two add "
        "--disable-radix-cache",
    },
)
