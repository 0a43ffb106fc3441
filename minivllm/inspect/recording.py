"""Notes down what a scheduler does, step by step, without changing what it does.

A `Recording` stands in front of two methods of one real `Scheduler`, `schedule` and `update`, and
writes a `Step` for each pair of calls: who computed which tokens, who waited, who lost its blocks,
and what every block of the pool held. Everything in it is plain numbers, strings, tuples and dicts,
so a recording can be drawn, printed, compared or stored.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal

from minivllm.engine.request import Request, RequestStatus
from minivllm.engine.scheduler import Scheduler, SchedulerOutput

WorkKind = Literal["prefill", "decode", "recompute"]


@dataclass(frozen=True)
class Work:
    """One request's share of a step.

    Attributes:
        request_id: Whose.
        start: Position of its first token computed in the step.
        count: Tokens computed.
        kind: The engine knows no kinds; a reader does. `decode` is the one newest token after a
            prompt that is done, `recompute` are tokens that had been computed before a preemption,
            `prefill` is the rest.
        num_cached: Tokens taken from the prefix cache, if the request was admitted in this step.
        sampled: Whether the step closed the request's gap, so that a token was sampled.
    """

    request_id: str
    start: int
    count: int
    kind: WorkKind
    num_cached: int
    sampled: bool


@dataclass(frozen=True)
class PoolState:
    """What the blocks held at one moment. Lists are indexed by block id; block 0 is the null block.

    Attributes:
        tables: Block table of each request that owns blocks.
        num_computed: Tokens in the cache, by request.
        hashes: Begin of each block's hash in hex, or None for content that the index does not know.
        free_queue: Free blocks, next to be taken first.
    """

    tables: dict[str, tuple[int, ...]]
    num_computed: dict[str, int]
    hashes: tuple[str | None, ...]
    free_queue: tuple[int, ...]

    def owners(self, block: int) -> list[str]:
        """Requests whose table names the block."""
        return [name for name, table in self.tables.items() if block in table]

    def num_filled(self, block: int, block_size: int) -> int:
        """Tokens that the block's owners have in it (0 for a block without owner)."""
        filled = [
            self.num_computed[name] - table.index(block) * block_size
            for name, table in self.tables.items()
            if block in table
        ]
        return max(0, min(max(filled, default=0), block_size))


@dataclass
class Step:
    """One step.

    Attributes:
        number: 1 for the first step of the recording.
        work: Shares of the step, in the order in which the budget was given out.
        num_tokens: Tokens known before the step, by request.
        waiting: Requests in the queue when the step was planned, first in line first.
        preempted: Requests that lost their blocks for this step.
        finished: Requests that ended with this step.
        evicted: Blocks whose content was given up to make room in this step.
        hit_blocks: Blocks found in the prefix cache in this step, by request.
        indexed: Blocks that became findable when the step had run.
        during: The pool while the step runs.
        after: The pool when the step's tokens have been taken in.
        started: `time.perf_counter` before planning.
        ended: `time.perf_counter` after the tokens have been taken in.
    """

    number: int
    work: list[Work]
    num_tokens: dict[str, int]
    waiting: list[str]
    preempted: list[str]
    finished: list[str]
    evicted: list[int]
    hit_blocks: dict[str, list[int]]
    indexed: list[int]
    during: PoolState
    after: PoolState
    started: float
    ended: float

    @property
    def total_tokens(self) -> int:
        """Tokens computed in the step."""
        return sum(work.count for work in self.work)

    def work_of(self, request_id: str) -> Work | None:
        """The request's share, or None if it had none."""
        return next((work for work in self.work if work.request_id == request_id), None)


@dataclass
class _Planned:
    """A step between its plan and its update."""

    step: Step
    indexed_before: set[int] = field(default_factory=set)


