"""Block attention on the GPU against its torch twin."""

import importlib

import pytest
import torch
from torch import Tensor

from kllm import kernels
from kllm.kernels import SoftmaxState, Span
from kllm.kernels import block_attention_reference as reference
from kllm.kernels.reference import split_lists
from tests.gpu.cases import DTYPES, assert_near, randn

SPANS = {
    "full": [Span(slice(0, 37), 70, 70)],
    "diagonal": [Span(slice(0, 37), 34, 70)],  # the last row sees all 70 keys
    "short": [Span(slice(5, 37), -3, 20)],  # some rows see nothing, some all of 20
    "steps": [Span(slice(2, 21), 11, 70, 4), Span(slice(25, 25), 3, 70), Span(slice(21, 37), 9, 9)],
}


def triton(name: str = "block_attention"):  # type: ignore[no-untyped-def]
    return importlib.import_module(f"kllm.kernels.{name}_triton")


def chooser():  # type: ignore[no-untyped-def]
    return importlib.import_module("kllm.kernels.block_attention_gpu")


def state(queries: int, heads: int, value_dim: int, device: torch.device) -> SoftmaxState:
    """A state that has seen something, except for its first row."""
    found = SoftmaxState(
        randn(queries, heads, dtype=torch.float32, device=device, seed=11),
        randn(queries, heads, dtype=torch.float32, device=device, seed=12).exp(),
        randn(queries, heads, value_dim, dtype=torch.float32, device=device, seed=13),
    )
    for tensor, empty in ((found.m, float("-inf")), (found.l, 0.0), (found.o, 0.0)):
        tensor[:1] = empty
    return found


def copied(one: SoftmaxState) -> SoftmaxState:
    return SoftmaxState(one.m.clone(), one.l.clone(), one.o.clone())


def unwritten(one: SoftmaxState) -> SoftmaxState:
    """The same, with memory that nobody has written where nothing has been seen."""
    o = one.o.masked_fill((one.l == 0).unsqueeze(2), float("nan"))
    return SoftmaxState(one.m.clone(), one.l.clone(), o)


def assert_alike(found: SoftmaxState, want: SoftmaxState, dtype: torch.dtype) -> None:
    """The finished results agree, and so does the weight that the state gives to later keys."""
    finish = triton("softmax_state").finish_softmax
    assert_near(finish(found, dtype, None), reference.finish_softmax(want, dtype))
    seen = want.l > 0
    assert torch.equal(found.l > 0, seen)
    assert_near((found.m + found.l.log())[seen].to(dtype), (want.m + want.l.log())[seen].to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value_dim"),
    [(2, 2, 64, 32), (6, 2, 48, 40), (20, 1, 72, 64)],  # one head each, grouped, MQA
)
def test_block_attention_matches_the_reference(
    device: torch.device,
    heads: int,
    kv_heads: int,
    dim: int,
    value_dim: int,
    spans: list[Span],
    dtype: torch.dtype,
) -> None:
    q = randn(37, heads, dim, dtype=dtype, device=device)
    k = randn(70, kv_heads, dim, dtype=dtype, device=device, seed=1)
    v = randn(70, kv_heads, value_dim, dtype=dtype, device=device, seed=2)
    want = state(37, heads, value_dim, device)
    found = unwritten(want)
    triton().block_attention(found, q, k, v, spans, dim**-0.5)
    reference.block_attention(want, q, k, v, spans, dim**-0.5)
    assert_alike(found, want, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value_dim"),
    [(4, 4, 192, 128), (2, 2, 256, 256), (8, 1, 128, 128), (64, 1, 576, 512)],
)
def test_block_attention_of_released_sizes(
    device: torch.device, heads: int, kv_heads: int, dim: int, value_dim: int, dtype: torch.dtype
) -> None:
    """Expanded latent heads, grouped heads, and absorbed latents whose values are keys too."""
    queries, keys = (5, 40) if device.type == "cpu" else (300, 1000)
    q = randn(queries, heads, dim, dtype=dtype, device=device)
    kv = randn(keys, kv_heads, dim, dtype=dtype, device=device, seed=1)
    found = state(queries, heads, value_dim, device)
    want = copied(found)
    spans = [Span(slice(0, queries), keys - queries + 1, keys)]
    triton().block_attention(found, q, kv, kv[..., :value_dim], spans, dim**-0.5)
    reference.block_attention(want, q, kv, kv[..., :value_dim], spans, dim**-0.5)
    assert_alike(found, want, dtype)


