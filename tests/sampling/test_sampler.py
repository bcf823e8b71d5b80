"""Tokens follow the stated distribution, and depend on nothing but their request."""

import math
from collections import Counter

import pytest
import torch

from kllm.core import Request, SamplingParams
from kllm.sampling import sampler as module
from kllm.sampling.sampler import Sampler, work_bytes
from tests.sampling.exact import penalise, probabilities

CPU = torch.device("cpu")
DRAWS = 20_000
# Ties, a steep head and a flat tail; the masses are far from the thresholds below.
LOGITS = [2.0, -1.0, 0.5, 0.5, 1.2, -3.0, 0.0, -0.4, 1.9, -8.0]


def request(params: SamplingParams, *, name: str = "r", output: int = 0) -> Request:
    return Request(id=name, prompt_ids=[1, 2], params=params, output_ids=[3] * output)


def seeded_logits(rows: int, vocab: int) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(5)) * 3


FILTERS = {
    "temperature 1": {},
    "temperature 0.5": {"temperature": 0.5},
    "temperature 2": {"temperature": 2.0},
    "top-k": {"top_k": 3},
    "top-k cuts a tie": {"top_k": 4},
    "top-k above the vocabulary": {"top_k": 99},
    "top-p": {"top_p": 0.7},
    "top-p below the likeliest": {"top_p": 0.01},
    "min-p": {"min_p": 0.2},
    "top-k and top-p": {"top_k": 4, "top_p": 0.8},
    "all": {"temperature": 1.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1},
    "penalties and top-p": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "top_p": 0.9,
    },
}


@pytest.mark.parametrize("stream", ["one stream", "many streams"])
@pytest.mark.parametrize("name", FILTERS)
def test_frequencies_are_the_exact_probabilities(name: str, stream: str) -> None:
    """Along one request's output, and over requests that differ in their ids alone."""
    one = stream == "one stream"
    params = SamplingParams(**FILTERS[name], seed=11 if one else None)
    output = [3, 3, 8]
    batch = tuple(
        Request(
            id=str(i),
            prompt_ids=[0, 4],
            params=params,
            output_ids=_Longer(output, extra=i if one else 0),
        )
        for i in range(DRAWS)
    )
    logits = torch.tensor(LOGITS).expand(DRAWS, -1)
    drawn = Counter(Sampler(0, CPU)(logits, batch)[0].tolist())
    exact = probabilities(penalise(LOGITS, params, [0, 4], output), params)
    for token, p in enumerate(exact):
        error = math.sqrt(p * (1 - p) / DRAWS)
        assert abs(drawn[token] / DRAWS - p) <= 5 * error, (token, drawn[token] / DRAWS, p)


class _Longer(list[int]):
    """An output at a later place, without the tokens in between: penalties see the rest."""

    def __init__(self, tokens: list[int], extra: int) -> None:
        super().__init__(tokens)
        self.extra = extra

    def __len__(self) -> int:
        return super().__len__() + self.extra


def test_one_request_draws_independently_from_place_to_place() -> None:
    """Pairs of neighbouring tokens of one stream have the product of their probabilities."""
    params = SamplingParams(seed=3)
    batch = tuple(
        Request(id="r", prompt_ids=[1], params=params, output_ids=_Longer([], extra=i))
        for i in range(DRAWS)
    )
    logits = torch.tensor([0.0, math.log(2.0)]).expand(DRAWS, -1)
    tokens = Sampler(0, CPU)(logits, batch)[0].tolist()
    pairs = Counter(zip(tokens[::2], tokens[1::2], strict=True))
    for (a, b), count in pairs.items():
        p = (1 + a) / 3 * (1 + b) / 3
        assert abs(count / (DRAWS / 2) - p) <= 5 * math.sqrt(p * (1 - p) / (DRAWS / 2))


