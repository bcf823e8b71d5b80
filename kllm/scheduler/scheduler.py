"""One step's choice: which requests run how many tokens, under a token and a KV budget.

Continuous batching with chunked prefill. Every request that decodes runs one token; what is
left of the token budget goes to prompts in order of priority and arrival, in chunks. A very long
prompt takes only half of what is left where others of its priority want the rest, so that short
ones do not wait for all of it. A request is admitted only with the pages of all its known tokens
in hand, so prompts never wait for each other half filled. When decoding requests need pages that
are not there, the youngest ones of the lowest priority are preempted and later recomputed from
their known tokens. The oldest request can always go on, because no request may be longer than the
whole pool.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from kllm.cache.block_pool import BlockPool
from kllm.config import SchedulerConfig
from kllm.core import FinishReason, Plan, Request, Status
from kllm.errors import ConfigError
from kllm.parallel.stripes import Stripes
from kllm.scheduler.batch import RunningBatch
from kllm.scheduler.holdings import Holdings

LONG_STEPS = 8  # a prompt that is not done after so many steps does not take them whole
WIDTH_STEP = 8  # block tables grow in steps of this many pages, so that shapes repeat


def _rank(request: Request) -> tuple[int, int]:
    return request.priority, request.order


class Scheduler:
    """Holds every unfinished request; makes plans and takes their outcomes.

    Args:
        num_pages, page_size: the KV pool (tokens a page).
        max_model_len: tokens that one request may hold; at most the whole pool.
        eos_token_ids: tokens that end a request unless it ignores them.
        stripes, sharded: how prompts are dealt to context-parallel ranks (`Holdings`); the pool is
            then that of each rank.

    Raises:
        ConfigError: when the token budget is too small for every running request to decode.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        num_pages: int,
        page_size: int,
        max_model_len: int,
        eos_token_ids: Iterable[int] = (),
        stripes: Stripes | None = None,
        sharded: bool = True,
    ) -> None:
        if config.token_budget < config.max_batch:
            raise ConfigError(
                f"token_budget {config.token_budget} is smaller than max_batch "
                f"{config.max_batch}: a step could not run one token of each request; "
                "raise the one or lower the other"
            )
        assert max_model_len <= num_pages * page_size
        self.config = config
        self.page_size = page_size
        self.max_model_len = max_model_len
        self.holdings = Holdings(
            config.max_batch,
            num_pages=num_pages,
            page_size=page_size,
            max_pages=-(-max_model_len // page_size),
            stripes=stripes,
            sharded=sharded,
        )
        self.rows = BlockPool(config.max_batch)
        self.waiting: list[Request] = []  # sorted by rank
        self.prefilling: list[Request] = []  # sorted by rank
        self.decoding: list[Request] = []
        self._eos = np.array(sorted(eos_token_ids), np.int64)
        self._batch = RunningBatch.empty(config.max_batch)
        self._tokens: dict[int, NDArray[np.int64]] = {}  # row -> known tokens, while prefilling
        self._decodes = _DecodeRows()
        self._steps = 0
        self._arrivals = 0

    @property
    def num_running(self) -> int:
        """Requests that hold KV."""
        return len(self.prefilling) + len(self.decoding)

    @property
    def free_pages(self) -> int:
        """KV pages that no request holds."""
        return int(self.holdings.free.sum())

    @property
    def num_requests(self) -> int:
        """Requests that wait or run."""
        return self.num_running + len(self.waiting)

    @property
    def load_tokens(self) -> int:
        """Tokens that wait to be computed plus tokens whose KV is or will be held."""
        rows = [request.row for request in self.prefilling]
        todo = int((self._batch.known[rows] - self._batch.computed[rows]).sum())
        held = int(self._batch.known[rows].sum())
        held += int(self._batch.known[self._decodes.rows(self.decoding)].sum())
        waiting = sum(request.num_tokens for request in self.waiting)
        return todo + held + 2 * waiting

    def add(self, request: Request) -> None:
        """Queue a request behind those of its priority that came before.

        Raises:
            ConfigError: when its prompt leaves no room for a single output token.
        """
        length = len(request.prompt_ids)
        if length == 0:
            raise ConfigError("the prompt is empty; give at least one token")
        if length >= self.max_model_len:
            raise ConfigError(
                f"the prompt has {length} tokens and this engine holds {self.max_model_len} "
                "tokens a request, output included; shorten it or raise max_model_len or the "
                "KV memory"
            )
        request.order = self._arrivals
        self._arrivals += 1
        insort(self.waiting, request, key=_rank)

    def abort(self, request: Request) -> None:
        """End an unfinished request now, wherever it stands, and free what it holds."""
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        elif request.status is Status.RUNNING:
            self._release(request)
        self._end(request, FinishReason.ABORT)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a running request."""
        self._release(request)
        self._end(request, reason)

    def schedule(self) -> Plan | None:
        """The next step, or None when nothing can run."""
        self._make_room_for_decodes()
        self._yield_to_priority()
        chunks = self._chunks(self.config.token_budget - len(self.decoding))
        if not chunks and not self.decoding:
            return None
        self._steps += 1
        return self._plan(chunks)

    def update(self, plan: Plan, token_ids: NDArray[np.int64]) -> list[Request]:
        """Advance the plan's requests by what ran and by the sampled tokens.

        Args:
            token_ids: [S] one for each request with `plan.samples`, in order.

        Returns:
            Requests that reached their end, already released.
        """
        batch = self._batch
        batch.computed[plan.rows] = plan.context_lens
        sampled = plan.rows if plan.samples.all() else plan.rows[plan.samples]
        batch.last_token[sampled] = token_ids
        batch.known[sampled] += 1
        requests = plan.requests
        if len(sampled) < len(requests):
            requests = tuple(r for r, yes in zip(requests, plan.samples, strict=True) if yes)
        for request, token in zip(requests, token_ids.tolist(), strict=True):
            request.output_ids.append(token)
        self._promote(plan)
        full = batch.known[sampled] >= batch.limit[sampled]
        # Compared one by one: few tokens end a text, and `np.isin` sorts.
        stops = batch.stops_at_eos[sampled] & (token_ids[:, None] == self._eos).any(axis=1)
        finished = []
        for i in np.flatnonzero(full | stops).tolist():
            self.finish(requests[i], FinishReason.STOP if stops[i] else FinishReason.LENGTH)
            finished.append(requests[i])
        return finished

    def limit(self, request: Request) -> int:
        """Tokens, prompt included, at which a request ends."""
        return min(len(request.prompt_ids) + request.params.max_tokens, self.max_model_len)

    def check(self) -> None:
        """Raise AssertionError where the books do not balance (debug mode, tests)."""
        running = self.prefilling + self.decoding
        rows = [request.row for request in running]
        assert len(set(rows)) == len(rows) == self.rows.used
        self.holdings.check(rows)
        for request in running:
            pages = self.holdings.counts[self.holdings.owners[request.row], request.row]
            assert self._batch.computed[request.row] <= pages * self.page_size
            assert self._batch.known[request.row] == request.num_tokens

    def _owner(self, request: Request) -> int | None:
        """Where a waiting request would be kept if it can enter now, else None."""
        return self.holdings.owner_for(request.num_tokens) if self.rows.free else None

    def _admit(self, request: Request, owner: int) -> None:
        batch = self._batch
        row = request.row = int(self.rows.take(1)[0])
        tokens = request.num_tokens
        self.holdings.take(row, tokens, owner)
        batch.computed[row] = 0
        batch.known[row] = tokens
        batch.limit[row] = self.limit(request)
        batch.stops_at_eos[row] = not request.params.ignore_eos
        known = np.empty(tokens, np.int64)
        known[: len(request.prompt_ids)] = request.prompt_ids
        known[len(request.prompt_ids) :] = request.output_ids
        self._tokens[row] = known
        request.status = Status.RUNNING
        insort(self.prefilling, request, key=_rank)

    def _chunks(self, budget: int) -> list[tuple[Request, int]]:
        """Prompts of this step and how many of their tokens run; those that wait may enter."""
        chunks: list[tuple[Request, int]] = []
        running = deque(self.prefilling)
        while budget > 0 and (request := self._next_prompt(running)) is not None:
            if chunks and request.priority > chunks[-1][0].priority:
                budget = self._fill_up(chunks, budget)
            left = self._left(request)
            shares = left > LONG_STEPS * self.config.token_budget
            size = min(left, -(-budget // 2) if shares else budget)
            if size:
                chunks.append((request, size))
            budget -= size
        self._fill_up(chunks, budget)
        return chunks

    def _next_prompt(self, running: deque[Request]) -> Request | None:
        """The first of `running`, taken from it, or the first that waits if that ranks higher."""
        if self.waiting and not (running and _rank(running[0]) < _rank(self.waiting[0])):
            owner = self._owner(self.waiting[0])
            if owner is not None:
                request = self.waiting.pop(0)
                self._admit(request, owner)
                return request
        return running.popleft() if running else None

    def _fill_up(self, chunks: list[tuple[Request, int]], budget: int) -> int:
        """Give prompts that share what nobody took; how much is left even so."""
        for i, (request, size) in enumerate(chunks):
            more = min(budget, self._left(request) - size)
            chunks[i] = request, size + more
            budget -= more
        return budget

    def _left(self, request: Request) -> int:
        """Tokens of a prompt that have not been computed."""
        return int(self._batch.known[request.row] - self._batch.computed[request.row])

    def _make_room_for_decodes(self) -> None:
        """Give a page to each decoding request that needs one, preempting if none is left."""
        short = self._short_of_pages()
        while len(short) and self.holdings.lack(short):
            self._preempt(max(self.prefilling + self.decoding, key=_rank))
            short = self._short_of_pages()
        if len(short):
            columns, pages = self.holdings.grow(short)
            self._decodes.set_pages(short, columns, pages)

    def _short_of_pages(self) -> NDArray[np.int32]:
        rows = self._decodes.rows(self.decoding)
        return self.holdings.short(rows, self._batch.known[rows])

    def _yield_to_priority(self) -> None:
        """Preempt the fewest requests of strictly lower priority that let the first one enter.

        None at all where that would not be enough: they would lose their KV for nothing.
        """
        if not self.waiting or self._owner(self.waiting[0]) is not None:
            return
        first = self.waiting[0]
        lower = [r for r in self.prefilling + self.decoding if r.priority > first.priority]
        victims: list[Request] = []
        gained = np.zeros(len(self.holdings.pools), np.int64)
        leaving = np.zeros_like(gained)
        for request in sorted(lower, key=_rank, reverse=True):
            victims.append(request)
            pages, owned = self.holdings.held_by(request.row)
            gained, leaving = gained + pages, leaving + owned
            tokens = first.num_tokens
            if self.holdings.owner_for(tokens, gained=gained, leaving=leaving) is not None:
                for victim in victims:
                    self._preempt(victim)
                return

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.status = Status.WAITING
        request.preemptions += 1
        insort(self.waiting, request, key=_rank)

    def _release(self, request: Request) -> None:
        row = request.row
        self.holdings.release(row)
        self.rows.give(np.array([row], np.int32))
        if self._tokens.pop(row, None) is not None:
            self.prefilling.remove(request)
        else:
            self.decoding.remove(request)
            self._decodes.dirty = True
        request.row = -1

    def _end(self, request: Request, reason: FinishReason) -> None:
        request.status = Status.FINISHED
        request.finish_reason = reason

    def _promote(self, plan: Plan) -> None:
        """Move requests whose prompt has been computed to those that decode."""
        first = self._decodes_in(plan)
        for request, sampled in zip(plan.requests[first:], plan.samples[first:], strict=True):
            if sampled:
                del self._tokens[request.row]
                self.holdings.settle(request.row)
                self.prefilling.remove(request)
                self.decoding.append(request)
                self._decodes.dirty = True

    def _decodes_in(self, plan: Plan) -> int:
        """Leading requests of a plan that were decoding (not one-token chunks of prompts)."""
        count = plan.num_decodes
        while count and plan.requests[count - 1].row in self._tokens:
            count -= 1
        return count

    def _plan(self, chunks: list[tuple[Request, int]]) -> Plan:
        batch = self._batch
        chunks.sort(key=lambda chunk: chunk[1])
        decode_rows = self._decodes.rows(self.decoding)
        rows, lens = decode_rows, np.ones(len(decode_rows), np.int32)
        requests = self._decodes.requests
        token_ids = batch.last_token[rows]
        positions = batch.computed[rows].astype(np.int64)
        if chunks:
            new = np.array([request.row for request, _ in chunks], np.int32)
            sizes = np.array([size for _, size in chunks], np.int32)
            spans = [
                (row, start, start + size)
                for row, start, size in zip(
                    new.tolist(), batch.computed[new].tolist(), sizes.tolist(), strict=True
                )
            ]
            rows, lens = np.concatenate((rows, new)), np.concatenate((lens, sizes))
            requests += tuple(request for request, _ in chunks)
            token_ids = np.concatenate((token_ids, *(self._tokens[r][a:b] for r, a, b in spans)))
            positions = np.concatenate((positions, *(np.arange(a, b) for _, a, b in spans)))
        context = batch.computed[rows] + lens
        width = self._width(rows)
        plan = Plan(
            step=self._steps,
            num_decodes=int(np.searchsorted(lens, 1, side="right")),
            rows=rows,
            query_lens=lens,
            context_lens=context,
            token_ids=token_ids,
            positions=positions,
            block_tables=self._tables(rows, width, bool(chunks)),
            samples=context == batch.known[rows],
            requests=requests,
        )
        if self.holdings.stripes is not None:
            plan.num_decodes = len(decode_rows)
            plan.owners = self.holdings.owners[rows]
            plan.shard_tables = self.holdings.tables[:, rows, :width]
        return plan

    def _width(self, rows: NDArray[np.int32]) -> int:
        pages = self.holdings.width(rows)
        return min(-(-pages // WIDTH_STEP) * WIDTH_STEP, self.holdings.tables.shape[2])

    def _tables(self, rows: NDArray[np.int32], width: int, mixed: bool) -> NDArray[np.int32]:
        if mixed:
            return self.holdings.owner_tables(rows, width)
        return self._decodes.tables(width, lambda: self.holdings.owner_tables(rows, width))


class _DecodeRows:
    """What stays the same from one decode step to the next, until a request joins or leaves."""

    def __init__(self) -> None:
        self.dirty = True
        self.requests: tuple[Request, ...] = ()
        self._rows = np.zeros(0, np.int32)
        self._tables = np.zeros((0, 0), np.int32)

    def rows(self, decoding: list[Request]) -> NDArray[np.int32]:
        """[B] state rows of the decoding requests."""
        if self.dirty:
            self.requests = tuple(decoding)
            self._rows = np.fromiter((r.row for r in decoding), np.int32, len(decoding))
            self._tables = np.zeros((0, 0), np.int32)
            self.dirty = False
        return self._rows

    def tables(self, width: int, gather: Callable[[], NDArray[np.int32]]) -> NDArray[np.int32]:
        """[B, width] block tables, gathered anew only when their shape changes."""
        if self._tables.shape != (len(self._rows), width):
            self._tables = gather()
        return self._tables

    def set_pages(
        self, rows: NDArray[np.int32], columns: NDArray[np.int32], pages: NDArray[np.int32]
    ) -> None:
        """Enter newly taken pages into the gathered tables, as far as they are that wide."""
        if self.dirty or not self._tables.size:
            return
        place = np.flatnonzero(np.isin(self._rows, rows))
        order = np.argsort(self._rows[place], kind="stable")
        mine = np.argsort(rows, kind="stable")
        inside = columns[mine] < self._tables.shape[1]
        self._tables[place[order][inside], columns[mine][inside]] = pages[mine][inside]
