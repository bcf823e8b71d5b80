"""A network of a few parameters and its checkpoint with every kind of released tensor."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from kllm.layers.linear import ColumnLinear, RowLinear
from kllm.models.base import BlockScale, CausalLM, CheckpointTensor, Groups
from kllm.quant import fp4, fp8

E8M0_BLOCKS = BlockScale("scale", "F8_E8M0", (128, 128))
FP32_BLOCKS = BlockScale("weight_scale_inv", "F32", (128, 128))
FP4_GROUPS = BlockScale("scale", "F8_E8M0", (1, 32))
EXPERTS, DIM, HIDDEN = 4, 320, 192


@dataclass(frozen=True)
class Rank:
    """A communicator that only knows its place."""

    rank: int
    size: int


class Experts(nn.Module):
    """Whole experts by slot, or the hidden features of all of them split over `ffn`."""

    def __init__(self, ffn: Rank, ep: Rank, held: tuple[int, ...]) -> None:
        super().__init__()
        self.comm = ffn if ep.size == 1 else Rank(0, 1)
        self.held = held
        slots, hidden = len(held), HIDDEN // self.comm.size
        self.w13 = nn.Parameter(torch.empty(slots, 2 * hidden, DIM), requires_grad=False)
        self.w2 = nn.Parameter(torch.empty(slots, DIM, hidden), requires_grad=False)


class Toy(CausalLM):
    """Column, row and expert splits; stacked rows; a table of ids; a draft head."""

    def __init__(
        self, groups: Groups, mtp: bool = False, held: tuple[int, ...] | None = None
    ) -> None:
        super().__init__()
        self.up = ColumnLinear(DIM, 2 * HIDDEN, groups.ffn)
        self.down = RowLinear(HIDDEN, DIM, groups.ffn)
        each = EXPERTS // groups.ep.size
        own = tuple(range(groups.ep.rank * each, (groups.ep.rank + 1) * each))
        self.experts = Experts(groups.ffn, groups.ep, own if held is None else held)
        self.norm = nn.Parameter(torch.empty(DIM), requires_grad=False)
        self.table = nn.Parameter(torch.empty(7, 2, dtype=torch.int64), requires_grad=False)
        if mtp:
            self.mtp_norm = nn.Parameter(torch.empty(DIM), requires_grad=False)


def manifest(dtype: str = "F4_E2M1") -> list[CheckpointTensor]:
    """Released names of `Toy`; `dtype` is that of the experts."""
    scale = FP4_GROUPS if dtype == "F4_E2M1" else E8M0_BLOCKS

    def tensor(name: str, shape: tuple[int, ...], dtype: str, target: str, **more: object):
        return CheckpointTensor(name=name, shape=shape, dtype=dtype, target=target, **more)

    half = {"split": "column", "scale": FP32_BLOCKS}
    tensors = [
        tensor("gate_proj.weight", (HIDDEN, DIM), "F8_E4M3", "up.weight", **half),
        tensor("up_proj.weight", (HIDDEN, DIM), "F8_E4M3", "up.weight", row=HIDDEN, **half),
        tensor(
            "w2.weight", (DIM, HIDDEN), "F8_E4M3", "down.weight", split="row", scale=E8M0_BLOCKS
        ),
        tensor("norm.weight", (DIM,), "BF16", "norm"),
        tensor("tid2eid", (7, 2), "I64", "table"),
        tensor("mtp.norm.weight", (DIM,), "F32", "mtp_norm", mtp=True),
    ]
    for e in range(EXPERTS):
        common = {"scale": scale, "expert": e}
        for k, name in enumerate(("w1", "w3")):
            full, row = f"experts.{e}.{name}.weight", k * HIDDEN
            shape = (HIDDEN, DIM)
            more = {"row": row, "split": "column"}
            tensors.append(tensor(full, shape, dtype, "experts.w13", **common, **more))
        full = f"experts.{e}.w2.weight"
        tensors.append(tensor(full, (DIM, HIDDEN), dtype, "experts.w2", split="row", **common))
    return tensors


def released_tensors(seed: int = 0, dtype: str = "F4_E2M1") -> dict[str, Tensor]:
    """Random stored tensors under the manifest's names, scales included."""
    generator = torch.Generator().manual_seed(seed)
    out: dict[str, Tensor] = {"unused.weight": torch.zeros(3)}
    for t in manifest(dtype):
        if t.dtype == "I64":
            out[t.name] = torch.randint(0, 9, t.shape, generator=generator)
            continue
        weight = torch.randn(t.shape, generator=generator)
        if t.scale is None:
            out[t.name] = weight.bfloat16() if t.dtype == "BF16" else weight
            continue
        scale_name = t.name.removesuffix("weight") + t.scale.suffix
        if t.dtype == "F4_E2M1":
            packed, scale = fp4.quantize(weight)
            out[t.name], out[scale_name] = packed.view(torch.int8), scale
        else:
            power = t.scale.dtype == "F8_E8M0"
            out[t.name], out[scale_name] = fp8.quantize(weight, t.scale.block, power)
    return out


def write_sharded(folder: Path, tensors: dict[str, Tensor], shards: int = 3) -> None:
    """Write an indexed checkpoint; a weight and its scales may be in different shards."""
    names = sorted(tensors)
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    weight_map = {name: files[i % shards] for i, name in enumerate(names)}
    for file in files:
        save_file({n: tensors[n] for n in names if weight_map[n] == file}, folder / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