def test_a_seeded_request_draws_the_same_alone_and_in_any_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = SamplingParams(seed=42, temperature=1.3, top_p=0.95)
    logits = seeded_logits(9, 50)
    kinds = [{}, {"temperature": 0.0}, {"top_k": 5}, {"presence_penalty": 1.0}]
    others = [request(SamplingParams(**kinds[i % 4]), name=f"o{i}", output=i) for i in range(8)]
    for place in range(20):
        mine = request(params, output=place)
        alone = Sampler(0, CPU)(logits[:1], (mine,))[0].item()
        monkeypatch.setattr(module, "AT_ONCE", 1 << 22)
        for where in (0, 4, 8):
            batch = (*others[:where], mine, *others[where:])
            rows = torch.cat([logits[1 : 1 + where], logits[:1], logits[1 + where :]])
            assert Sampler(7, CPU)(rows, batch)[0][where].item() == alone
        monkeypatch.setattr(module, "AT_ONCE", 1)  # one row at a time
        assert Sampler(7, CPU)(rows, batch)[0][where].item() == alone


def test_unseeded_requests_differ_by_engine_seed_and_by_id() -> None:
    logits = torch.zeros(1, 1 << 20)
    draws = {
        Sampler(seed, CPU)(logits, (request(SamplingParams(), name=name),))[0].item()
        for seed in (0, 1)
        for name in ("a", "b")
    }
    again = Sampler(1, CPU)(logits, (request(SamplingParams(), name="b"),))[0].item()
    assert len(draws) == 4
    assert again in draws


@pytest.mark.parametrize(
    "greedy", [{"temperature": 0.0}, {"top_k": 1}, {"temperature": 1e-45}, {"temperature": 1e-5}]
)
def test_greedy_is_argmax(greedy: dict[str, float]) -> None:
    logits = seeded_logits(40, 300)
    batch = tuple(request(SamplingParams(**greedy), name=str(i)) for i in range(40))
    tokens, logprobs = Sampler(0, CPU)(logits, batch)
    assert torch.equal(tokens, logits.argmax(dim=-1))
    assert tokens.dtype == torch.int64
    assert logprobs is None


def test_a_changed_batch_is_noticed() -> None:
    logits = seeded_logits(1, 300)
    sampler = Sampler(0, CPU)
    for params in (SamplingParams(temperature=0), SamplingParams(seed=1), SamplingParams(seed=2)):
        mine = (request(params),)
        fresh = Sampler(0, CPU)(logits, mine)[0]
        assert torch.equal(sampler(logits, mine)[0], fresh)


def test_tokens_without_mass_are_never_drawn() -> None:
    """Also at the very ends of the uniform numbers, where rounding could reach past the mass."""
    mass = torch.tensor([[0.0, 0.1, 0.2, 0.7, 0.0, 0.0]], dtype=torch.float64).expand(2, -1)
    ends = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    assert module._invert(mass, ends).tolist() == [1, 3]


def test_logits_are_left_as_they_were() -> None:
    logits = seeded_logits(2, 20)
    before = logits.clone()
    params = SamplingParams(repetition_penalty=2.0, top_k=4, logprobs=2)
    Sampler(0, CPU)(logits, tuple(request(params, name=str(i), output=1) for i in range(2)))
    assert torch.equal(logits, before)


def test_logprobs_are_of_the_models_own_distribution() -> None:
    """Before penalties, temperature and filters; only for requests that ask."""
    logits = seeded_logits(3, 30)
    params = [
        SamplingParams(logprobs=3, temperature=0.3, top_k=2, presence_penalty=2.0, seed=1),
        SamplingParams(temperature=0.0),
        SamplingParams(logprobs=0, seed=2),
    ]
    batch = tuple(request(p, output=2) for p in params)
    tokens, logprobs = Sampler(0, CPU)(logits, batch)
    assert logprobs is not None
    first, second, third = logprobs
    exact = torch.log_softmax(logits.double(), dim=-1)
    assert second is None
    assert first is not None
    assert third is not None
    for row, entry in ((0, first), (2, third)):
        assert entry.token_id == tokens[row].item()
        assert entry.logprob == pytest.approx(exact[row, entry.token_id].item(), abs=1e-5)
    best = exact[0].topk(3)
    assert [token for token, _ in first.top] == best.indices.tolist()
    assert [value for _, value in first.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert third.top == ()


def test_memory_for_sampling_grows_with_logits_and_bounds_the_float64_part() -> None:
    assert work_bytes(1, 1000) == 84 * 1000
    many, twice = work_bytes(10_000, 1000), work_bytes(20_000, 1000)
    assert twice - many == 24 * 10_000 * 1000
