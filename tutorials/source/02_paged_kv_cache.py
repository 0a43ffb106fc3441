# %% [markdown]
r"""
# 2 · The paged KV cache

To compute a token, attention reads the keys and values of **all tokens before it**. They are kept, so that
nothing is computed twice. This cache is most of what a serving engine's memory is for, and how it is
laid out decides how many requests can run at once.

You will see

* why the cache is cut into blocks, and how a token finds its slot;
* how two requests share the same blocks, and why only full blocks, named by a chain of hashes, can be
  shared;
* what becomes of the blocks of a finished request, which content is given up first, and why.

As in [lesson 1](01_scheduler.ipynb), everything is the engine's own:
[`KVCacheManager` and `BlockPool`](../minivllm/engine/kv_cache.py), the
[`Scheduler`](../minivllm/engine/scheduler.py), and in the end the whole engine. No GPU is needed.
"""

# %%
# %matplotlib inline
import itertools

from minivllm.config import EngineConfig, SchedulerConfig
from minivllm.engine.kv_cache import KVCacheManager, hash_block
from minivllm.engine.request import Request
from minivllm.engine.scheduler import Scheduler
from minivllm.inspect import (
    Recording,
    draw_block_tables,
    draw_free_queue,
    draw_ownership,
    draw_timeline,
)
from minivllm.models.presets import PRESETS
from minivllm.sampling_params import SamplingParams
from minivllm.worker.memory import kv_bytes_per_block

# %% [markdown]
r"""
## 1. How much memory is a token?

Every layer keeps one key and one value per KV head. The engine's own arithmetic, for three models in
bfloat16:
"""

# %%
config = EngineConfig("any", dtype="bfloat16")
for name in ("smollm2-135m", "llama-3.2-1b", "qwen3-8b"):
    block = kv_bytes_per_block(config, PRESETS[name])
    print(
        f"{name:13} {block / config.cache.block_size / 1024:6.1f} KiB a token, "
        f"{block / 2**20:5.2f} MiB a block of {config.cache.block_size}, "
        f"{block * 8192 / config.cache.block_size / 2**20:6.0f} MiB for 8,192 tokens"
    )

# %% [markdown]
r"""
If each request got one contiguous piece of memory, it would have to be as long as the longest answer that
is allowed: 1,152 MiB for the 8B model, even if the answer turns out to be "yes". Most of it would stay
empty, and after some requests had come and gone the free memory would lie in pieces of the wrong size.

So the cache is cut into **blocks** of a few tokens (16 by default), and a request gets one more when its
last one is full. At most the last block of a request is partly empty. Nothing is ever moved. This is
PagedAttention (Kwon et al. 2023), and it is what an operating system does with pages.
"""

# %% [markdown]
r"""
## 2. Tables and slots

A request's **block table** lists its blocks. Token `i` lies in slot

`table[i // block_size] * block_size + i % block_size`

Two requests grow side by side in a pool of 9 blocks of 4 tokens. As in lesson 1, a running number stands
in for the model.
"""

# %%
fresh_token = itertools.count(1000)


def step(scheduler):
    """One step of the engine; returns the plan."""
    plan = scheduler.schedule()
    sampled = {}
    for request_id in plan.num_scheduled_tokens:
        request = scheduler.requests[request_id]
        if request.num_computed_tokens == request.num_tokens:
            sampled[request_id] = next(fresh_token)
    scheduler.update(plan, sampled)
    return plan


def run(scheduler):
    while scheduler.has_unfinished_requests:
        step(scheduler)


def make_scheduler(num_blocks, block_size=4, budget=64, caching=True):
    kv_cache = KVCacheManager(num_blocks, block_size, enable_caching=caching)
    config = SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=8)
    return Scheduler(config, kv_cache, max_model_len=10_000)


def make_request(name, prompt, max_tokens, salt=None):
    params = SamplingParams(max_tokens=max_tokens)
    return Request(name, prompt, params, max_tokens, cache_salt=salt)


