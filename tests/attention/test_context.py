"""What layers share is worked out once a step, and what the host knows is copied at once."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kllm.attention.context import ALIGNMENT, all_to_device, once_a_step


def test_layers_share_what_one_of_them_has_worked_out() -> None:
    asked: list[tuple[int, int]] = []

    @once_a_step
    def double(ctx: Any, value: int) -> int:
        asked.append((ctx.step, value))
        return 2 * value

    @once_a_step
    def negative(ctx: Any, value: int) -> int:
        return -value

    first, second = (SimpleNamespace(step=step, shared={}) for step in (1, 2))
    assert [double(first, 3), double(first, 3), negative(first, 3), double(first, 4)] == [
        6,
        6,
        -3,
        8,
    ]
    assert double(second, 3) == 6
    assert asked == [(1, 3), (1, 4), (2, 3)]


def test_arrays_of_all_types_are_copied_together_and_aligned() -> None:
    arrays = [
        np.arange(3, dtype=np.int64),
        np.array([[True, False, True]]),
        np.zeros((2, 0), np.int32),
        np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::2],
        np.arange(5, dtype=np.int64),
    ]
    tensors = all_to_device(arrays, torch.device("cpu"))
    for array, tensor in zip(arrays, tensors, strict=True):
        assert torch.equal(tensor, torch.from_numpy(np.ascontiguousarray(array)))
        assert tensor.data_ptr() % ALIGNMENT == 0
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
