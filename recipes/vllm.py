"""The command line of vLLM, `vllm serve`.

Names and meanings are of vLLM 0.33.0: `vllm/engine/arg_utils.py`, `vllm/config/` and, for what
context parallelism allows, `vllm/v1/worker/gpu/pcp_manager.py`. Requests and tokens are limited
for each data-parallel rank, as in kLLM; experts are spread over all ranks of a pipeline stage.
"""

import json

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


def _kv_dtype(value: str, config: EngineConfig) -> Translation:
    if value == "auto":
        return Translation(
            approximate=f"kLLM stores KV as the model dtype ({config.dtype}); vLLM's own choice is "
            "FP8 for some models, DeepSeek-V4 among them, which holds more tokens"
        )
    if value == "fp8":
        return Translation(
            flags=(("--kv-cache-dtype", "fp8"),),
            approximate="kLLM scales every entry; vLLM does so for DeepSeek's latent KV, and for "
            "other models takes the checkpoint's scales or 1.0, which may cost quality",
        )
    if value == config.dtype and value != "float32":
        return Translation(
            flags=(("--kv-cache-dtype", value),),
            approximate="vLLM stops at the start where the model's kernels store KV otherwise, as "
            "FlashMLA does for DeepSeek-V4; leave the flag out there",
        )
    if value == config.dtype:
        return SAME
    return Translation(
        missing=f"vLLM stores KV as the model dtype ({config.dtype}) or quantised, not as {value}; "
        "how many tokens fit changes with it"
    )


def _max_model_len(value: int, config: EngineConfig) -> Translation:
    return Translation(flags=(("--max-model-len", str(value or "auto")),))


def _page_size(value: int, config: EngineConfig) -> Translation:
    if not value:
        return SAME
    return Translation(
        flags=(("--block-size", str(value)),),
        approximate="which sizes vLLM takes depends on the attention backend that it chooses; "
        "leave the flag out if it refuses this one",
    )


def _memory_fraction(value: float, config: EngineConfig) -> Translation:
    if config.cache.memory_bytes:
        return SAME
    return Translation(
        approximate=f"kLLM gives KV {value:g} of what weights and activations leave free; "
        "--gpu-memory-utilization, here left at vLLM's default of 0.92, is the share of the whole "
        "GPU for all three: for as much KV set it to (weights + activations + "
        f"{value:g} x (memory - weights - activations)) / memory"
    )


def _ep(value: int, config: EngineConfig) -> Translation:
    ranks, tp = stage_ranks(config), config.parallel.tp
    if value == 1 and ranks == tp:
        return SAME
    if value == 1:
        return Translation(
            approximate=f"the recipe keeps all experts {ranks // tp} times; vLLM cuts those of an "
            f"MoE model over all {ranks} ranks, which saves memory and couples the ranks' steps"
        )
    return Translation(
        flags=(("--enable-expert-parallel",),),
        approximate=""
        if value == ranks
        else f"vLLM spreads experts over all {ranks} ranks, the recipe over {value}, with "
        f"{ranks // value} copies of each: vLLM takes less memory, and has more ranks in every "
        "exchange",
    )


def _cp(value: int, config: EngineConfig) -> Translation:
    if value == 1:
        return SAME
    return Translation(
        flags=(("--prefill-context-parallel-size", str(value)),),
        approximate="vLLM takes this for MLA models only, and together with CUDA graphs for "
        "DeepSeek-V3.2 and GLM-5.2 only; for others add -cc.cudagraph_mode=NONE",
    )


def _cp_kind(value: str, config: EngineConfig) -> Translation:
    cp = config.parallel.cp
    if cp == 1 or value == "replicated":
        return SAME
    return Translation(
        flags=(("--decode-context-parallel-size", str(cp)), ("--dcp-comm-backend", "ag_rs")),
        approximate=f"this keeps KV spread over the {cp} ranks as in the recipe, but each decode "
        "step of a request runs on all of them, in kLLM on the one that owns it; vLLM takes it "
        "for sparse MLA only, without it every rank keeps all KV",
        missing="vLLM has no ring: it gathers each layer's KV, so transfers are not hidden behind "
        "attention"
        if value == "ring"
        else "",
    )