# %%
scheduler = make_scheduler(num_blocks=9)
a = make_request("A", list(range(6)), max_tokens=20)
b = make_request("B", list(range(100, 107)), max_tokens=20)
scheduler.add_request(a)
scheduler.add_request(b)
for _ in range(7):
    step(scheduler)
for name in "AB":
    print(name, "has the table", scheduler.kv_cache.block_table(name))

# %%
draw_block_tables(scheduler.kv_cache, [a, b])

# %% [markdown]
r"""
Above and below are the requests as they see themselves, between them is the pool. The small numbers are
the slots. `A`'s tokens 8 to 11 lie behind `B`'s: nobody minds, because attention reads through the table.
The pale slots of block 7 are `B`'s already, but empty: its token 13 is known and will be computed in the
next step, the others do not exist yet. Never more than that is reserved.

**The null block.** Block 0 is never given to anybody. Tables are rows of a rectangular tensor on the device,
so short ones are filled up with something, and recorded CUDA graphs run with padded rows that belong to
no request. All of these point at block 0. A read of it is harmless because its result is not used; what
padding would *write* has slot -1, which every backend skips.

Here is a real step of the real engine. These are the tensors that the attention kernels read:
"""

# %%
from minivllm import LLM

llm = LLM("random:tiny", block_size=4, num_kv_blocks=12, max_model_len=32, max_num_batched_tokens=64)
engine, buffers = llm.engine, llm.engine.core.runner.buffers
greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
engine.add_request("A", [7, 8, 9, 10, 11, 12], greedy)
engine.add_request("B", [21, 22, 23], greedy)
engine.step()
print("first step")
print("positions:   ", buffers.positions.np[:9])
print("slot_mapping:", buffers.slot_mapping.np[:9])
for _ in range(3):
    engine.step()
print("fourth step")
print("positions:   ", buffers.positions.np[:2])
print("slot_mapping:", buffers.slot_mapping.np[:2])
print("block_table:")
print(buffers.block_table.np[:2])

# %% [markdown]
r"""
The first step computed 6 + 3 tokens, one flat batch; the fourth one token of each request, at positions 8
and 5. `A`'s position 8 is the first of its third block. The rest of each table is 0, the null block.

And this is the memory itself: one tensor per layer, keys and values. Read through `A`'s table, its keys
lie in order. The null block has never been written.
"""

# %%
cache = engine.core.runner.model.attention_layers()[0].kv_cache
print("[keys and values, blocks, block_size, kv heads, head size] =", list(cache.shape))
slots = [t * 4 + offset for t in engine.core.kv_cache.block_table("A") for offset in range(4)][:9]
keys = cache[0].flatten(0, 1)[slots]
print("A's nine tokens lie in slots", slots, "and all have keys:", bool((keys != 0).any(-1).all()))
print("null block untouched:", bool((cache[:, 0] == 0).all()))
llm.close()

# %% [markdown]
r"""
## 3. Who owns what, step by step

The picture to think with: blocks are rows, steps are columns. The strong part of a cell is filled, the
pale part is still empty.
"""

# %%
scheduler = make_scheduler(num_blocks=8, caching=False)
recording = Recording(scheduler)
scheduler.add_request(make_request("A", list(range(7)), max_tokens=8))
scheduler.add_request(make_request("B", list(range(100, 105)), max_tokens=4))
step(scheduler)
step(scheduler)
scheduler.add_request(make_request("C", list(range(200, 206)), max_tokens=5))
run(scheduler)
draw_ownership(recording, "without prefix caching")

# %% [markdown]
r"""
Blocks are taken one at a time, when the one before is full. When `B` ends after step 4, its blocks are free
at once, for anybody; when `A` needs its next block, it takes the one that has been free for longest.
There is no fragmentation, because all blocks are alike.
"""

# %% [markdown]
r"""
## 4. The same prefix twice: prefix caching

Requests often begin alike: a system prompt, a document, the conversation so far. Keys and values of a token
depend only on the tokens up to it. So if two requests agree from the first token on, they can *point at
the same blocks*.

How does one find them? Each **full** block gets a name, a hash of its tokens **and of the block before**:
"""

