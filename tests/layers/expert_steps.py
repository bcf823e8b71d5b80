"""What a MoE block asks of a step, without a batch."""

from types import SimpleNamespace

from kllm.attention.context import ForwardContext


def step(peer_tokens: tuple[int, ...] = (), decode_only: bool = False) -> ForwardContext:
    return SimpleNamespace(peer_tokens=peer_tokens, decode_only=decode_only)  # type: ignore
