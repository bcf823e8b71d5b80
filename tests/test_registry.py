"""Registries answer a typing error with the known names."""

import pytest

from kllm.errors import ConfigError
from kllm.registry import Registry


def test_unknown_name_lists_the_known_ones() -> None:
    registry = Registry("attention backend", {"torch": 1, "flashinfer": 2})
    with pytest.raises(ConfigError, match="unknown attention backend 'fa9'; known: flashinfer, t"):
        registry["fa9"]


def test_registry_is_a_mapping() -> None:
    registry = Registry("bench", {"latency": 1})
    assert registry["latency"] == 1
    assert list(registry) == ["latency"]
    assert "latency" in registry
    assert "throughput" not in registry
