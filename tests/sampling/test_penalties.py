"""Penalties agree with a loop over tokens, also while outputs grow."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kllm.core import Request, SamplingParams
from kllm.sampling.penalties import Penalties, penalised
from tests.sampling.exact import penalise

CPU = torch.device("cpu")
VOCAB = 12
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=8)
PARAMS = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.7]),
    presence_penalty=st.sampled_from([0.0, 0.6, -0.3]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.1]),
)
REQUEST = st.tuples(PARAMS, TOKENS, TOKENS, TOKENS)


@settings(max_examples=100, deadline=None)
@given(st.lists(REQUEST, min_size=1, max_size=4), st.integers(0, 1 << 30))
def test_penalties_match_a_loop_while_outputs_grow(
    rows: list[tuple[SamplingParams, list[int], list[int], list[int]]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    requests = [
        Request(id=str(i), prompt_ids=prompt, params=params, output_ids=list(output))
        for i, (params, prompt, output, _) in enumerate(rows)
    ]
    penalties = Penalties(requests, VOCAB, CPU)
    for _ in range(2):
        logits = torch.randn(len(rows), VOCAB, generator=generator)
        got = penalties.apply(logits)
        for i, r in enumerate(requests):
            want = penalise(logits[i].tolist(), r.params, list(r.prompt_ids), r.output_ids)
            torch.testing.assert_close(got[i], torch.tensor(want), rtol=1e-5, atol=1e-5)
        for r, (_, _, _, more) in zip(requests, rows, strict=True):
            r.output_ids += more


def test_rows_without_penalties_come_back_bit_for_bit() -> None:
    plain = Request(id="a", prompt_ids=[1], params=SamplingParams(), output_ids=[2])
    other = Request(id="b", prompt_ids=[1], params=SamplingParams(presence_penalty=1.0))
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[0, 3] = -torch.inf
    got = Penalties([plain, other], VOCAB, CPU).apply(logits)
    assert torch.equal(got, logits)  # the second has no output yet


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ({}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
    ],
)
def test_any_penalty_counts(setting: dict[str, float], expected: bool) -> None:
    assert penalised(SamplingParams(**setting)) is expected
