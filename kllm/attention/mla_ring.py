"""MLA over a ring: latents travel, in the form they are cached in (see `kllm.attention.ring`).

All heads of a rank attend to a block of latents before the next one is theirs. In the expanded
form a rank makes keys and values of every block itself, which saves sending them and costs each
rank of the group the same products: it pays for many queries a rank. Selected entries (DSA) are
attended to in the absorbed form, in each block those that lie there.

What a ring over selected entries cannot save: with every block a row's queries are read again, and
its softmax state is read and written (`kllm.kernels.sparse_block_triton`). For 64 heads of 512 + 64
channels in bfloat16 that are 74 KB and 263 KB a row and block, beside the 1152 bytes of each entry;
of 2048 entries on 8 ranks, 2.7 MB a row in addition to 2.4 MB, of which all but the queries' first
reading is the ring's. Where a link gathers all entries in less time than that takes, it is faster.
"""

from dataclasses import dataclass

from torch import Tensor

from kllm.attention.context import ForwardContext
from kllm.attention.latent import LatentHeads, LatentSoftmax, expanding_pays
from kllm.attention.ring import ShardedPiece, Shards, find_shards, travelling, unpack_part
from kllm.attention.ring_selection import ListedEntries, list_entries
from kllm.attention.workspace import Rows

LISTED = "listed selection"  # in a step's shared values


@dataclass(frozen=True, slots=True)
class _Job:
    """One piece's queries and what they have taken in."""

    piece: ShardedPiece
    softmax: LatentSoftmax
    dense: int  # rows that attend to all they see; the others, behind them, have selected
    listed: ListedEntries | None  # of these others

    def add(self, source: int, entries: Tensor) -> None:
        """Take in the entries [s, R + rope] of one rank."""
        spans = self.piece.spans[source]
        self.softmax.add(entries, [span for span in spans if span.rows.start < self.dense])
        if self.listed is not None and spans:
            rows = slice(self.dense, self.piece.rows.stop - self.piece.rows.start)
            bounds = self.listed.bounds(source)
            self.softmax.add_selected(rows, entries, self.listed.places, bounds)


def attend_travelling_latents(
    ctx: ForwardContext,
    layer: int,
    name: str,
    q: Tensor,
    heads: LatentHeads,
    chosen: tuple[Tensor | None, ...],
    out: Rows,
) -> None:
    """Attention of the step's prompts while latents travel; fills their rows of `out`.

    Called on all ranks of the group; the step's entries are in their pages already.

    Args:
        name: the paged state of the latents.
        q: [T, H, N + rope].
        chosen: of each of the step's prompts, as in `mla.Selection`.
        out: [T, H, V].
    """
    shards = find_shards(ctx, 1)
    jobs = []
    for piece, listed in zip(shards.pieces, _list_pieces(ctx, shards, chosen), strict=True):
        if piece.runs:
            expanded = listed is None and expanding_pays(heads, piece.runs, piece.end)
            softmax = LatentSoftmax(heads, q[piece.rows], expanded)
            rows = piece.rows.stop - piece.rows.start
            dense = rows if listed is None else rows - len(listed.places)
            jobs.append(_Job(piece, softmax, dense, listed))
    for source, block in travelling(ctx, name, layer, shards):
        for job in jobs:
            part = block[job.piece.parts[source]]
            if len(part):
                job.add(source, unpack_part(ctx.pool, name, part).squeeze(1))
    for job in jobs:
        out.put(job.piece.rows, job.softmax.finish())


def _list_pieces(
    ctx: ForwardContext, shards: Shards, chosen: tuple[Tensor | None, ...]
) -> list[ListedEntries | None]:
    """What each piece's last chunks have selected, the first that see more than they may select.

    Worked out once for the layers that share a selection.
    """
    known = ctx.shared.get(LISTED)
    if known is None or known[0] is not chosen:
        ids = iter(chosen)  # of pieces that this rank has tokens of
        own = [next(ids) if piece.runs else None for piece in shards.pieces]
        found = [None if some is None else list_entries(ctx, shards, some) for some in own]
        known = ctx.shared[LISTED] = (chosen, found)
    result: list[ListedEntries | None] = known[1]
    return result
