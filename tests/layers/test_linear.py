"""Layers that are split over ranks give together what the whole layer gives."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kllm.errors import ConfigError
from kllm.kernels import packed_linear
from kllm.layers.linear import ColumnLinear, Linear, RowLinear
from kllm.parallel.communicator import Communicator
from kllm.parallel.single import SingleComm
from tests.parallel.threads import run_ranks
from tests.tolerances import TOLERANCE

IN, OUT = 24, 48
RANKS = [1, 2, 3, 4]


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[torch.float32]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def whole() -> tuple[Tensor, Tensor, Tensor]:
    """Input [5, IN], weight [OUT, IN] and bias [OUT]; unit scale after the product."""
    return randn(5, IN, seed=0), randn(OUT, IN, seed=1) / IN**0.5, randn(OUT, seed=2)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("ranks", RANKS)
def test_outputs_of_column_shards_stand_side_by_side(
    ranks: int, biased: bool, packed: bool
) -> None:
    x, weight, bias = whole()

    def work(comm: Communicator) -> Tensor:
        layer = ColumnLinear(IN, OUT, comm, bias=biased)
        layer.weight.copy_(weight.chunk(comm.size)[comm.rank])
        if layer.bias is not None:
            layer.bias.copy_(bias.chunk(comm.size)[comm.rank])
        if packed:
            layer.pack()
        return layer(x)

    parts = run_ranks(ranks, work)
    assert {part.shape for part in parts} == {(5, OUT // ranks)}
    close(torch.cat(parts, dim=1), F.linear(x, weight, bias if biased else None))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("ranks", RANKS)
def test_every_rank_has_the_sum_of_row_shards(ranks: int, packed: bool) -> None:
    x, weight, _ = whole()

    def work(comm: Communicator) -> Tensor:
        layer = RowLinear(IN, OUT, comm)
        layer.weight.copy_(weight.chunk(comm.size, dim=1)[comm.rank])
        if packed:
            layer.pack()
        return layer(x.chunk(comm.size, dim=1)[comm.rank])

    for y in run_ranks(ranks, work):
        close(y, F.linear(x, weight))


@pytest.mark.parametrize("ranks", RANKS)
def test_column_then_row_needs_one_sum_only(ranks: int) -> None:
    """The pair of a tensor-parallel block: what lies between stays on its rank."""
    x, up, _ = whole()
    down = randn(IN, OUT, seed=3) / OUT**0.5

    def work(comm: Communicator) -> Tensor:
        first, second = ColumnLinear(IN, OUT, comm), RowLinear(OUT, IN, comm)
        first.weight.copy_(up.chunk(comm.size)[comm.rank])
        second.weight.copy_(down.chunk(comm.size, dim=1)[comm.rank])
        return second(F.silu(first(x)))

    for y in run_ranks(ranks, work):
        close(y, F.linear(F.silu(F.linear(x, up)), down))


def test_a_linear_layer_takes_any_leading_dimensions() -> None:
    _, weight, bias = whole()
    layer = Linear(IN, OUT, bias=True)
    layer.weight.copy_(weight)
    assert layer.bias is not None
    layer.bias.copy_(bias)
    for shape in ((IN,), (0, IN), (2, 3, IN)):
        x = randn(*shape, seed=4)
        close(layer(x), F.linear(x, weight, bias))


def test_features_that_ranks_cannot_share_equally_are_refused() -> None:
    class Five(SingleComm):
        size = 5

    with pytest.raises(ConfigError, match="output features = 48 cannot be split over 5 ranks"):
        ColumnLinear(IN, OUT, Five())
    with pytest.raises(ConfigError, match="input features = 24 cannot be split over 5 ranks"):
        RowLinear(IN, OUT, Five())


@pytest.mark.parametrize("mkl", [False, True])
@pytest.mark.parametrize("shape", [(1024, 512), (48, 24), (1, 7)])
def test_products_with_a_packed_weight_are_those_with_the_weight(
    shape: tuple[int, int], mkl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mkl and not torch.backends.mkl.is_available():
        pytest.skip("this torch has no MKL")
    monkeypatch.setattr(packed_linear, "prefers_mkl", lambda: mkl)
    weight, bias = randn(*shape, seed=1) / shape[1] ** 0.5, randn(shape[0], seed=2)
    packed = packed_linear.PackedWeight(weight)
    for rows in ((), (0,), (1,), (3,), (64,), (100,), (2, 3)):
        x = randn(*rows, shape[1], seed=0)
        close(packed.linear(x), F.linear(x, weight))
        close(packed.linear(x, bias), F.linear(x, weight, bias))
    strided = randn(5, 2 * shape[1], seed=3)[:, : shape[1]]
    close(packed.linear(strided), F.linear(strided, weight))


@pytest.mark.parametrize("mkl", [False, True])
def test_no_number_of_rows_is_special_to_a_packed_weight(
    mkl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mkl and not torch.backends.mkl.is_available():
        pytest.skip("this torch has no MKL")
    monkeypatch.setattr(packed_linear, "prefers_mkl", lambda: mkl)
    x, weight = randn(1024, IN, seed=0), randn(OUT, IN, seed=1) / IN**0.5
    packed, want = packed_linear.PackedWeight(weight), F.linear(x, weight)
    for rows in range(1, 1025):
        close(packed.linear(x[:rows]), want[:rows])