def index_lists(tokens: int, width: int, rows: int, share: float, device: torch.device) -> Tensor:
    """Distinct rows of which `share` are present, anywhere in the list; one token has none."""
    generator = torch.Generator().manual_seed(width)
    idx = torch.rand(tokens, rows, generator=generator).argsort(1)[:, :width]
    idx[torch.rand(tokens, width, generator=generator) >= share] = -1
    idx[tokens // 2] = -1
    return idx.to(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("share", [0.03, 1.0])
@pytest.mark.parametrize(
    ("heads", "dim", "value_dim", "width"),
    [(8, 64, None, 40), (20, 72, 64, 300), (64, 576, 512, 90)],
)
def test_sparse_block_attention_matches_the_reference(
    device: torch.device,
    heads: int,
    dim: int,
    value_dim: int | None,
    width: int,
    share: float,
    dtype: torch.dtype,
) -> None:
    tokens = 3 if device.type == "cpu" else 200
    q = randn(tokens, heads, dim, dtype=dtype, device=device)
    kv = randn(400, dim, dtype=dtype, device=device, seed=1)
    idx = index_lists(tokens, width, 400, share, device)
    want = state(tokens, heads, value_dim or dim, device)
    found, before = unwritten(want), copied(want)
    triton("sparse_block").sparse_block_attention(found, q, kv, idx, dim**-0.5, value_dim)
    reference.sparse_block_attention(want, q, kv, idx, dim**-0.5, value_dim)
    assert_alike(found, want, dtype)
    for old, new in ((before.m, found.m), (before.l, found.l), (before.o, found.o)):
        assert torch.equal(old[tokens // 2], new[tokens // 2]), "a row without entries is untouched"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("parts", [1, 3, 8])
def test_lists_split_once_are_attended_to_part_by_part(
    device: torch.device, parts: int, dtype: torch.dtype
) -> None:
    """Each part adds its own; a row that has nothing in a part keeps its state bit by bit."""
    tokens, size = (4 if device.type == "cpu" else 200), 50
    q = randn(tokens, 20, 72, dtype=dtype, device=device)
    kv = randn(parts * size, 72, dtype=dtype, device=device, seed=1)
    lists = index_lists(tokens, min(40, parts * size), parts * size, 0.5, device).int()
    kernel = triton("sparse_block")
    places, starts = kernel.split_lists(lists, size, parts)
    for mine, theirs in zip((places, starts), split_lists(lists, size, parts), strict=True):
        there = torch.arange(mine.shape[1], device=device) < starts[:, -1:]
        same = mine == theirs
        assert bool((same if mine is starts else same | ~there).all())
    want = state(tokens, 20, 64, device)
    found = unwritten(want)
    reference.sparse_block_attention(want, q, kv, lists, 72**-0.5, 64)
    for part in range(parts):
        before, bounds = copied(found), (starts[:, part], starts[:, part + 1])
        block = kv[part * size : (part + 1) * size]
        kernel.sparse_block_attention(found, q, block, places, 72**-0.5, 64, bounds)
        idle = starts[:, part] == starts[:, part + 1]
        assert torch.equal(found.m[idle], before.m[idle])
        assert torch.equal(found.o[idle].nan_to_num(7.0), before.o[idle].nan_to_num(7.0))
    assert_alike(found, want, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [40, 256])
def test_finishing_matches_the_reference(
    device: torch.device, dim: int, dtype: torch.dtype
) -> None:
    """With and without a sink; a query without keys gives zeros."""
    want = state(21, 3, dim, device)
    finish = triton("softmax_state").finish_softmax
    for sink in (None, 3 * randn(3, dtype=torch.float32, device=device)):
        found = finish(unwritten(want), dtype, sink)
        assert_near(found, reference.finish_softmax(want, dtype, sink))
        assert not found[0].any()
    assert finish(SoftmaxState.empty(0, 3, dim, device), dtype, None).shape == (0, 3, dim)


def test_row_that_sees_nothing_keeps_its_state_exactly(device: torch.device) -> None:
    """Also beside rows of the same tile that see keys."""
    q = randn(9, 2, 32, dtype=torch.float16, device=device)
    found = state(9, 2, 32, device)
    before = copied(found)
    triton().block_attention(found, q, q, q, [Span(slice(0, 9), -4, 9)], 0.2)
    for old, new in ((before.m, found.m), (before.l, found.l), (before.o, found.o)):
        assert torch.equal(old[:5], new[:5])
        assert not torch.equal(old[5:], new[5:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [40, 256])
def test_finished_result_is_added_like_a_block(
    device: torch.device, dim: int, dtype: torch.dtype
) -> None:
    """Rows of either side may have seen nothing."""
    out = randn(3, 21, dim, dtype=dtype, device=device).transpose(0, 1)  # [n, H, Dv] of a view
    lse = 3 * randn(3, 21, dtype=torch.float32, device=device).t()
    lse[:2] = float("-inf")
    want = state(21, 3, dim, device)
    found = unwritten(want)
    triton("softmax_state").add_result(found, out, lse)
    other = SoftmaxState(lse, lse.isfinite().float(), out.float() * lse.isfinite().unsqueeze(2))
    reference.merge_softmax(want, other)
    assert_alike(found, want, dtype)


@pytest.mark.parametrize("first", [-600, -1, 0, 1, 2, 900, 2300, 2600, 9000])
@pytest.mark.parametrize("keys", [1500, 2600])
@pytest.mark.parametrize("step", [1, 4])
def test_pieces_of_a_span_see_what_it_sees(
    device: torch.device, first: int, keys: int, step: int
) -> None:
    """Every row sees each of its keys once."""
    span = Span(slice(3, 2003), first, keys, step)
    parts = chooser().pieces(span)
    want = torch.arange(keys) < torch.tensor([span.seen(i) for i in range(2000)]).unsqueeze(1)
    if parts is None:
        assert step == 4
        assert not span.full
        return
    seen = torch.zeros(2003, keys, dtype=torch.int32)
    for part in parts:
        shape = seen[part.rows, part.keys].shape
        assert shape.numel()
        ones = torch.ones(shape, dtype=torch.int32)
        if part.causal:
            assert shape[0] == shape[1]
            ones = ones.tril()
        seen[part.rows, part.keys] += ones
    assert torch.equal(seen[3:], want.int())


@pytest.mark.parametrize("name", ["flashinfer", "cudnn"])
@pytest.mark.parametrize(("heads", "dim", "value_dim"), [(8, 256, 256), (8, 192, 128)])
def test_library_attention_matches_the_reference(
    cuda: torch.device, name: str, heads: int, dim: int, value_dim: int
) -> None:
    """Every span that a library may get: full, and a diagonal behind keys that all rows see."""
    gpu = chooser()
    if not gpu.runs(name, dim, value_dim, 1, torch.bfloat16, cuda):
        pytest.skip(f"{name} does not run heads of {dim} and {value_dim} channels here")
    q = randn(700, heads, dim, dtype=torch.bfloat16, device=cuda)
    k = randn(3000, heads, dim, dtype=torch.bfloat16, device=cuda, seed=1)
    v = randn(3000, heads, value_dim, dtype=torch.bfloat16, device=cuda, seed=2)
    for span in (Span(slice(50, 700), 2500, 2500), Span(slice(0, 700), 2500, 3000)):
        found = state(700, heads, value_dim, cuda)
        want = copied(found)
        parts = gpu.pieces(span)
        gpu.attend_pieces(gpu.LIBRARIES[name], found, q, k, v, parts, dim**-0.5)
        reference.block_attention(want, q, k, v, [span], dim**-0.5)
        assert_alike(found, want, torch.bfloat16)


@pytest.mark.parametrize("first", [-600, 1, 100, 2300, 9000])
def test_chosen_kernel_matches_the_reference(cuda: torch.device, first: int) -> None:
    """Whatever runs: spans that start before the block, cross its end, or see all of it."""
    q = randn(700, 8, 256, dtype=torch.bfloat16, device=cuda)
    k = randn(2600, 8, 256, dtype=torch.bfloat16, device=cuda, seed=1)
    found = state(700, 8, 256, cuda)
    want = copied(found)
    spans = [Span(slice(0, 650), first, 2600), Span(slice(650, 700), first, 2600, 4)]
    kernels.block_attention(found, q, k, k, spans, 0.06)
    reference.block_attention(want, q, k, k, spans, 0.06)
    assert_alike(found, want, torch.bfloat16)
