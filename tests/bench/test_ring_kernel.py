"""The rate of a step of ring attention."""

import statistics

from kllm.bench.ring_kernel import BlockShape, block_rates
from kllm.hardware.measured import Ceilings
from kllm.parallel.overlap import DenseHeads

CEILINGS = Ceilings(
    device="cpu",
    copy_bytes_per_s=1e9,
    read_bytes_per_s=1e9,
    matmul_flops_per_s={"float32": 1e9, "bfloat16": 4e9},
    launch_s=1e-6,
)


def test_rate_counts_both_products_over_the_median_time() -> None:
    heads = DenseHeads(heads=4, kv_heads=2, dim=24, value_dim=16)
    shape = BlockShape(queries=8, keys=32, heads=heads)
    assert shape.flops == 2 * 8 * 32 * 4 * 24 + 2 * 8 * 32 * 4 * 16
    rates = block_rates(shape, CEILINGS, dtype="bfloat16", device="cpu", repeats=3)
    assert list(rates) == ["torch"]
    rate = rates["torch"]
    assert rate.chosen
    assert len(rate.seconds) == 3
    assert rate.flops_per_s == shape.flops / statistics.median(rate.seconds)
    assert rate.share_of_matmul == rate.flops_per_s / 4e9
