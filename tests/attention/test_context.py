"""What layers share is worked out once a step, for each question that they ask."""

from types import SimpleNamespace
from typing import Any

from kllm.attention.context import once_a_step


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