# %%
def chain(tokens, block_size=4, salt=None):
    hashes = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = hashes[-1] if hashes else None
        hashes.append(hash_block(parent, tokens[start : start + block_size], salt))
    return [block_hash.hex()[:6] for block_hash in hashes]


print("1 2 3 4 | 5 6 7 8 | 5 6 7 8      ", chain([1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 7, 8]))
print("1 2 3 4 | 5 6 7 8 | 9            ", chain([1, 2, 3, 4, 5, 6, 7, 8, 9]))
print("0 2 3 4 | 5 6 7 8                ", chain([0, 2, 3, 4, 5, 6, 7, 8]))
print("1 2 3 4 | 5 6 7 8, another user  ", chain([1, 2, 3, 4, 5, 6, 7, 8], salt="another user"))

# %% [markdown]
r"""
**Why a chain?** `5 6 7 8` has another name after every other beginning. It must: in a transformer, the keys
and values of `5 6 7 8` after `1 2 3 4` are not those after `0 2 3 4`. With the parent inside, equal names
mean equal *prefixes*, and one look-up per block finds the longest one that is cached.

**Why only full blocks?** A block that is not full is still being written, by its owner alone; sharing it
would mean copying it as soon as the two requests go on differently. And a name for every length would
mean a hash per token instead of one per block.

**Why the salt?** Somebody who shares an engine could learn from the time to the first token whether another
user has sent a certain prefix. Different salts share nothing.

Now a second request with the same beginning:
"""

# %%
scheduler = make_scheduler(num_blocks=9)
recording = Recording(scheduler)
system_prompt = list(range(9))
a = make_request("A", [*system_prompt, 50, 51], max_tokens=8)
scheduler.add_request(a)
step(scheduler)
b = make_request("B", [*system_prompt, 60, 61, 62], max_tokens=4)
scheduler.add_request(b)
plan = step(scheduler)
print("plan of the second step:", plan.num_scheduled_tokens)
print("B found", b.num_cached_tokens, "of its", b.num_prompt_tokens, "tokens in the cache")
print("tables: A", scheduler.kv_cache.block_table("A"), " B", scheduler.kv_cache.block_table("B"))
print("owners of blocks 1, 2, 3:", scheduler.kv_cache.pool.ref_counts[1:4])

# %%
draw_block_tables(scheduler.kv_cache, [a, b])

# %% [markdown]
r"""
Both tables begin with blocks 1 and 2, and the pool counts two owners for them. The ninth token is the same
too, but it lies in a block that was not full, so `B` computes it again, in a block of its own.
Nobody writes into a shared block: it is full, and everything new goes behind it.
"""

# %%
run(scheduler)
draw_ownership(recording, "blocks 1 and 2 have two owners")

# %% [markdown]
r"""
The rings mark the hit. A cell with two owners is split. And look at the right edge: when `A` and `B` have
ended, nobody owns their blocks, but those with a name are **hatched: free, and still findable**. They are
neither reserved nor lost. The next request with that prefix takes them back; anybody else who needs room
takes them for good.
"""

# %% [markdown]
r"""
### Why is the last token computed again on a full hit?

A prompt of exactly 8 tokens, all of them in two cached blocks:
"""

# %%
again = make_request("again", list(range(8)), max_tokens=2)
scheduler.add_request(again)
print("scheduled:", step(scheduler).num_scheduled_tokens, " cached:", again.num_cached_tokens)
run(scheduler)

# %% [markdown]
r"""
Only 4 of the 8 came from the cache. The cache holds keys and values, but what is sampled from is the
*output of the model* for the last token, and that was not kept. So at least one token must be computed;
and as hits come in whole blocks, it is the whole last block. vLLM does the same.

### When does a block become findable?

Here: in `update`, **after the step that filled it has run** (`KVCacheManager.index_full_blocks`). In vLLM:
in `allocate_slots`, when the tokens that will fill it are *scheduled*. What follows shows when two equal
prompts arrive at the same moment:
"""

