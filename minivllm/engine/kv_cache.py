"""The paged KV cache's bookkeeping: which block holds whose tokens, and which can be reused.

Keys and values of a sequence need not lie side by side: the cache is cut into blocks of a few
tokens, and a request owns a table of block ids. Token `i` lies in slot
`table[i // block_size] * block_size + i % block_size`. Three things follow from that one idea: no
memory is reserved for tokens that may never come, nothing is ever moved, and two requests that
begin with the same tokens can point at the same blocks (prefix caching).

`BlockPool` owns the blocks: reference counts, the free queue, the index from content to block.
`KVCacheManager` owns the tables; nobody else changes them. The design is vLLM's (Kwon et al. 2023,
"PagedAttention"), with one difference: a block enters the index only after the step that filled it
has run, so that the index never names content that is not there yet.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from minivllm.engine.request import Request

NULL_BLOCK = 0  # never owned, so that padded rows have somewhere harmless to point at

BlockHash = bytes
_ROOT_HASH: BlockHash = hashlib.sha256(b"minivllm: parent of first blocks").digest()


def hash_block(parent: BlockHash | None, token_ids: Sequence[int], salt: str | None) -> BlockHash:
    """Names the content of a full block: its tokens, and through `parent` all tokens before them.

    Keys and values depend on every earlier token, so a block may only be shared by requests that
    agree from the first token on. sha256, because a collision would give one user another's text.

    Args:
        parent: Hash of the block before it, or None for a first block.
        token_ids: The block's tokens.
        salt: Whatever else changes the content, or keeps users apart; it enters at the first block
            and reaches the others through `parent`.
    """
    digest = hashlib.sha256(parent if parent is not None else _ROOT_HASH)
    if parent is None and salt is not None:
        digest.update(salt.encode())
    digest.update(array("q", token_ids).tobytes())
    return digest.digest()


class BlockPool:
    """All blocks of the cache: free ones in the order in which they will be taken.

    A free block may still hold content that the index knows. It is reused by the next request with
    that prefix, or evicted when somebody else takes it; until then it costs nothing.

    Args:
        num_blocks: Blocks that requests can own. One more exists, block 0, the null block.
        enable_caching: Whether contents are indexed at all.
    """

    def __init__(self, num_blocks: int, enable_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.ref_counts = [0] * (num_blocks + 1)
        self.hashes: list[BlockHash | None] = [None] * (num_blocks + 1)
        self.index: dict[BlockHash, int] = {}
        # A linked list with O(1) removal from the middle, which a hit on a free block needs.
        self.free_queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self.num_evictions = 0

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns, with or without known content."""
        return len(self.free_queue)

    def take_new(self, count: int) -> list[int]:
        """Takes free blocks for new content, oldest first; their old content leaves the index.

        Raises:
            ValueError: Fewer than `count` blocks are free; the caller should have looked.
        """
        if count > self.num_free:
            raise ValueError(f"{count} blocks wanted, {self.num_free} free")
        blocks = [self.free_queue.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._forget(block)
            self.ref_counts[block] = 1
        return blocks

    def take_cached(self, blocks: Iterable[int]) -> None:
        """Adds an owner to blocks found through the index, free ones included."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self.free_queue[block]
            self.ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Removes an owner; blocks without one go to the tail of the queue, content kept."""
        for block in blocks:
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free_queue[block] = None

    def add_to_index(self, block: int, block_hash: BlockHash) -> None:
        """Makes a block's content findable. A second block with the same content is not indexed."""
        if self.enable_caching and self.hashes[block] is None and block_hash not in self.index:
            self.hashes[block] = block_hash
            self.index[block_hash] = block

    def reset_index(self) -> None:
        """Forgets all contents, for instance after the weights have changed."""
        for block in list(self.index.values()):
            self._forget(block)

    def _forget(self, block: int) -> None:
        block_hash = self.hashes[block]
        if block_hash is not None:
            del self.index[block_hash]
            self.hashes[block] = None
            self.num_evictions += 1


@dataclass
class PrefixCacheStats:
    """Prefix-cache traffic since the start, in tokens: looked up, and found."""

    queries: int = 0
    hits: int = 0


class KVCacheManager:
    """The block tables of all requests.

    Args:
        num_blocks: Blocks that requests can own together.
        block_size: Tokens per block.
        enable_caching: Whether prefixes are shared.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_caching: bool = True) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks, enable_caching)
        self.tables: dict[str, list[int]] = {}
        self.stats = PrefixCacheStats()
        self._block_hashes: dict[str, list[BlockHash]] = {}
        self._num_indexed: dict[str, int] = {}

    @property
    def max_tokens(self) -> int:
        """Longest sequence that fits into the pool alone."""
        return self.pool.num_blocks * self.block_size

    def block_table(self, request_id: str) -> list[int]:
        """Blocks of a request, first tokens first; empty if it owns none."""
        return self.tables.get(request_id, [])

    def find_cached_prefix(self, request: Request) -> list[int]:
        """Finds the longest chain of indexed blocks that begins the request's tokens.

        At least one token is left to compute, because something has to be sampled from. Nothing is
        owned by this: the answer is valid until the next change of the pool.
        """
        if not self.pool.enable_caching:
            return []
        hashes = self._hashes_of(request)
        blocks: list[int] = []
        for block_hash in hashes[: (request.num_tokens - 1) // self.block_size]:
            block = self.pool.index.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def allocate_slots(
        self, request: Request, num_tokens: int, cached_blocks: Sequence[int] = ()
    ) -> list[int] | None:
        """Gives a request slots for its first `num_tokens` tokens, as far as it has none yet.

        Args:
            request: Whose table grows.
            num_tokens: Tokens that will be in the cache after the step, cached ones included.
            cached_blocks: From `find_cached_prefix`, for a request that owns no block yet.

        Returns:
            The blocks added to the table, or None (and nothing has changed) if the pool is short.
        """
        table = self.tables.get(request.request_id, [])
        owned = len(table) + len(cached_blocks)
        num_new = max(0, -(-num_tokens // self.block_size) - owned)
        # A hit on a free block takes it out of the queue too, so it counts against what is free.
        num_revived = sum(self.pool.ref_counts[block] == 0 for block in cached_blocks)
        if num_new + num_revived > self.pool.num_free:
            return None
        # Cached blocks first: taking new ones could evict the very blocks that were just found.
        self.pool.take_cached(cached_blocks)
        added = [*cached_blocks, *self.pool.take_new(num_new)]
        self.tables.setdefault(request.request_id, []).extend(added)
        return added

    def index_full_blocks(self, request: Request) -> None:
        """Makes the blocks that a finished step has filled findable for other requests."""
        table = self.tables.get(request.request_id)
        if table is None or not self.pool.enable_caching:
            return
        start = self._num_indexed.get(request.request_id, 0)
        end = request.num_computed_tokens // self.block_size
        if end > start:
            hashes = self._hashes_of(request)
            for i in range(start, end):
                self.pool.add_to_index(table[i], hashes[i])
            self._num_indexed[request.request_id] = end

    def free(self, request: Request) -> None:
        """Takes a request's blocks away. The last go first into the queue, so that when memory is
        short the ends of chains are evicted before their heads, without which they are useless.
        """
        self.pool.release(reversed(self.tables.pop(request.request_id, [])))
        self._num_indexed.pop(request.request_id, None)
        if request.is_finished:
            self._block_hashes.pop(request.request_id, None)

    def record_lookup(self, num_queried: int, num_hit: int) -> None:
        """Counts a lookup that led to an admission, in tokens."""
        self.stats.queries += num_queried
        self.stats.hits += num_hit

    def _hashes_of(self, request: Request) -> list[BlockHash]:
        """Hashes of the request's full blocks; kept and extended, since tokens never change."""
        hashes = self._block_hashes.setdefault(request.request_id, [])
        size = self.block_size
        for i in range(len(hashes), request.num_tokens // size):
            tokens = request.token_ids[i * size : (i + 1) * size]
            hashes.append(hash_block(hashes[-1] if hashes else None, tokens, request.cache_salt))
        return hashes
