"""A model as the layout algebra sees it: plain numbers from manifest, cache spec and config."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from kllm.attention.mla import INDEX_KEY, LATENT
from kllm.cache.spec import PagedState, RingState
from kllm.models.base import STORED_BITS, CheckpointTensor, Family
from kllm.models.deepseek_v4_config import DeepseekV4Config
from kllm.models.glm_moe_dsa_config import DENSE, FULL, SHARED, GlmMoeDsaConfig
from kllm.models.llama import LlamaConfig
from kllm.parallel.footprint import BEHIND, EMBEDDING, ModelShape, RequestState, TokenState, Weights
from kllm.parallel.layout import Dimensions
from kllm.parallel.overlap import PICK_BYTES, AttentionShape, DenseHeads, Phase
from kllm.quant.entry import DTYPE_BYTES

Entries = Mapping[str, Mapping[str, float]]  # bytes of an entry by state and KV dtype

KV_DTYPES = (*DTYPE_BYTES, "fp8")
# Ends of the names of parameters that the networks keep in float32 whatever the run dtype.
FLOAT32 = ("router.weight", "router.bias", ".fn", ".base", ".scale", ".ape", ".sink")
TABLES = ("embed.weight", "head.weight")
DRAFT_TABLES = ("mtp.embed.weight", "mtp.head.weight")
EXPERT_SPLIT = {"w13": "column", "w2": "row"}  # where an expert is cut when ep is 1


def model_shape(family: Family, config: Any, *, mtp: bool = False) -> ModelShape:
    """The shape of a model; nothing is allocated."""
    weights = collect_weights(family.manifest(config), mtp=mtp)
    spec = family.cache_spec(config, mtp)
    entries = {state.name: _entry_bytes(state) for state in spec.paged}
    common: dict[str, Any] = {
        "weights": weights,
        "token_states": tuple(map(_token_state, spec.paged)),
        "request_states": (),
        "page_granule": spec.page_granule,
        "hidden": config.hidden_size,
        "vocabulary": config.vocab_size,
        "expert_layers": _layers_of(weights, "experts"),
        "ffn_layers": _layers_of(weights, "ffn"),
    }
    if isinstance(config, LlamaConfig):
        return _llama(config, entries, common)
    if isinstance(config, GlmMoeDsaConfig):
        return _glm(config, entries, common)
    assert isinstance(config, DeepseekV4Config)
    kinds = (config.compression("csa"), config.compression("hca"), config.index_compression)
    reach = {kind.tail: kind.overlap * kind.ratio for kind in kinds if kind}
    common["request_states"] = tuple(
        _request_state(ring, reach.get(ring.name, ring.window - 1)) for ring in spec.rings
    )
    return _deepseek_v4(config, entries, common)


def collect_weights(
    tensors: Iterable[CheckpointTensor], *, mtp: bool = False
) -> tuple[Weights, ...]:
    """The tensors of a manifest, alike ones of a layer together; those of draft heads if `mtp`."""
    counts: Counter[Weights] = Counter()
    for tensor in tensors:
        # A draft head uses the backbone's tables.
        if (mtp or not tensor.mtp) and tensor.target not in DRAFT_TABLES:
            counts[_weights(tensor)] += 1
    # The embedding is read on the last stage by a draft head, or as a tied lm head.
    last = mtp or not any(w.part == "vocab" and w.layer == BEHIND for w in counts)
    return tuple(
        replace(w, count=count, both_ends=w.layer == EMBEDDING and last)
        for w, count in counts.items()
    )


def _weights(tensor: CheckpointTensor) -> Weights:
    owner, _, leaf = tensor.target.rpartition(".")
    split = tensor.split
    if tensor.expert is not None:
        part, split = "experts", EXPERT_SPLIT.get(leaf, split)
    elif tensor.target in TABLES:
        part = "vocab"
    else:
        part = "ffn" if ".ffn" in owner else "attention"
    run_bits = None
    if tensor.dtype == "I64":
        run_bits = 64
    elif tensor.target.endswith(FLOAT32):
        run_bits = 32
    scale = tensor.scale
    return Weights(
        layer=_layer(tensor),
        part=part,
        shape=tensor.shape,
        bits=STORED_BITS[tensor.dtype],
        split=split,
        run_bits=run_bits,
        scale_bits=STORED_BITS[scale.dtype] if scale else 0,
        scale_block=scale.block if scale else (1, 1),
    )


def _layer(tensor: CheckpointTensor) -> int:
    if tensor.target == "embed.weight":
        return EMBEDDING
    root, _, rest = tensor.target.partition(".")
    return int(rest.partition(".")[0]) if root == "layers" and not tensor.mtp else BEHIND


def _layers_of(weights: tuple[Weights, ...], part: str) -> tuple[int, ...]:
    """Layers with split or routed weights of a part; norms and routers do not count."""
    with_part = {w.layer for w in weights if w.part == part and (w.split or part == "experts")}
    return tuple(sorted(with_part - {BEHIND}))


def _token_state(state: PagedState) -> TokenState:
    return TokenState(
        name=state.name,
        layers=state.layers,
        bytes_per_token={
            dtype: nbytes / state.tokens_per_entry for dtype, nbytes in _entry_bytes(state).items()
        },
        split=state.head_shards,
    )


def _request_state(ring: RingState, reach: int) -> RequestState:
    return RequestState(
        name=ring.name,
        layers=ring.layers,
        row_bytes={
            dtype: ring.entry.nbytes(dtype) if ring.entry else 4 * ring.width for dtype in KV_DTYPES
        },
        window=ring.window,
        reach=reach,
    )


def _entry_bytes(state: PagedState) -> dict[str, float]:
    return {dtype: float(state.heads * state.entry.nbytes(dtype)) for dtype in KV_DTYPES}


def _llama(c: LlamaConfig, entries: Entries, common: dict[str, Any]) -> ModelShape:
    keys = Phase(
        name="keys and values",
        entry_bytes=entries["kv"],
        pair_flops=4.0 * c.num_attention_heads * c.head_dim,
        query_width=c.num_attention_heads * c.head_dim,
        row_bytes=_state_bytes(c.num_attention_heads, c.head_dim),
        split_entries=True,
    )
    layers = tuple(range(c.num_hidden_layers))
    return ModelShape(
        dims=Dimensions(
            layers=c.num_hidden_layers,
            cuts=(
                ("attention heads", c.num_attention_heads),
                ("KV heads", c.num_key_value_heads),
                ("FFN columns", c.intermediate_size),
                ("vocabulary entries", c.vocab_size),
            ),
        ),
        attention=(
            AttentionShape(
                name="GQA",
                layers=layers,
                phases=(keys,),
                dense=DenseHeads(
                    heads=c.num_attention_heads,
                    kv_heads=c.num_key_value_heads,
                    dim=c.head_dim,
                    value_dim=c.head_dim,
                ),
            ),
        ),
        streams=1,
        experts_per_token=0,
        **common,
    )


def _glm(c: GlmMoeDsaConfig, entries: Entries, common: dict[str, Any]) -> ModelShape:
    cuts = [("attention heads", c.num_attention_heads)]
    if not all(c.sparse_mlp):
        cuts.append(("FFN columns", c.intermediate_size))
    if any(c.sparse_mlp):
        cuts.append(("shared expert columns", c.shared_intermediate_size))
    cuts.append(("vocabulary entries", c.vocab_size))
    return ModelShape(
        dims=Dimensions(
            layers=c.num_hidden_layers,
            cuts=tuple(cuts),
            experts=c.n_routed_experts,
            expert_columns=c.moe_intermediate_size,
        ),
        attention=_latent_attention(c, entries),
        streams=1,
        experts_per_token=c.num_experts_per_tok,
        selected=c.indexer.topk if c.indexer else 0,
        borrowing_layers=c.layers_of(SHARED),
        **common,
    )


def _latent_attention(c: GlmMoeDsaConfig, entries: Entries) -> tuple[AttentionShape, ...]:
    """MLA: the latent's heads absorbed, or expanded on each rank; DSA: an indexer, then latents."""
    heads, latent = c.num_attention_heads, c.kv_lora_rank
    absorbed = 2.0 * heads * (c.entry_width + latent)
    expanded = 2.0 * heads * (c.qk_head_dim + c.v_head_dim)
    expanding = 2.0 * heads * (c.qk_nope_head_dim + c.v_head_dim) * latent
    dense = Phase(
        name="latents",
        entry_bytes=entries[LATENT],
        pair_flops=absorbed,
        query_width=heads * c.entry_width,
        row_bytes=_state_bytes(heads, latent),
    )
    form = Phase(
        name="latents, expanded",
        entry_bytes=entries[LATENT],
        pair_flops=expanded,
        query_width=heads * c.qk_head_dim,
        entry_flops=expanding,
        row_bytes=_state_bytes(heads, c.v_head_dim),
    )
    if c.indexer is None:
        expanded_heads = DenseHeads(
            heads=heads, kv_heads=heads, dim=c.qk_head_dim, value_dim=c.v_head_dim
        )
        return (
            AttentionShape(
                name="MLA",
                layers=c.layers_of(DENSE),
                phases=(dense,),
                other_form=form,
                dense=expanded_heads,
            ),
        )
    index = Phase(
        name="index keys",
        entry_bytes=entries[INDEX_KEY],
        pair_flops=2.0 * c.indexer.heads * c.indexer.head_dim,
        query_width=c.indexer.heads * c.indexer.head_dim,
        row_bytes=PICK_BYTES * c.indexer.topk,
        split_work=False,
    )
    chosen = Phase(
        name="selected latents",
        entry_bytes=entries[LATENT],
        pick_flops=absorbed,
        picks=c.indexer.topk,
        query_width=heads * c.entry_width,
        row_bytes=_state_bytes(heads, latent),
    )
    found = (
        AttentionShape(name="DSA", layers=c.layers_of(FULL), phases=(index, chosen)),
        AttentionShape(name="DSA, shared selection", layers=c.layers_of(SHARED), phases=(chosen,)),
    )
    return tuple(kind for kind in found if kind.layers)