# %%
def serve_twins(budget):
    scheduler = make_scheduler(num_blocks=16, budget=budget)
    recording = Recording(scheduler)
    for name in "ABC":
        scheduler.add_request(make_request(name, list(range(13)), max_tokens=3))
    run(scheduler)
    return recording


together = serve_twins(budget=64)
in_turn = serve_twins(budget=13)
for name, recording in [("budget 64", together), ("budget 13", in_turn)]:
    tokens = sum(step.total_tokens for step in recording.steps)
    print(f"{name}: {tokens} tokens computed in {len(recording.steps)} steps")

# %%
draw_timeline(together, "all three admitted in the same step: each computes everything")

# %%
draw_timeline(in_turn, "one after the other: the second and third find the first one's blocks")

# %% [markdown]
r"""
With the large budget all three are planned in the same step. None of their blocks is in the cache yet, so
each request computes its own copy. Only the first copy gets into the index, the others stay private.
vLLM would give all three the same blocks: the first request writes them and the others read them *in the
same forward pass*. That is correct only because in each layer all writes to the cache come before all
reads, and every change to the order of work (splitting a batch in two, for instance) has to keep it so.
We pay for a burst of equal prompts once, and in exchange **the index never names content that is not
there**. The difference lasts for one step.
"""

# %% [markdown]
r"""
## 5. Which content is given up first?

The free queue is the whole eviction policy. Blocks are taken at its head and returned at its tail, so what
was freed longest ago goes first. Within a request, **the last block is freed first**. Why?

Take a request with three full blocks in a pool of four, and free it in both orders. Then somebody needs two
blocks. What is left for a request that begins with the same 12 tokens?
"""

# %%
def hits_after(free):
    kv_cache = KVCacheManager(num_blocks=4, block_size=4)
    request = make_request("A", list(range(12)), max_tokens=1)
    kv_cache.allocate_slots(request, 12)
    request.num_computed_tokens = 12
    kv_cache.index_full_blocks(request)
    free(kv_cache, request)
    queue = list(kv_cache.pool.free_queue)
    kv_cache.pool.take_new(2)
    probe = make_request("probe", list(range(13)), max_tokens=1)
    return kv_cache, queue, len(kv_cache.find_cached_prefix(probe)) * 4


def last_first(kv_cache, request):
    kv_cache.free(request)  # what the engine does


def first_first(kv_cache, request):
    kv_cache.pool.release(kv_cache.tables.pop(request.request_id))


for name, free in [("last block first", last_first), ("first block first", first_first)]:
    kv_cache, queue, hits = hits_after(free)
    print(f"{name:18} queue {queue}, then two are taken: {hits} of 12 tokens can still be found")

# %% [markdown]
r"""
A chain is found from its head, so a block is useless without the ones before it. Freed last-first, a chain
loses its end and stays useful; freed first-first it loses its head, and the two blocks that survive can
never be found again.

Here is a busier pool. `A` ends, `B` needs room and evicts the *end* of `A`'s chain (crosses), and `C`, which
begins like `A`, still finds the beginning (rings).
"""

# %%
scheduler = make_scheduler(num_blocks=7)
recording = Recording(scheduler)
for name, prompt, max_tokens in [
    ("A", list(range(16)), 3),
    ("B", list(range(100, 111)), 8),
    ("C", list(range(17)), 3),
]:
    scheduler.add_request(make_request(name, prompt, max_tokens))
    run(scheduler)
draw_ownership(recording)

# %%
draw_free_queue(scheduler.kv_cache.pool)

# %% [markdown]
r"""
The free queue at the end, next to be taken first, with the first digits of each block's hash.

### Preemption is cheap with a cache

A preempted request's blocks are freed like any others. If nobody has taken them by the time it returns, it
finds its own work again. Lesson 1's traffic in a pool of six blocks, with and without caching:
"""

