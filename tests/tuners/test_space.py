"""The space never holds an invalid or a repeated point, wherever it is built."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kllm.config import CacheConfig, EngineConfig, SchedulerConfig
from kllm.errors import ConfigError
from kllm.tuners.params import CONSTRAINTS, PARAMS
from kllm.tuners.space import Param, Range, Site, Space, parse_fixed
from tests.tuners import fake

BASE = EngineConfig(model="deepseek-v4")


@st.composite
def sites(draw) -> Site:
    device = draw(st.sampled_from(["cpu", "cuda"]))
    dtype = "float32" if device == "cpu" else "bfloat16"
    backends = draw(st.sampled_from([(), ("torch",), ("flashinfer", "torch", "triton")]))
    narrow = ("bfloat16",) if dtype == "float32" else ()
    return Site(
        device=device,
        dtype=dtype,
        page_granule=draw(st.sampled_from([1, 4, 16, 64, 128])),
        default_page_size=draw(st.sampled_from([16, 64, 128])),
        attention_backends=backends,
        kv_dtypes=draw(st.sampled_from([("auto",), ("auto", *narrow, "fp8")])),
        concurrency=draw(st.integers(1, 300)),
        prompt_tokens=draw(st.integers(1, 5000)),
        request_tokens=draw(st.integers(2, 9000)),
        kv_memory_bytes=draw(st.one_of(st.none(), st.integers(1 << 20, 1 << 40))),
        request_state_bytes={dtype: 1 << 14, "fp8": 1 << 13},
    )


@settings(max_examples=60, deadline=None)
@given(sites())
def test_every_point_can_be_used_and_none_twice(site: Site) -> None:
    space = Space(PARAMS, CONSTRAINTS, site=site, base=BASE)
    assert len(set(map(repr, space.points))) == len(space.points) > 0
    for i in range(len(space.points)):
        point = space.settings(i)
        assert space.find(point) == i
        config = space.config(point)  # raises for what an engine would refuse
        assert config.scheduler.token_budget >= config.scheduler.max_batch
        if config.cache.page_size:
            assert config.cache.page_size % site.page_granule == 0
        assert config.cache.dtype in site.kv_dtypes
        if config.attention != "auto":
            assert config.attention in site.attention_backends
        if config.attention == "flashinfer":
            assert config.cache.dtype in ("auto", "bfloat16", "float16")
        if site.device == "cpu":
            assert config.graphs is True


@settings(max_examples=30, deadline=None)
@given(sites())
def test_features_are_finite_and_tell_points_apart(site: Site) -> None:
    space = Space(PARAMS, CONSTRAINTS, site=site, base=BASE)
    features = space.features
    assert np.isfinite(features).all()
    assert ((features >= 0) & (features <= 1)).all()
    if len(space.points) > 1:
        assert len(np.unique(features, axis=0)) == len(space.points)


def test_default_is_a_point() -> None:
    space = fake.space()
    assert space.find(space.default) is not None
    assert space.config(space.default) == BASE


def test_values_that_mean_the_same_are_one_candidate() -> None:
    space = fake.space()
    # 32 in flight: 64 (the default), 32 and 128 are the same batch; page size 0 means 16 here.
    assert [b for b in space.candidates["max_batch"] if int(b) >= 32] == [64]
    assert 16 not in space.candidates["page_size"]
    assert "float32" not in space.candidates["kv_dtype"]


def test_fixed_parameter_has_one_value() -> None:
    fixed = parse_fixed(["max_batch=8", "kv_dtype=fp8"], PARAMS, BASE)
    space = Space(PARAMS, CONSTRAINTS, site=fake.SITE, base=BASE, fixed=fixed)
    assert {p["max_batch"] for p in map(space.settings, range(len(space.points)))} == {8}
    assert space.config(space.default).cache == CacheConfig(dtype="fp8")
    assert "max_batch" not in space.free


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_batch", "NAME=VALUE"),
        ("batch=3", "known names: attention"),
        ("max_batch=many", "needs a whole number, got 'many'"),
        ("graphs=maybe", "needs true or false"),
    ],
)
def test_fix_that_cannot_be_read_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_fixed([text], PARAMS, BASE)


@pytest.mark.parametrize(
    ("fixed", "says"),
    [
        ({"kv_dtype": "float16"}, "kv_dtype=float16 cannot be used"),
        ({"page_size": 24}, "page_size=24 cannot be used"),
        ({"attention": "triton"}, "attention=triton cannot be used"),
        ({"token_budget": 32}, "token_budget must be at least max_batch"),
    ],
)
def test_fix_that_cannot_be_used_here_is_refused(fixed: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Space(PARAMS, CONSTRAINTS, site=fake.SITE, base=BASE, fixed=fixed)


def test_inactive_parameter_keeps_its_default() -> None:
    params = (
        Param(name="graphs", target="graphs", choices=(True, False)),
        Param(
            name="max_batch",
            target="scheduler.max_batch",
            choices=(8, 16),
            when=lambda s: bool(s["graphs"]),
        ),
    )
    space = Space(params, (), site=fake.SITE, base=BASE)
    without = [p for p in space.points if p[0] is False]
    assert without == [(False, SchedulerConfig().max_batch)]


def test_range_is_a_grid_without_repeats() -> None:
    assert Range(low=1, high=8, steps=4, log=True).values() == (1, 2, 4, 8)
    assert Range(low=1, high=2, steps=9).values() == (1, 2)
    assert Range(low=0, high=1, steps=3, integer=False).values() == (0.0, 0.5, 1.0)


def test_too_large_space_is_refused() -> None:
    params = [Param(name=f"p{i}", target="seed", choices=tuple(range(100))) for i in range(3)]
    with pytest.raises(ConfigError, match=r"1000000 combinations.*--fix"):
        Space(params, (), site=fake.SITE, base=BASE)
