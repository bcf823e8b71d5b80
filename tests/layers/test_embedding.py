"""A vocabulary that is split over ranks reads and scores like a whole one."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kllm.errors import ConfigError
from kllm.layers.embedding import VocabEmbedding, VocabHead
from kllm.parallel.communicator import Communicator
from kllm.parallel.single import SingleComm
from tests.parallel.threads import run_ranks
from tests.tolerances import TOLERANCE

VOCAB, DIM = 36, 16
RANKS = [1, 2, 3, 4]


def table(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(VOCAB, DIM, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("ranks", RANKS)
def test_every_rank_has_the_rows_of_all_tokens(ranks: int) -> None:
    """Each row comes from one rank and zeros from the others, so it is exact."""
    edges = {0, VOCAB - 1, *(r * VOCAB // ranks for r in range(ranks))}
    ids = torch.tensor([*sorted(edges), *(e - 1 for e in edges if e), 7, 7])

    def work(comm: Communicator) -> Tensor:
        layer = VocabEmbedding(VOCAB, DIM, comm)
        layer.weight.copy_(table().chunk(comm.size)[comm.rank])
        return layer(ids)

    for rows in run_ranks(ranks, work):
        assert torch.equal(rows, table()[ids])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 5])
@pytest.mark.parametrize("ranks", RANKS)
def test_every_rank_has_the_logits_of_all_tokens_in_order(
    ranks: int, num_rows: int, packed: bool
) -> None:
    x = torch.randn(num_rows, DIM, generator=torch.Generator().manual_seed(1)) / DIM**0.5

    def work(comm: Communicator) -> Tensor:
        head = VocabHead(DIM, VOCAB, comm)
        head.weight.copy_(table().chunk(comm.size)[comm.rank])
        if packed:
            head.pack()
        return head(x)

    tolerance = TOLERANCE[torch.float32]
    for logits in run_ranks(ranks, work):
        torch.testing.assert_close(logits, F.linear(x, table()), rtol=tolerance, atol=tolerance)


def test_logits_of_a_bfloat16_head_are_float32() -> None:
    head = VocabHead(DIM, VOCAB, SingleComm()).to(torch.bfloat16)
    head.weight.copy_(table(torch.bfloat16))
    assert head(torch.ones(2, DIM, dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize("layer", [VocabEmbedding, VocabHead])
def test_a_vocabulary_that_ranks_cannot_share_equally_is_refused(layer: type) -> None:
    class Five(SingleComm):
        size = 5

    sizes = (VOCAB, DIM) if layer is VocabEmbedding else (DIM, VOCAB)
    with pytest.raises(ConfigError, match="vocabulary = 36 cannot be split over 5 ranks"):
        layer(*sizes, Five())
