"""The distribution a request is drawn from, one token at a time in float64."""

import math

from kllm.core import SamplingParams


def probabilities(logits: list[float], params: SamplingParams) -> list[float]:
    """Temperature, then top-k, top-p and min-p, each on what the one before left."""
    warm = [x / params.temperature for x in logits]
    order = sorted(range(len(warm)), key=lambda i: -warm[i])  # stable: ties by id
    kept = order[: params.top_k or None]
    weight = {i: math.exp(warm[i] - warm[order[0]]) for i in kept}
    total = sum(weight.values())
    before = 0.0
    nucleus = []
    for i in kept:
        if before >= params.top_p:
            break
        nucleus.append(i)
        before += weight[i] / total
    final = {i: weight[i] for i in nucleus if weight[i] >= params.min_p}  # the likeliest weighs 1
    total = sum(final.values())
    return [final.get(i, 0.0) / total for i in range(len(logits))]


def penalise(
    logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]
) -> list[float]:
    """Repetition over prompt and output, then presence and frequency over the output."""
    result = []
    for token, logit in enumerate(logits):
        x = logit
        if token in prompt or token in output:
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        if token in output:
            x -= params.presence_penalty
        result.append(x - params.frequency_penalty * output.count(token))
    return result