# %%
def serve_cramped(caching):
    scheduler = make_scheduler(num_blocks=6, budget=16, caching=caching)
    recording = Recording(scheduler)
    for i, (name, length, max_tokens) in enumerate([("A", 6, 8), ("B", 5, 8), ("C", 3, 4)]):
        prompt = list(range(100 * i, 100 * i + length))
        scheduler.add_request(make_request(name, prompt, max_tokens))
    run(scheduler)
    return recording


for caching in (False, True):
    recording = serve_cramped(caching)
    tokens = sum(s.total_tokens for s in recording.steps)
    print(f"caching {'on ' if caching else 'off'}: {tokens} tokens computed in {len(recording.steps)} steps")

# %%
draw_ownership(recording, "six blocks for three requests, with prefix caching")

# %% [markdown]
r"""
## 6. On the real engine

A long common prompt, and four questions. First all at once, then one ahead of the others:
"""

# %%
system_prompt = [(11 * i) % 250 + 1 for i in range(200)]
questions = [[*system_prompt, 10 + i, 20 + i, 30 + i] for i in range(4)]
greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

with LLM("random:tiny", num_kv_blocks=64, max_model_len=512, dtype="float32") as llm:
    outputs = llm.generate(questions, greedy)
    print("all at once:     cached", [output.num_cached_tokens for output in outputs])
    expected = [output.outputs[0].token_ids for output in outputs]

with LLM("random:tiny", num_kv_blocks=64, max_model_len=512, dtype="float32") as llm:
    outputs = llm.generate(questions[:1], greedy) + llm.generate(questions[1:], greedy)
    print("one goes ahead:  cached", [output.num_cached_tokens for output in outputs])
    print("same tokens:", expected == [output.outputs[0].token_ids for output in outputs])

    # The conversation goes on: the next prompt is everything so far, and a new question.
    next_turn = [*questions[0], *outputs[0].outputs[0].token_ids, 99, 98, 97]
    output = llm.generate([next_turn], greedy)[0]
    print(f"next turn:       cached {output.num_cached_tokens} of {len(next_turn)}")

# %% [markdown]
r"""
192 = 12 full blocks of 16; the 200 common tokens end in the middle of the thirteenth. In the next turn the
*generated* tokens are found too: a block is a block, whoever chose its tokens.

The walk through the code is in [the KV cache's page](../docs/modules/kv-cache.md), the names in vLLM are in
[the vLLM map](../docs/vllm-map.md).
"""

# %% [markdown]
r"""
## Exercises

Write your answer in the cell under the task, run it, and run the cell after it.

### Exercise 1: whose slot is this?

A token finds its slot through the table. Go the other way: write `owner_of(tables, slot, block_size)`, which
returns the request and the position whose keys and values belong into a slot, such as `("A", 9)`, or `None`
if the slot is in nobody's block. `tables` is a dict from request id to block table; no block is shared here.
The check runs the real engine for a few steps, notes the `slot_mapping` that its kernels got, and asks you
about every slot of the pool.
"""

# %% tags=["answer-1"]
def owner_of(tables, slot, block_size):
    return ...  # your answer


# %% [markdown] tags=["solution-1"]
r"""
<details>
<summary>Solution</summary>

```python
def owner_of(tables, slot, block_size):
    block, offset = divmod(slot, block_size)
    for request_id, table in tables.items():
        if block in table:
            return request_id, table.index(block) * block_size + offset
    return None
```

</details>
"""

# %% tags=["check-1"]
def record_slots():
    """Runs the engine: the slots that it wrote, with the token in each, and the tables at the end."""
    written = {}
    with LLM("random:tiny", block_size=4, num_kv_blocks=20, max_model_len=32) as llm:
        engine, buffers = llm.engine, llm.engine.core.runner.buffers
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        with Recording(engine.core.scheduler) as recording:
            for name, first, length in [("A", 1, 6), ("B", 20, 3), ("C", 40, 9), ("D", 60, 2)]:
                engine.add_request(name, list(range(first, first + length)), params)
                engine.step()
                # The runner puts requests with a single token first.
                works = sorted(recording.steps[-1].work, key=lambda work: work.count > 1)
                tokens = [(w.request_id, w.start + i) for w in works for i in range(w.count)]
                written |= zip(buffers.slot_mapping.np[: len(tokens)].tolist(), tokens)
    return written, recording.steps[-1].during.tables