def _ep_backend(value: str, config: EngineConfig) -> Translation:
    return SAME if config.parallel.ep == 1 else _exchange(value, config)


def _exchange(value: str, config: EngineConfig) -> Translation:
    if value != "deep_ep":
        return _COLLECTIVES(value, config)
    # The high-throughput kernels cannot be captured: vLLM would turn graphs off.
    mode = "low_latency" if config.graphs else "high_throughput"
    return Translation(
        flags=(("--all2all-backend", f"deepep_{mode}"),),
        approximate="kLLM takes DeepEP's normal kernels for prefill and the low-latency ones for "
        "decode; vLLM takes one kind for all steps",
    )


_COLLECTIVES = choice(
    {
        "auto": SAME,
        "all_gather": Translation(flags=(("--all2all-backend", "allgather_reducescatter"),)),
    },
    "vLLM has no plain {value}; its default, all-gather and reduce-scatter, sends every token to "
    "every rank",
)


def _redundant_experts(value: int, config: EngineConfig) -> Translation:
    if not value:
        return SAME
    copies = json.dumps({"num_redundant_experts": value})
    return Translation(
        flags=(("--enable-eplb",), ("--eplb-config", copies)),
        approximate="kLLM places copies once, by a measured routing; vLLM moves them while it "
        "serves, by the load that it sees",
    )


def _graphs(value: bool, config: EngineConfig) -> Translation:
    if value:
        return SAME
    return Translation(
        flags=(("--enforce-eager",),),
        approximate="this also turns torch.compile off, which kLLM does not use",
    )


def _load(value: str, config: EngineConfig) -> Translation:
    if config.model.endswith(".gguf") and value != "random":
        return Translation(
            missing="vLLM reads no GGUF file; give it the folder or Hugging Face name of the "
            "model's safetensors instead"
        )
    return checkpoints.load(value, config)


def _device(value: str, config: EngineConfig) -> Translation:
    kind, _, index = value.partition(":")
    if kind == "cpu":
        return Translation(
            missing="vLLM runs on the device that it was built for; install its CPU build, and "
            "expect other numbers than on the recipe's processor"
        )
    return Translation(flags=(("--device-ids", index),)) if index else SAME


VLLM = Target(
    title="vLLM 0.33.0",
    program=("vllm", "serve"),
    rules={
        **MEASUREMENT,
        "dtype": checkpoints.dtype,
        "cache.dtype": _kv_dtype,
        "max_model_len": _max_model_len,
        "scheduler.max_batch": flag("--max-num-seqs"),
        "scheduler.token_budget": flag("--max-num-batched-tokens"),
        "cache.page_size": _page_size,
        "cache.memory_bytes": flag("--kv-cache-memory-bytes", unless=0),
        "cache.memory_fraction": _memory_fraction,
        "parallel.tp": flag("--tensor-parallel-size", unless=1),
        "parallel.dp": flag("--data-parallel-size", unless=1),
        "parallel.cp": _cp,
        "parallel.cp_kind": _cp_kind,
        "parallel.pp": flag("--pipeline-parallel-size", unless=1),
        "parallel.ep": _ep,
        "parallel.ep_backend": _ep_backend,
        "parallel.redundant_experts": _redundant_experts,
        "expert_placement": missing(
            "vLLM reads no placement of experts such as {value}; they lie in order, and a rank "
            "with popular ones is waited for (--enable-eplb moves them while serving)",
            unless="",
        ),
        "attention": choice(
            {
                "auto": SAME,
                "flashinfer": Translation(flags=(("--attention-backend", "FLASHINFER"),)),
                "triton": Translation(flags=(("--attention-backend", "TRITON_ATTN"),)),
            },
            "vLLM has no '{value}' attention backend for text; it takes one of its own, at another "
            "speed",
        ),
        "graphs": _graphs,
        "load": _load,
        "seed": flag("--seed"),
        "device": _device,
    },
    differs={
        "prefix caching": "on in vLLM, kLLM has none: to compare the two add "
        "--no-enable-prefix-caching",
    },
)
