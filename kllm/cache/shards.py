"""Where context-parallel ranks keep a prompt's entries: the arithmetic of `Stripes` on tensors.

Everything here runs on the device from lengths that the host knows, so nothing waits for it.
"Entries" are those of one paged state, `ratio` tokens each; `stripes` counts in them.
"""

import torch
from torch import Tensor

from kllm.parallel.sequence import SequenceStep
from kllm.parallel.stripes import Stripes


def held_entries(
    stripes: Stripes, rank: int, first: int, last: int, device: torch.device
) -> Tensor:
    """[last - first] int64: which entries of a request are the first..last - 1 of a rank's."""
    return entry_ids(stripes, rank, torch.arange(first, last, device=device))


def entry_ids(stripes: Stripes, rank: int, local: Tensor) -> Tensor:
    """The entries of a request that stand at `local` among those that a rank holds."""
    half = local // stripes.tokens
    deal, second = half // 2, half % 2
    apart = 2 * (stripes.ranks - rank) - 1  # from the first to the second stripe of a deal
    stripe = deal * (2 * stripes.ranks) + rank + second * apart
    return stripe * stripes.tokens + local % stripes.tokens


def entry_ranks(stripes: Stripes, ids: Tensor) -> Tensor:
    """The rank that holds each entry."""
    stripe = ids // stripes.tokens % (2 * stripes.ranks)
    return torch.minimum(stripe, 2 * stripes.ranks - 1 - stripe)


def entry_places(stripes: Stripes, ids: Tensor) -> Tensor:
    """Where each entry stands among those that its rank holds: the inverse of `entry_ids`."""
    stripe = ids // stripes.tokens
    half = stripe // (2 * stripes.ranks) * 2 + (stripe % (2 * stripes.ranks) >= stripes.ranks)
    return half * stripes.tokens + ids % stripes.tokens


def page_slots(table: Tensor, places: Tensor, per_page: int) -> Tensor:
    """Slots int64 of places in a request's pages.

    Args:
        table: [max pages] the request's pages.
        places: [n] int64.
        per_page: entries a page.
    """
    return table[places // per_page].long() * per_page + places % per_page


def held_slots(
    step: SequenceStep, index: int, block_tables: Tensor, page_size: int, ratio: int
) -> Tensor:
    """Slots of all entries that this rank holds of a sharded piece's request.

    Args:
        index: of the piece.
        block_tables: [pieces, max pages] of this rank.
        page_size: tokens a page.
        ratio: tokens an entry.

    Returns:
        [n] int64, in the order of the entries.
    """
    piece, stripes = step.pieces[index], step.stripes.scaled(ratio)
    places = torch.arange(stripes.count(step.rank, piece.end // ratio), device=block_tables.device)
    if piece.owner == step.rank:  # whose pages have room for all, each at its position
        places = entry_ids(stripes, step.rank, places)
    return page_slots(block_tables[index], places, page_size // ratio)