def check_owners(function):
    if function({"A": (1,)}, 4, 4) is ...:
        return "No answer yet: fill in the cell above, run it, then run this one again."
    written, tables = record_slots()
    owned = {block for table in tables.values() for block in table}
    for slot in range(21 * 4):
        yours = function(tables, slot, 4)
        if slot in written:
            text = f"slot {slot}: you say {yours}, the engine wrote {written[slot]}"
            assert yours == written[slot], text
        elif slot // 4 not in owned:
            assert yours is None, f"slot {slot}: you say {yours}, but nobody owns block {slot // 4}"
    return f"Correct: all {len(written)} tokens are where you say, and the rest is free."


print(check_owners(owner_of))

# %% tags=["wrong-1"]
# Takes blocks to lie side by side.
def owner_of(tables, slot, block_size):
    for request_id, table in tables.items():
        if slot // block_size in table:
            return request_id, slot - table[0] * block_size
    return None


# %% tags=["wrong-1"]
# Forgets which block of the request it is.
def owner_of(tables, slot, block_size):
    for request_id, table in tables.items():
        if slot // block_size in table:
            return request_id, slot % block_size
    return None


# %% tags=["wrong-1"]
# Finds an owner for everything.
def owner_of(tables, slot, block_size):
    block, offset = divmod(slot, block_size)
    for request_id, table in tables.items():
        if block in table:
            return request_id, table.index(block) * block_size + offset
    return "A", 0


# %% [markdown]
r"""
### Exercise 2: predict the hits

Blocks of 4. `A` has the prompt `0 1 2 3 4 5 6 7 8 9`, generates 4 tokens and ends. Then **one** of these
requests arrives (always in a fresh engine in which only `A` has run). How many of its tokens come from
the cache?

| name | its prompt |
|---|---|
| `same` | `A`'s prompt |
| `eight` | the first 8 tokens of it |
| `first changed` | `A`'s prompt with token 0 replaced |
| `sixth changed` | `A`'s prompt with the token at position 5 replaced |
| `next turn` | `A`'s prompt, `A`'s 4 generated tokens, and 2 new tokens |
| `other user` | `A`'s prompt, with another `cache_salt` |
"""

# %% tags=["answer-2"]
hits = {
    "same": None,
    "eight": None,
    "first changed": None,
    "sixth changed": None,
    "next turn": None,
    "other user": None,
}

# %% [markdown] tags=["solution-2"]
r"""
<details>
<summary>Solution</summary>

```python
hits = {
    "same": 8,
    "eight": 4,
    "first changed": 0,
    "sixth changed": 4,
    "next turn": 12,
    "other user": 0,
}
```

`same`: two full blocks; the tokens 8 and 9 lie in a block that `A`'s own output filled up, so its name is
another one. `eight`: one token must be left to compute, which leaves one whole block. `first changed`: the
chain breaks at its head. `next turn`: `A` computed 10 + 3 tokens (its last one never), which are three
full blocks.

</details>
"""

# %% tags=["check-2"]
def real_hits():
    prompt, real = list(range(10)), {}
    for name in hits:
        scheduler = make_scheduler(num_blocks=16)
        a = make_request("A", prompt, max_tokens=4)
        scheduler.add_request(a)
        run(scheduler)
        other = {
            "same": prompt,
            "eight": prompt[:8],
            "first changed": [77, *prompt[1:]],
            "sixth changed": [*prompt[:5], 77, *prompt[6:]],
            "next turn": [*prompt, *a.output_token_ids, 77, 78],
            "other user": prompt,
        }[name]
        b = make_request("B", other, max_tokens=1, salt="b" if name == "other user" else None)
        scheduler.add_request(b)
        step(scheduler)
        real[name] = b.num_cached_tokens
    return real


