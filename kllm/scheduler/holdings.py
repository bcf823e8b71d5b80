"""Which pages the running requests hold, on every rank that shares their prompts.

Without context parallelism there is one rank. With it a request has an owner, where it decodes:
the owner's pages hold all its tokens. While its prompt is computed the other ranks hold pages as
well: for their stripes, or for all tokens where prompts are replicated.
"""

import numpy as np
from numpy.typing import NDArray

from kllm.cache.block_pool import BlockPool
from kllm.parallel.stripes import Stripes


class Holdings:
    """Page pools, one a rank, and the block tables of the requests by state row.

    Args:
        rows: requests at most.
        num_pages, page_size: of each rank's pool (tokens a page).
        max_pages: of one request.
        stripes: how prompts are dealt to ranks; None: there is one rank.
        sharded: whether a rank that does not own a prompt keeps its stripes only.
    """

    def __init__(
        self,
        rows: int,
        *,
        num_pages: int,
        page_size: int,
        max_pages: int,
        stripes: Stripes | None = None,
        sharded: bool = True,
    ) -> None:
        self.page_size = page_size
        self.stripes, self.sharded = stripes, sharded
        ranks = stripes.ranks if stripes else 1
        self.pools = [BlockPool(num_pages) for _ in range(ranks)]
        self.tables = np.zeros((ranks, rows, max_pages), np.int32)
        self.counts = np.zeros((ranks, rows), np.int32)
        self.owners = np.zeros(rows, np.int32)
        self._owned = np.zeros(ranks, np.int64)  # running requests by owner

    @property
    def free(self) -> NDArray[np.int64]:
        """[ranks] pages that nobody holds."""
        return np.array([pool.free for pool in self.pools], np.int64)

    def need(self, tokens: int, owner: int) -> NDArray[np.int64]:
        """[ranks] pages that a prompt of so many tokens takes."""
        if self.sharded and self.stripes is not None:
            held = [self.stripes.count(rank, tokens) for rank in range(len(self.pools))]
            held[owner] = tokens
        else:
            held = [tokens] * len(self.pools)
        return -(-np.array(held, np.int64) // self.page_size)

    def owner_for(
        self,
        tokens: int,
        *,
        gained: NDArray[np.int64] | None = None,
        leaving: NDArray[np.int64] | None = None,
    ) -> int | None:
        """The rank with the most free pages if the prompt fits with it as its owner, else None.

        Args:
            gained, leaving: [ranks] pages and owned requests that would be given up for it.
        """
        free, owned = self.free, self._owned
        if gained is not None and leaving is not None:
            free, owned = free + gained, owned - leaving
        # One page of each request stays free on its owner: it will ask for it within a page of
        # steps, and admitting into that page would preempt somebody soon.
        room = free - owned
        owner = int(room.argmax())
        return owner if (self.need(tokens, owner) <= room).all() else None

    def take(self, row: int, tokens: int, owner: int) -> None:
        """Give a request pages for a prompt of so many tokens."""
        self.owners[row] = owner
        self._owned[owner] += 1
        for rank, count in enumerate(self.need(tokens, owner).tolist()):
            self.tables[rank, row, :count] = self.pools[rank].take(count)
            self.counts[rank, row] = count

    def settle(self, row: int) -> None:
        """The prompt is computed: only the owner keeps its pages."""
        for rank in range(len(self.pools)):
            if rank != self.owners[row]:
                self._give(rank, row)

    def release(self, row: int) -> None:
        """Take back all that a request holds."""
        self._owned[self.owners[row]] -= 1
        for rank in range(len(self.pools)):
            self._give(rank, row)

    def _give(self, rank: int, row: int) -> None:
        self.pools[rank].give(self.held(rank, row))
        self.counts[rank, row] = 0

    def held(self, rank: int, row: int) -> NDArray[np.int32]:
        """The pages of a request on a rank."""
        return self.tables[rank, row, : self.counts[rank, row]]

    def held_by(self, row: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """[ranks] pages that a request holds, and [ranks] one for its owner."""
        mine = np.zeros(len(self.pools), np.int64)
        mine[self.owners[row]] = 1
        return self.counts[:, row].astype(np.int64), mine

    def short(self, rows: NDArray[np.int32], known: NDArray[np.int32]) -> NDArray[np.int32]:
        """Those of `rows` whose owner has no page for all their known tokens."""
        return rows[known > self.counts[self.owners[rows], rows] * self.page_size]

    def lack(self, rows: NDArray[np.int32]) -> bool:
        """Whether the owners of `rows` have no page for each of them."""
        wanted = np.bincount(self.owners[rows], minlength=len(self.pools))
        return bool((wanted > self.free).any())

    def grow(self, rows: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Give each of `rows` one more page on its owner: (its column, the page) of each."""
        owners = self.owners[rows]
        columns = self.counts[owners, rows]
        pages = np.empty(len(rows), np.int32)
        for rank, pool in enumerate(self.pools):
            here = owners == rank
            pages[here] = pool.take(int(here.sum()))
        self.tables[owners, rows, columns] = pages
        self.counts[owners, rows] += 1
        return columns, pages

    def width(self, rows: NDArray[np.int32]) -> int:
        """Pages of the longest of `rows`, on any rank."""
        return int(self.counts[:, rows].max())

    def owner_tables(self, rows: NDArray[np.int32], width: int) -> NDArray[np.int32]:
        """[B, width] block tables on the owners."""
        return self.tables[self.owners[rows], rows, :width]

    def check(self, rows: list[int]) -> None:
        """Raise AssertionError unless the pools hold exactly what these rows do not."""
        for rank, pool in enumerate(self.pools):
            held = [self.held(rank, row) for row in rows]
            pages = np.concatenate(held) if held else np.zeros(0, np.int32)
            assert len(np.unique(pages)) == len(pages) == pool.used
