"""A worker without a model, for tests of the scheduler: its cache remembers what was written.

Every slot holds the whole sequence of tokens up to the one written there, which is what keys and
values depend on. The "model" is an integer function of all tokens before; it reads them from the
cache, through the block table, so a wrong block, a stale block or a missing write shows.
"""

from __future__ import annotations

import random
import zlib

from minivllm.engine.scheduler import SchedulerOutput

Prefix = tuple[int, ...]


def next_token(tokens: Prefix, vocab_size: int = 50) -> int:
    """The integer model: any change of any token changes the answer."""
    return zlib.crc32(repr(tokens).encode()) % vocab_size


class FakeWorker:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[int, Prefix] = {}
        self.tables: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.written_last_step: list[int] = []

    def slot(self, request_id: str, position: int) -> int:
        table = self.tables[request_id]
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def execute(self, plan: SchedulerOutput) -> dict[str, int]:
        for request_id in plan.removed_request_ids:
            del self.tables[request_id], self.tokens[request_id], self.computed[request_id]
        for new in plan.new_requests:
            self.tables[new.request_id] = list(new.block_ids)
            self.tokens[new.request_id] = new.prompt_token_ids + new.output_token_ids
            self.computed[new.request_id] = new.num_computed_tokens
        for cached in plan.cached_requests:
            self.tables[cached.request_id] += cached.new_block_ids
            assert self.computed[cached.request_id] == cached.num_computed_tokens
        self._write(plan)
        return self._sample(plan)

    def _write(self, plan: SchedulerOutput) -> None:
        self.written_last_step = []
        for request_id, count in plan.num_scheduled_tokens.items():
            tokens, start = self.tokens[request_id], self.computed[request_id]
            assert start + count <= len(tokens)
            for position in range(start, start + count):
                slot = self.slot(request_id, position)
                self.slots[slot] = tuple(tokens[: position + 1])
                self.written_last_step.append(slot)
            self.computed[request_id] += count

    def _sample(self, plan: SchedulerOutput) -> dict[str, int]:
        sampled = {}
        for request_id in plan.num_scheduled_tokens:
            tokens = self.tokens[request_id]
            if self.computed[request_id] < len(tokens):
                continue
            for position in range(len(tokens)):
                seen = self.slots[self.slot(request_id, position)]
                assert seen == tuple(tokens[: position + 1]), f"{request_id} reads {seen}"
            sampled[request_id] = next_token(tuple(tokens))
            tokens.append(sampled[request_id])
        return sampled


def generate_alone(prompt: list[int], num_tokens: int) -> list[int]:
    """What a request must get, whatever the company it was served in."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tuple(tokens)))
    return tokens[len(prompt) :]


def random_prompt(rng: random.Random, prefixes: list[list[int]], longest: int) -> list[int]:
    """A prompt that often begins like another one."""
    prefix = rng.choice(prefixes)[: rng.randint(0, longest)]
    own = [rng.randrange(50) for _ in range(rng.randint(1, longest))]
    return (prefix + own)[:longest]
