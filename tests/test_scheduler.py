"""The scheduler and the block pool: single behaviours, then everything at once at random."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.config import SchedulerConfig
from minivllm.engine.kv_cache import KVCacheManager, hash_block
from minivllm.engine.request import FinishReason, Request, RequestStatus
from minivllm.engine.scheduler import Scheduler, SchedulerOutput
from minivllm.errors import InvalidRequestError
from minivllm.sampling_params import SamplingParams
from tests.fake_worker import FakeWorker, generate_alone, random_prompt


def make_request(name: str, prompt: list[int], max_tokens: int = 4, **kwargs: object) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    return Request(name, prompt, params, max_tokens, **kwargs)  # type: ignore[arg-type]


class Engine:
    """Scheduler and fake worker in the loop of `EngineCore`, with every invariant checked."""

    def __init__(
        self,
        num_blocks: int = 16,
        block_size: int = 4,
        budget: int = 64,
        max_num_seqs: int = 8,
        caching: bool = True,
    ) -> None:
        self.kv = KVCacheManager(num_blocks, block_size, caching)
        config = SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=max_num_seqs)
        self.scheduler = Scheduler(config, self.kv, max_model_len=num_blocks * block_size)
        self.worker = FakeWorker(num_blocks, block_size)
        self.requests: dict[str, Request] = {}

    def add(self, request: Request) -> Request:
        self.scheduler.add_request(request)
        self.requests[request.request_id] = request
        return request

    def step(self) -> SchedulerOutput:
        computed_before = {r.request_id: r.num_computed_tokens for r in self.scheduler.running}
        num_preemptions = self.scheduler.stats.num_preemptions
        indexed_before = set(self.kv.pool.index.values())
        plan = self.scheduler.schedule()
        self.check_plan(plan, computed_before, num_preemptions)
        sampled = self.worker.execute(plan)
        # The worker has been told of every request that ended or was preempted.
        assert set(self.worker.tables) == {r.request_id for r in self.scheduler.running}
        self.check_writes(indexed_before)
        self.scheduler.update(plan, sampled)
        self.check_pool()
        return plan

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished_requests:
                return
            self.step()
        raise AssertionError("requests did not finish: livelock")

    def check_plan(
        self, plan: SchedulerOutput, before: dict[str, int], num_preemptions: int
    ) -> None:
        config = self.scheduler.config
        assert plan.total_num_scheduled_tokens <= config.max_num_batched_tokens
        assert len(self.scheduler.running) <= config.max_num_seqs
        assert all(count > 0 for count in plan.num_scheduled_tokens.values())
        if self.scheduler.has_unfinished_requests:
            assert plan.num_scheduled_tokens, "a step without progress"
        if self.scheduler.stats.num_preemptions > num_preemptions:
            assert not plan.new_requests
        for request in self.scheduler.requests.values():
            computed = request.num_computed_tokens
            assert 0 <= computed <= request.num_tokens
            if request.status is RequestStatus.PREEMPTED:
                assert request.request_id not in plan.num_scheduled_tokens
                assert computed == 0
            elif request.request_id in before:
                assert computed >= before[request.request_id]

    def check_writes(self, indexed: set[int]) -> None:
        written = self.worker.written_last_step
        assert len(written) == len(set(written)), "two tokens in one slot"
        still_indexed = indexed & set(self.kv.pool.index.values())
        assert not {slot // self.kv.block_size for slot in written} & still_indexed
        assert all(slot >= self.kv.block_size for slot in written), "the null block was written"

    def check_pool(self) -> None:
        pool, tables = self.kv.pool, self.kv.tables
        counts = [0] * (pool.num_blocks + 1)
        for table in tables.values():
            assert len(table) == len(set(table))
            for block in table:
                counts[block] += 1
        assert pool.ref_counts == counts
        assert counts[0] == 0
        assert 0 not in pool.free_queue
        owned = {block for block, count in enumerate(counts) if count}
        assert not owned & set(pool.free_queue)
        assert len(owned) + pool.num_free == pool.num_blocks
        assert set(tables) == {r.request_id for r in self.scheduler.running}
        self.check_index()

    def check_index(self) -> None:
        """A block is in the index exactly under the hash of what the worker has written there."""
        pool, size = self.kv.pool, self.kv.block_size
        assert {block: h for h, block in pool.index.items()} == {
            block: h for block, h in enumerate(pool.hashes) if h is not None
        }
        for block_hash, block in pool.index.items():
            content = self.worker.slots[(block + 1) * size - 1]
            assert len(content) % size == 0
            expected = None
            for i in range(0, len(content), size):
                expected = hash_block(expected, content[i : i + size], None)
            assert block_hash == expected


def test_a_request_gets_the_tokens_it_would_get_alone() -> None:
    engine = Engine()
    request = engine.add(make_request("a", [1, 2, 3, 4, 5], max_tokens=6))
    engine.run()
    assert request.output_token_ids == generate_alone([1, 2, 3, 4, 5], 6)
    assert request.finish_reason is FinishReason.LENGTH


def test_a_long_prompt_is_computed_in_chunks_beside_running_requests() -> None:
    engine = Engine(budget=8)
    engine.add(make_request("short", [1, 2], max_tokens=8))
    engine.step()
    engine.add(make_request("long", list(range(20)), max_tokens=2))
    plans = [engine.step().num_scheduled_tokens for _ in range(3)]
    assert plans == [{"short": 1, "long": 7}, {"short": 1, "long": 7}, {"short": 1, "long": 6}]


def test_a_request_samples_only_when_its_gap_closes() -> None:
    engine = Engine(budget=4)
    request = engine.add(make_request("a", list(range(10))))
    outputs = []
    for _ in range(3):
        engine.step()
        outputs.append(request.num_output_tokens)
    assert outputs == [0, 0, 1]


def test_the_sequence_limit_holds_waiting_requests_back() -> None:
    engine = Engine(max_num_seqs=2)
    for name in "abc":
        engine.add(make_request(name, [1, 2, 3], max_tokens=2))
    assert set(engine.step().num_scheduled_tokens) == {"a", "b"}
    engine.step()
    assert set(engine.step().num_scheduled_tokens) == {"c"}


def test_the_last_admitted_request_is_preempted_and_computed_again() -> None:
    engine = Engine(num_blocks=4, block_size=4, caching=False)
    first = engine.add(make_request("first", [1] * 7, max_tokens=6))
    second = engine.add(make_request("second", [2] * 7, max_tokens=6))
    engine.run()
    assert second.metrics.num_preemptions > 0
    assert first.metrics.num_preemptions == 0
    assert first.output_token_ids == generate_alone([1] * 7, 6)
    assert second.output_token_ids == generate_alone([2] * 7, 6)


def test_a_preempted_request_is_the_next_to_be_admitted() -> None:
    engine = Engine(num_blocks=4, block_size=4, caching=False)
    engine.add(make_request("first", [1] * 8, max_tokens=6))
    engine.add(make_request("second", [2] * 8, max_tokens=6))
    engine.step()
    engine.add(make_request("third", [3] * 8, max_tokens=6))
    engine.step()
    assert [r.request_id for r in engine.scheduler.waiting] == ["second", "third"]


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    engine = Engine(num_blocks=4, block_size=4, caching=False)
    engine.add(make_request("first", [1] * 8, max_tokens=6))
    engine.add(make_request("second", [2] * 8, max_tokens=6))
    engine.step()
    engine.add(make_request("third", [3], max_tokens=1))
    plan = engine.step()
    assert engine.scheduler.stats.num_preemptions == 1
    assert set(plan.num_scheduled_tokens) == {"first"}


def test_a_second_request_reuses_the_blocks_of_a_common_prefix() -> None:
    engine = Engine()
    engine.add(make_request("a", list(range(10)), max_tokens=1))
    engine.run()
    request = engine.add(make_request("b", [*range(10), 99], max_tokens=1))
    plan = engine.step()
    assert plan.num_scheduled_tokens == {"b": 3}
    assert request.num_cached_tokens == 8


def test_the_last_token_of_a_fully_cached_prompt_is_computed_again() -> None:
    engine = Engine()
    engine.add(make_request("a", list(range(8)), max_tokens=1))
    engine.run()
    request = engine.add(make_request("b", list(range(8)), max_tokens=1))
    assert engine.step().num_scheduled_tokens == {"b": 4}
    assert request.num_cached_tokens == 4


def test_requests_with_different_salts_share_nothing() -> None:
    engine = Engine()
    engine.add(make_request("a", list(range(9)), max_tokens=1, cache_salt="x"))
    engine.scheduler.update(plan := engine.scheduler.schedule(), engine.worker.execute(plan))
    request = engine.add(make_request("b", list(range(9)), max_tokens=1, cache_salt="y"))
    engine.scheduler.schedule()
    assert request.num_cached_tokens == 0


def test_nothing_is_shared_when_prefix_caching_is_off() -> None:
    engine = Engine(caching=False)
    engine.add(make_request("a", list(range(9)), max_tokens=1))
    engine.run()
    request = engine.add(make_request("b", list(range(9)), max_tokens=1))
    engine.run()
    assert request.num_cached_tokens == 0
    assert engine.kv.pool.index == {}


def test_the_end_of_a_chain_is_evicted_before_its_head() -> None:
    engine = Engine(num_blocks=4, block_size=4)
    engine.add(make_request("a", list(range(12)), max_tokens=1))
    engine.run()
    engine.add(make_request("b", [7] * 7, max_tokens=1))  # one never-used block, one of the chain
    engine.run()
    request = engine.add(make_request("c", list(range(12)), max_tokens=1))
    engine.step()
    assert request.num_cached_tokens == 8


def test_an_aborted_request_frees_its_blocks_at_once() -> None:
    engine = Engine()
    engine.add(make_request("a", list(range(10))))
    engine.step()
    assert engine.kv.pool.num_free < engine.kv.pool.num_blocks
    engine.scheduler.finish("a", FinishReason.ABORT)
    assert engine.kv.pool.num_free == engine.kv.pool.num_blocks
    assert not engine.scheduler.has_unfinished_requests


def test_a_waiting_request_can_be_aborted() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add(make_request("a", [1, 2]))
    engine.add(make_request("b", [3, 4]))
    engine.step()
    engine.scheduler.finish("b", FinishReason.ABORT)
    engine.run()
    assert engine.requests["b"].output_token_ids == []
    assert engine.requests["a"].num_output_tokens == 4


def test_a_stop_token_ends_a_request_and_is_part_of_its_tokens() -> None:
    expected = generate_alone([1, 2, 3], 8)
    request = make_request("a", [1, 2, 3], max_tokens=8, eos_token_ids=[expected[2]])
    engine = Engine()
    engine.add(request)
    engine.run()
    assert request.output_token_ids == expected[: expected.index(expected[2]) + 1]
    assert request.finish_reason is FinishReason.STOP
    assert request.stop_reason == expected[2]


def test_a_request_that_can_never_fit_is_refused_with_both_numbers() -> None:
    kv = KVCacheManager(num_blocks=4, block_size=4)
    scheduler = Scheduler(SchedulerConfig(), kv, max_model_len=1000)
    with pytest.raises(InvalidRequestError, match=r"need 23 slots .* has 16 in all"):
        scheduler.add_request(make_request("a", [1] * 20, max_tokens=4))
    scheduler = Scheduler(SchedulerConfig(), kv, max_model_len=12)
    with pytest.raises(InvalidRequestError, match=r"10 tokens .*max_tokens=4 .* 12 tokens"):
        scheduler.add_request(make_request("a", [1] * 10, max_tokens=4))
    assert not scheduler.has_unfinished_requests


def test_a_request_that_fills_the_whole_pool_finishes() -> None:
    engine = Engine(num_blocks=4, block_size=4, budget=3)
    request = engine.add(make_request("a", [1] * 10, max_tokens=6))
    engine.run()
    assert request.output_token_ids == generate_alone([1] * 10, 6)


def test_an_id_in_use_is_refused() -> None:
    engine = Engine()
    engine.add(make_request("a", [1]))
    with pytest.raises(InvalidRequestError, match="'a' is in use"):
        engine.add(make_request("a", [2]))


def test_twenty_thousand_waiting_requests_do_not_make_a_step_look_at_them() -> None:
    engine = Engine(max_num_seqs=1, caching=False)
    for i in range(20_000):
        engine.scheduler.add_request(make_request(str(i), [1], max_tokens=2))
    looked_up: list[str] = []
    engine.kv.find_cached_prefix = lambda request: looked_up.append(request.request_id) or []  # type: ignore[method-assign,func-returns-value]
    engine.scheduler.schedule()
    assert looked_up == ["0"]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_random_traffic_keeps_every_invariant_and_every_token(data: st.DataObject) -> None:
    rng = random.Random(data.draw(st.integers(0, 2**32), label="seed"))
    block_size = data.draw(st.sampled_from([1, 2, 4, 8]), label="block_size")
    num_blocks = data.draw(st.integers(3, 24), label="num_blocks")
    engine = Engine(
        num_blocks,
        block_size,
        budget=data.draw(st.integers(1, 40), label="budget"),
        max_num_seqs=data.draw(st.integers(1, 6), label="max_num_seqs"),
        caching=data.draw(st.booleans(), label="caching"),
    )
    longest = num_blocks * block_size
    prefixes = [[rng.randrange(50) for _ in range(longest)] for _ in range(2)]
    aborted = set()
    for i in range(data.draw(st.integers(1, 12), label="num_requests")):
        prompt = random_prompt(rng, prefixes, longest - 1)
        engine.add(make_request(str(i), prompt, rng.randint(1, longest - len(prompt))))
        for _ in range(rng.randint(0, 4)):
            engine.step()
        if rng.random() < 0.2 and engine.scheduler.requests:
            victim = rng.choice(list(engine.scheduler.requests))
            engine.scheduler.finish(victim, FinishReason.ABORT)
            engine.check_pool()
            aborted.add(victim)
    engine.run()
    for name, request in engine.requests.items():
        expected = generate_alone(request.prompt_token_ids, request.max_tokens)
        if name in aborted:
            expected = expected[: request.num_output_tokens]
        assert request.output_token_ids == expected
    assert engine.kv.pool.num_free == num_blocks


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_prefix_hits_are_those_of_a_simple_model_of_the_cache(data: st.DataObject) -> None:
    """With one request at a time the cache is an LRU list of prefixes; the model is that list."""
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    block_size, num_blocks = 4, data.draw(st.integers(2, 10))
    engine = Engine(num_blocks, block_size, budget=1000)
    longest = num_blocks * block_size
    prefixes = [[rng.randrange(3) for _ in range(longest)] for _ in range(2)]
    # Front is taken first: each entry is the prefix that a free block holds, or None.
    model: list[tuple[int, ...] | None] = [None] * num_blocks
    for i in range(12):
        prompt = random_prompt(rng, prefixes, longest - 1)
        full = [tuple(prompt[: n + 4]) for n in range(0, len(prompt) - 3, 4)]
        hits = 0
        while hits < min(len(full), (len(prompt) - 1) // 4) and full[hits] in model:
            hits += 1
        request = engine.add(make_request(str(i), prompt, max_tokens=1))
        engine.run()
        assert request.num_cached_tokens == hits * block_size
        owned: list[tuple[int, ...] | None] = list(full[:hits])
        for prefix in full[:hits]:
            model.remove(prefix)
        for n in range(hits, -(-len(prompt) // 4)):
            model.pop(0)
            # Content that another block holds already is not indexed a second time.
            known = n >= len(full) or full[n] in model or full[n] in owned
            owned.append(None if known else full[n])
        model += reversed(owned)
