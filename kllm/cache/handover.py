"""Bringing a prompt's entries to the rank that decodes the request, after a shared prefill.

While a prompt is spread over a group, each rank keeps the entries of its own stripes. When it is
done, the others send theirs to the owner, which has a place for every entry; from then on
the request is like any that the owner ran alone. What is sent is what is stored, so fp8 entries
stay as they are.
"""

import torch
from torch import Tensor

from kllm.cache.pool import KVPool
from kllm.cache.shards import held_entries, held_slots, page_slots
from kllm.parallel.communicator import Communicator
from kllm.parallel.sequence import SequenceStep


def hand_over(pool: KVPool, comm: Communicator, step: SequenceStep, block_tables: Tensor) -> None:
    """Send the entries of the step's finished prompts to their owners, and write those received.

    Called on all ranks of the group, once their forward pass is queued; nothing to do where all
    ranks keep all entries. Layers go one by one: beside the pool there is only what one layer of
    one state sends and receives.

    Args:
        block_tables: [pieces, max pages] of this rank, on the pool's device.
    """
    ends = [i for i, piece in enumerate(step.pieces) if piece.ends]
    if not step.sharded or not ends or comm.size == 1:
        return
    for state in pool.spec.paged:
        ratio = state.tokens_per_entry
        sent = _sent(step, ends, ratio)
        if not any(map(sum, sent)):
            continue
        source = _source_slots(pool, step, ends, block_tables, ratio)
        target = _target_slots(pool, step, ends, block_tables, ratio)
        arriving = [counts[step.rank] for counts in sent]
        for layer in state.layers:
            pages = pool.pages(state.name, layer)
            flat = pages.view(-1, *pages.shape[2:])
            leaving = flat.index_select(0, source)
            received = leaving.new_empty(len(target), *flat.shape[1:])
            comm.all_to_all(received, leaving, arriving, sent[step.rank]).wait()
            flat.index_copy_(0, target, received)


def _sent(step: SequenceStep, ends: list[int], ratio: int) -> list[list[int]]:
    """[rank][owner]: entries that a rank sends to an owner, none to itself."""
    stripes = step.stripes.scaled(ratio)
    counts = [[0] * stripes.ranks for _ in range(stripes.ranks)]
    for rank in range(stripes.ranks):
        for piece in (step.pieces[i] for i in ends):
            if piece.owner != rank:
                counts[rank][piece.owner] += stripes.count(rank, piece.end // ratio)
    return counts


def _source_slots(
    pool: KVPool, step: SequenceStep, ends: list[int], block_tables: Tensor, ratio: int
) -> Tensor:
    """Slots of what this rank sends, by owner and then by piece."""
    others = [i for i in ends if step.pieces[i].owner != step.rank]
    order = sorted(others, key=lambda i: step.pieces[i].owner)
    return _join(
        [held_slots(step, i, block_tables, pool.page_size, ratio) for i in order], block_tables
    )


def _target_slots(
    pool: KVPool, step: SequenceStep, ends: list[int], block_tables: Tensor, ratio: int
) -> Tensor:
    """Where what this rank receives goes, by sender and then by piece."""
    stripes, per_page = step.stripes.scaled(ratio), pool.page_size // ratio
    own = [i for i in ends if step.pieces[i].owner == step.rank]
    parts = []
    for rank in range(stripes.ranks):
        for i in own if rank != step.rank else ():
            count = stripes.count(rank, step.pieces[i].end // ratio)
            ids = held_entries(stripes, rank, 0, count, block_tables.device)
            parts.append(page_slots(block_tables[i], ids, per_page))
    return _join(parts, block_tables)


def _join(parts: list[Tensor], block_tables: Tensor) -> Tensor:
    none = torch.zeros(0, dtype=torch.int64, device=block_tables.device)
    return torch.cat([none, *parts])
