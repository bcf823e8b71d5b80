"""The MTP head of GLM-5.2 from its equations: float64, one token at a time, no shared code.

Works on the checkpoint's own tensors by their released names, in the expanded form of MLA.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]
REFERENCE_NORM_EPS = 1e-6  # of the low-rank norms and the indexer's LayerNorm


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def rotate(x: Tensor, position: int, theta: float) -> Tensor:
    """All channels [..., rope], in interleaved pairs."""
    x, dim = x.clone(), x.shape[-1]
    for i in range(dim // 2):
        angle = position * theta ** (-2 * i / dim)
        a, b = x[..., 2 * i].clone(), x[..., 2 * i + 1].clone()
        x[..., 2 * i] = a * math.cos(angle) - b * math.sin(angle)
        x[..., 2 * i + 1] = a * math.sin(angle) + b * math.cos(angle)
    return x


def selections(w: Weights, x: Tensor, q_low: Tensor, c: Mapping[str, Any]) -> list[list[int]]:
    """The positions that each token attends to."""
    heads, dim, rope = c["index_n_heads"], c["index_head_dim"], c["qk_rope_head_dim"]
    theta = c["rope_parameters"]["rope_theta"]
    keys, chosen = [], []
    for t, row in enumerate(x):
        key = w["indexer.wk.weight"] @ row
        key = (key - key.mean()) / (key.var(correction=0) + REFERENCE_NORM_EPS).sqrt()
        key = w["indexer.k_norm.weight"] * key + w["indexer.k_norm.bias"]
        keys.append(torch.cat((rotate(key[:rope], t, theta), key[rope:])))
        q = (w["indexer.wq_b.weight"] @ q_low[t]).view(heads, dim)
        q = torch.cat((rotate(q[:, :rope], t, theta), q[:, rope:]), dim=1)
        weights = w["indexer.weights_proj.weight"] @ row / math.sqrt(heads)
        scores = [float(weights @ (q @ key / math.sqrt(dim)).clamp(min=0)) for key in keys]
        best = sorted(range(t + 1), key=lambda s: -scores[s])
        chosen.append(best[: c["index_topk"]])
    return chosen


def attention(w: Weights, x: Tensor, c: Mapping[str, Any]) -> Tensor:
    """[T, d] normed inputs -> [T, d]."""
    heads, rank, plain = c["num_attention_heads"], c["kv_lora_rank"], c["qk_nope_head_dim"]
    theta = c["rope_parameters"]["rope_theta"]
    q_low = rms(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"], REFERENCE_NORM_EPS)
    a = x @ w["kv_a_proj_with_mqa.weight"].T
    latents = rms(a[:, :rank], w["kv_a_layernorm.weight"], REFERENCE_NORM_EPS)
    kv = (latents @ w["kv_b_proj.weight"].T).view(len(x), heads, -1)
    rotary = torch.stack([rotate(row, t, theta) for t, row in enumerate(a[:, rank:])])
    shared = rotary.unsqueeze(1).expand(-1, heads, -1)
    keys, values = torch.cat((kv[..., :plain], shared), dim=2), kv[..., plain:]
    out = []
    for t, seen in enumerate(selections(w, x, q_low, c)):
        q = (w["q_b_proj.weight"] @ q_low[t]).view(heads, -1)
        q = torch.cat((q[:, :plain], rotate(q[:, plain:], t, theta)), dim=1)
        scores = torch.einsum("hd,shd->hs", q, keys[seen]) / math.sqrt(q.shape[1])
        o = torch.einsum("hs,shv->hv", scores.softmax(1), values[seen])
        out.append(w["o_proj.weight"] @ o.flatten())
    return torch.stack(out)


def expert(w: Weights, name: str, x: Tensor) -> Tensor:
    gate = w[f"{name}.gate_proj.weight"] @ x
    return w[f"{name}.down_proj.weight"] @ (
        gate * torch.sigmoid(gate) * (w[f"{name}.up_proj.weight"] @ x)
    )


def experts(w: Weights, x: Tensor, c: Mapping[str, Any]) -> Tensor:
    """Routed experts and the shared one, for one token [d]."""
    scores = torch.sigmoid(w["gate.weight"] @ x)
    biased = scores + w["gate.e_score_correction_bias"]
    chosen = biased.topk(c["num_experts_per_tok"]).indices.tolist()
    total = sum(scores[e] for e in chosen)
    out = expert(w, "shared_experts", x)
    for e in chosen:
        share = c["routed_scaling_factor"] * scores[e] / total
        out = out + share * expert(w, f"experts.{e}", x)
    return out


def under(weights: Weights, prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)}


def mtp_states(
    weights: Weights, state: Tensor, next_ids: list[int], c: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """The head's normed states [T, d] and its logits [T, V] of tokens t + 2.

    From normed states [T, d] of the backbone or of an earlier draft, and tokens t + 1.
    """
    eps, every = c["rms_norm_eps"], {name: t.double() for name, t in weights.items()}
    w = under(every, f"model.layers.{c['num_hidden_layers']}.")
    e = rms(every["model.embed_tokens.weight"][next_ids], w["enorm.weight"], eps)
    h = rms(state.double(), w["hnorm.weight"], eps)
    x = torch.cat((e, h), dim=1) @ w["eh_proj.weight"].T
    x = x + attention(under(w, "self_attn."), rms(x, w["input_layernorm.weight"], eps), c)
    y = rms(x, w["post_attention_layernorm.weight"], eps)
    x = x + torch.stack([experts(under(w, "mlp."), row, c) for row in y])
    out = rms(x, w["shared_head.norm.weight"], eps)
    return out, out @ every["lm_head.weight"].T
