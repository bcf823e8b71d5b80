"""Random weights, made in place on the device one parameter at a time.

For timing only. The scales keep activations near unit size at any width and depth, so that
low-precision formats see the ranges they were made for: matrices are N(0, 1 / inputs), norm
weights 1, biases 0, embeddings N(0, 0.02). A router row then gives unit-sized scores of a
normed input, which spreads tokens over all experts.
"""

import zlib
from typing import Any

import torch
from torch import Tensor

from kllm.models.base import CausalLM

EMBEDDING_STD = 0.02  # `initializer_range` of the published configs


def fill_random(model: CausalLM, family: Any, seed: int) -> None:
    """Fill every parameter of `model` in place.

    Each parameter has a random stream of its own, from `seed` and its name: a cut model has the
    weights of the whole one. A family may offer `init_special(config, name, tensor, generator)`,
    which fills tensors that mean something else (tables, sinks, mixing scales) and returns
    whether it did.
    """
    special = getattr(family, "init_special", None)
    with torch.no_grad():
        for name, tensor in _tensors(model):
            generator = torch.Generator(tensor.device)
            # 32 bits: the CPU generator ignores the others.
            generator.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            if special is None or not special(model.config, name, tensor, generator):
                _fill(name, tensor, generator)


def _tensors(model: CausalLM) -> list[tuple[str, Tensor]]:
    persistent = model.state_dict(keep_vars=True)
    aliases = {id(tensor): name for name, tensor in reversed(persistent.items())}
    return [(name, tensor) for name, tensor in persistent.items() if aliases[id(tensor)] == name]


def _fill(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    owner, _, leaf = name.rpartition(".")
    if tensor.ndim < 2:
        tensor.fill_(1.0 if leaf == "weight" else 0.0)
        return
    embedding = owner.rpartition(".")[2].startswith("embed")
    std = EMBEDDING_STD if embedding else tensor.shape[-1] ** -0.5
    tensor.normal_(0, std, generator=generator)
