"""All ranks of a stage are told the same of a step, so that they meet in the same exchanges."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kllm.config import ParallelConfig
from kllm.core import Plan
from kllm.engine.step import MicroStep, steps_of
from kllm.parallel.sequence import local_plan
from kllm.parallel.stripes import Stripes
from tests.scheduler.test_microbatch import plans


def told(step: MicroStep) -> tuple[tuple[int, ...], bool, int]:
    """What decides which exchanges, which graph and which sizes a rank uses."""
    return step.peer_tokens, step.decode_only, step.width


def newest_tokens_only(plan: Plan) -> bool:
    return bool((plan.query_lens == 1).all() and plan.samples.all())


@given(
    st.lists(st.one_of(st.none(), plans()), min_size=1, max_size=4).filter(any),
    st.integers(1, 3),
    st.integers(1, 2),
)
def test_groups_agree_on_a_step_whatever_each_of_them_runs(
    groups: list[Plan | None], pp: int, tp: int
) -> None:
    steps = steps_of(groups, ParallelConfig(dp=len(groups), pp=pp, tp=tp), None)
    for row in zip(*steps, strict=True):
        (peers, decode_only, width), *others = map(told, row)
        assert others == [(peers, decode_only, width)] * (len(groups) - 1)
        parts = [step.plan for step in row]
        tokens = [1 if part is None else part.num_tokens for part in parts]
        assert list(peers) == np.repeat(tokens, tp).tolist()
        busy = [part for part in parts if part is not None]
        assert not decode_only or all(map(newest_tokens_only, busy))
        assert width == max(part.block_tables.shape[1] for part in busy)


@given(plans(cp=3))
def test_ranks_that_share_prompts_run_the_tokens_that_others_expect(plan: Plan) -> None:
    stripes = Stripes(3, 4)
    ((step,),) = steps_of([plan], ParallelConfig(cp=3), stripes)
    ran = [
        local_plan(plan, stripes, rank, kind="ring", scratch_page=0, scratch_row=0).plan.num_tokens
        for rank in range(3)
    ]
    assert list(step.peer_tokens) == ran