def _state_bytes(heads: int, value_dim: int) -> float:
    """A row's softmax state in float32, read and written once."""
    return 2.0 * 4.0 * heads * (value_dim + 2)


def _deepseek_v4(c: DeepseekV4Config, entries: Entries, common: dict[str, Any]) -> ModelShape:
    attend = 4.0 * c.num_attention_heads * c.head_dim  # an entry is key and value
    state = _state_bytes(c.num_attention_heads, c.head_dim)
    index = Phase(
        name="index keys",
        entry_bytes=entries[c.index_compression.state],
        tokens_per_entry=c.csa_ratio,
        pair_flops=2.0 * c.index_n_heads * c.index_head_dim,
        query_width=c.index_n_heads * c.index_head_dim,
        row_bytes=PICK_BYTES * c.index_topk,
        split_work=False,
    )
    chosen = Phase(
        name="selected entries",
        entry_bytes=entries["csa"],
        tokens_per_entry=c.csa_ratio,
        pick_flops=attend,
        picks=c.index_topk,
        query_width=c.num_attention_heads * c.head_dim,
        row_bytes=state,
    )
    every = Phase(
        name="entries",
        entry_bytes=entries["hca"],
        tokens_per_entry=c.hca_ratio,
        pair_flops=attend,
        query_width=c.num_attention_heads * c.head_dim,
        row_bytes=state,
    )
    found = (
        AttentionShape(name="CSA", layers=c.layers_of("csa"), phases=(index, chosen)),
        AttentionShape(name="HCA", layers=c.layers_of("hca"), phases=(every,)),
    )
    return ModelShape(
        dims=Dimensions(
            layers=c.num_hidden_layers,
            cuts=(
                ("attention heads", c.num_attention_heads),
                ("output groups", c.o_groups),
                ("shared expert columns", c.shared_intermediate_size),
                ("vocabulary entries", c.vocab_size),
            ),
            experts=c.n_routed_experts,
            expert_columns=c.moe_intermediate_size,
        ),
        attention=tuple(kind for kind in found if kind.layers),
        streams=c.hc_mult,
        experts_per_token=c.num_experts_per_tok,
        selected=0,  # no layer borrows a selection, so none travels
        **common,
    )