class Recording:
    """Records a scheduler's steps from now on, until `stop` or the end of a `with` block.

    Steps without work are left out. Requests are known in the order in which they were first seen.

    Args:
        scheduler: For an `LLM`, `llm.engine.core.scheduler`.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.budget = scheduler.config.max_num_batched_tokens
        self.num_blocks = scheduler.kv_cache.pool.num_blocks
        self.block_size = scheduler.kv_cache.block_size
        self.steps: list[Step] = []
        self.request_ids: list[str] = []
        self._planned: dict[int, _Planned] = {}
        self._most_computed: dict[str, int] = {}
        self._originals = (scheduler.schedule, scheduler.update)
        # Attributes of the object hide the methods of its class; nobody else's scheduler changes.
        vars(scheduler)["schedule"] = self._schedule
        vars(scheduler)["update"] = self._update

    def stop(self) -> Recording:
        """Ends the recording; stopping again does nothing. Returns itself."""
        vars(self.scheduler).pop("schedule", None)
        vars(self.scheduler).pop("update", None)
        return self

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def outcome(self, request_id: str) -> list[str]:
        """What happened to a request in each step, in words: for a log, a table or a comparison."""
        return [_describe(step, request_id) for step in self.steps]

    def _schedule(self) -> SchedulerOutput:
        started = time.perf_counter()
        scheduler, before = self.scheduler, self._pool_state()
        waiting = [request.request_id for request in scheduler.waiting]
        running = list(scheduler.running)
        for request_id in scheduler.requests:
            if request_id not in self.request_ids:
                self.request_ids.append(request_id)
        plan = self._originals[0]()
        if not plan.num_scheduled_tokens:
            return plan
        during = self._pool_state()
        hits = {
            new.request_id: new.block_ids[: new.num_computed_tokens // self.block_size]
            for new in plan.new_requests
        }
        step = Step(
            number=len(self.steps) + 1,
            work=[self._work(plan, name) for name in plan.num_scheduled_tokens],
            num_tokens={name: r.num_tokens for name, r in scheduler.requests.items()},
            waiting=waiting,
            preempted=[r.request_id for r in running if r.status is RequestStatus.PREEMPTED],
            finished=[],
            evicted=[b for b, h in enumerate(before.hashes) if h and during.hashes[b] is None],
            hit_blocks={name: blocks for name, blocks in hits.items() if blocks},
            indexed=[],
            during=during,
            after=during,
            started=started,
            ended=started,
        )
        self.steps.append(step)
        # By the plan's identity: with overlap, the next step is planned before this one is updated.
        self._planned[id(plan)] = _Planned(step, set(scheduler.kv_cache.pool.index.values()))
        return plan

    def _update(self, output: SchedulerOutput, sampled_token_ids: dict[str, int]) -> list[Request]:
        updated = self._originals[1](output, sampled_token_ids)
        planned = self._planned.pop(id(output), None)
        if planned is not None:
            step, index = planned.step, self.scheduler.kv_cache.pool.index
            step.finished = [r.request_id for r in updated if r.is_finished]
            step.indexed = sorted(set(index.values()) - planned.indexed_before)
            step.after = self._pool_state()
            step.ended = time.perf_counter()
        return updated

    def _work(self, plan: SchedulerOutput, request_id: str) -> Work:
        request, count = self.scheduler.requests[request_id], plan.num_scheduled_tokens[request_id]
        start = request.num_computed_tokens - count
        most = self._most_computed.get(request_id, 0)
        self._most_computed[request_id] = max(most, request.num_computed_tokens)
        kind: WorkKind = "prefill"
        if start < most:
            kind = "recompute"
        elif count == 1 and start >= request.num_prompt_tokens:
            kind = "decode"
        admitted = [n for n in plan.new_requests if n.request_id == request_id]
        return Work(
            request_id=request_id,
            start=start,
            count=count,
            kind=kind,
            num_cached=admitted[0].num_computed_tokens if admitted else 0,
            sampled=request.num_computed_tokens == request.num_tokens,
        )

    def _pool_state(self) -> PoolState:
        kv_cache = self.scheduler.kv_cache
        requests = self.scheduler.requests
        return PoolState(
            tables={name: tuple(table) for name, table in kv_cache.tables.items()},
            num_computed={name: requests[name].num_computed_tokens for name in kv_cache.tables},
            hashes=tuple(h.hex()[:4] if h is not None else None for h in kv_cache.pool.hashes),
            free_queue=tuple(kv_cache.pool.free_queue),
        )


def _describe(step: Step, request_id: str) -> str:
    work = step.work_of(request_id)
    if work is not None:
        cached = f"{work.num_cached} cached + " if work.num_cached else ""
        return f"{cached}{work.kind} {work.count}"
    if request_id in step.preempted:
        return "preempted"
    return "waiting" if request_id in step.waiting else ""