def check_hits(answer):
    if None in answer.values():
        return "No answer yet: fill in the cell above, run it, then run this one again."
    for name, number in real_hits().items():
        assert answer[name] == number, f"{name}: you say {answer[name]}, the engine found {number}"
    return "Correct: the engine finds the same in all six cases."


print(check_hits(hits))

# %% tags=["wrong-2"]
# Counts single tokens.
hits = {"same": 10, "eight": 8, "first changed": 0, "sixth changed": 5, "next turn": 14, "other user": 0}

# %% tags=["wrong-2"]
# Forgets that something is left to compute.
hits = {"same": 8, "eight": 8, "first changed": 0, "sixth changed": 4, "next turn": 12, "other user": 0}

# %% tags=["wrong-2"]
# Believes that a block is found wherever it stands.
hits = {"same": 8, "eight": 4, "first changed": 4, "sixth changed": 4, "next turn": 12, "other user": 0}

# %% [markdown]
r"""
### Exercise 3: follow the free queue

A pool of 6 blocks of 4 tokens, all free, in the order 1 to 6. `A` (prompt of 9 tokens, `max_tokens` 1) runs
and ends, then `B` (another prompt, of 8 tokens, `max_tokens` 1).

1. What is the free `queue` now, next to be taken first?
2. `C` comes with a new prompt of 12 tokens. Which blocks lose content that could be found (`evicted`)?
3. While `C` runs, how many tokens of `A`'s prompt (`hits_a`) can still be found?
"""

# %% tags=["answer-3"]
queue = None  # your answer: a list of six block ids
evicted = None  # your answer: a list of block ids
hits_a = None  # your answer

# %% [markdown] tags=["solution-3"]
r"""
<details>
<summary>Solution</summary>

```python
queue = [6, 3, 2, 1, 5, 4]
evicted = [2]
hits_a = 4
```

`A` takes 1, 2, 3 and frees them last-first: 4 5 6 **3 2 1**. `B` takes 4 and 5: 6 3 2 1 **5 4**. `C` takes 6,
3 and 2. Block 6 was never used, and block 3 held a single token, so it never had a name. Only block 2 is
lost; the head of `A`'s chain, block 1, is still there.

</details>
"""

# %% tags=["check-3"]
def check_queue(queue, evicted, hits_a):
    if queue is None or evicted is None or hits_a is None:
        return "No answer yet: fill in the cell above, run it, then run this one again."
    scheduler = make_scheduler(num_blocks=6)
    for name, first, length in [("A", 0, 9), ("B", 100, 8)]:
        scheduler.add_request(make_request(name, list(range(first, first + length)), max_tokens=1))
        run(scheduler)
    real_queue = list(scheduler.kv_cache.pool.free_queue)
    assert list(queue) == real_queue, f"the queue is {real_queue}"
    with Recording(scheduler) as recording:
        scheduler.add_request(make_request("C", list(range(200, 212)), max_tokens=2))
        step(scheduler)
    real_evicted = recording.steps[0].evicted
    assert sorted(evicted) == real_evicted, f"evicted are {real_evicted}"
    probe = make_request("probe", list(range(9)), max_tokens=1)
    real_hits_a = len(scheduler.kv_cache.find_cached_prefix(probe)) * 4
    assert hits_a == real_hits_a, f"the engine still finds {real_hits_a} tokens"
    return "Correct: that is the engine's queue, and what it gives up."


print(check_queue(queue, evicted, hits_a))

# %% tags=["wrong-3"]
# Frees the first block first.
queue, evicted, hits_a = [6, 1, 2, 3, 4, 5], [1, 2], 0

# %% tags=["wrong-3"]
# Counts a block that never had a name.
queue, evicted, hits_a = [6, 3, 2, 1, 5, 4], [2, 3], 4

# %% tags=["wrong-3"]
queue, evicted, hits_a = [6, 3, 2, 1, 5, 4], [2], 8

# %% [markdown]
r"""
Back to [1 · The scheduler](01_scheduler.ipynb).
"""
