"""The MTP head of DeepSeek-V4 from its equations: float64, one token at a time, no shared code.

Works on the checkpoint's own tensors by their released names.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]


def rms(x: Tensor, eps: float, weight: Tensor | float = 1.0) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def rotate(x: Tensor, position: int, rope_dim: int, theta: float, sign: int = 1) -> Tensor:
    """Interleaved pairs of the last channels, no scaling."""
    x = x.clone()
    first = x.shape[-1] - rope_dim
    for i in range(rope_dim // 2):
        angle = sign * position * theta ** (-2 * i / rope_dim)
        a, b = x[..., first + 2 * i].clone(), x[..., first + 2 * i + 1].clone()
        x[..., first + 2 * i] = a * math.cos(angle) - b * math.sin(angle)
        x[..., first + 2 * i + 1] = a * math.sin(angle) + b * math.cos(angle)
    return x


def hyper(
    w: Weights, site: str, streams: Tensor, c: Mapping[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Input of the sublayer, expand weights and mixing matrix of one token's streams [N, d]."""
    n, eps = c["hc_mult"], c["hc_eps"]
    z = w[f"{site}_fn"] @ rms(streams.flatten(), c["rms_norm_eps"])
    base, scale = w[f"{site}_base"], w[f"{site}_scale"]
    collapse = torch.sigmoid(scale[0] * z[:n] + base[:n]) + eps
    expand = 2 * torch.sigmoid(scale[1] * z[n : 2 * n] + base[n : 2 * n])
    mix = torch.softmax((scale[2] * z[2 * n :] + base[2 * n :]).view(n, n), dim=1) + eps
    mix = mix / (mix.sum(0) + eps)
    for _ in range(c["hc_sinkhorn_iters"] - 1):
        mix = mix / (mix.sum(1, keepdim=True) + eps)
        mix = mix / (mix.sum(0) + eps)
    return collapse @ streams, expand, mix


def window_attention(w: Weights, x: Tensor, c: Mapping[str, Any]) -> Tensor:
    """[T, d] normed inputs -> [T, d]."""
    heads, dim, eps = c["num_attention_heads"], c["head_dim"], c["rms_norm_eps"]
    rope, theta = c["qk_rope_head_dim"], c["rope_theta"]
    kv = rms(x @ w["attn.wkv.weight"].T, eps, w["attn.kv_norm.weight"])
    kv = torch.stack([rotate(row, t, rope, theta) for t, row in enumerate(kv)])
    out = []
    for t, row in enumerate(x):
        low = rms(w["attn.wq_a.weight"] @ row, eps, w["attn.q_norm.weight"])
        q = rms((w["attn.wq_b.weight"] @ low).view(heads, dim), eps)
        q = rotate(q, t, rope, theta)
        seen = kv[max(0, t - c["sliding_window"] + 1) : t + 1]
        weights = (q @ seen.T / math.sqrt(dim)).exp()
        total = w["attn.attn_sink"].exp() + weights.sum(1)
        o = rotate((weights / total.unsqueeze(1)) @ seen, t, rope, theta, sign=-1)
        groups = o.view(c["o_groups"], -1)
        parts = w["attn.wo_a.weight"].view(c["o_groups"], c["o_lora_rank"], -1)
        out.append(w["attn.wo_b.weight"] @ torch.einsum("gri,gi->gr", parts, groups).flatten())
    return torch.stack(out)


def expert(w: Weights, name: str, x: Tensor, limit: float) -> Tensor:
    gate = (w[f"{name}.w1.weight"] @ x).clamp(max=limit)
    up = (w[f"{name}.w3.weight"] @ x).clamp(-limit, limit)
    return w[f"{name}.w2.weight"] @ (gate * torch.sigmoid(gate) * up)


def experts(w: Weights, x: Tensor, c: Mapping[str, Any]) -> Tensor:
    """Score-routed experts and the shared one, for one token [d]."""
    scores = torch.log1p((w["ffn.gate.weight"] @ x).exp()).sqrt()
    chosen = (scores + w["ffn.gate.bias"]).topk(c["num_experts_per_tok"]).indices.tolist()
    total = sum(scores[e] for e in chosen)
    out = expert(w, "ffn.shared_experts", x, c["swiglu_limit"])
    for e in chosen:
        share = c["routed_scaling_factor"] * scores[e] / total
        out = out + share * expert(w, f"ffn.experts.{e}", x, c["swiglu_limit"])
    return out


def mtp_logits(
    weights: Weights, streams: Tensor, next_ids: list[int], c: Mapping[str, Any]
) -> Tensor:
    """Logits [T, V] of token t + 2 from the backbone's streams [T, N, d] and tokens t + 1."""
    eps, every = c["rms_norm_eps"], {name: t.double() for name, t in weights.items()}
    w = {n.removeprefix("mtp.0."): t for n, t in every.items() if n.startswith("mtp.0.")}
    embedded = every["embed.weight"][next_ids]
    e = rms(embedded, eps, w["enorm.weight"]) @ w["e_proj.weight"].T
    h = rms(streams.double(), eps, w["hnorm.weight"]) @ w["h_proj.weight"].T
    x = e.unsqueeze(1) + h  # [T, N, d]
    sites = [hyper(w, "hc_attn", token, c) for token in x]
    inputs = rms(torch.stack([site[0] for site in sites]), eps, w["attn_norm.weight"])
    outputs = window_attention(w, inputs, c)
    logits = []
    for token, out, (_, expand, mix) in zip(x, outputs, sites, strict=True):
        token = torch.outer(expand, out) + mix.T @ token
        y, expand, mix = hyper(w, "hc_ffn", token, c)
        y = experts(w, rms(y, eps, w["ffn_norm.weight"]), c)
        token = torch.outer(expand, y) + mix.T @ token
        z = w["hc_head_fn"] @ rms(token.flatten(), eps)
        collapse = torch.sigmoid(w["hc_head_scale"] * z + w["hc_head_base"]) + c["hc_eps"]
        logits.append(every["head.weight"] @ rms(collapse @ token, eps, w["norm.weight"]))
    return torch.stack(logits)
