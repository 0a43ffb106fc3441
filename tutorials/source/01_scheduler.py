# %% [markdown]
r"""
# 1 · The scheduler

An inference engine serves many requests at once. Before every forward pass somebody has to decide
**which requests compute how many tokens**. In vLLM V1, and here, that is one loop with one budget.
In this lesson you drive the engine's own scheduler by hand and watch it decide.

You will see

* why two counters per request are enough, and why there is no "prefill phase" and no "decode phase";
* how a long prompt is cut into chunks, and what that does to the requests that are generating;
* what happens when memory runs out, who pays, and why nobody waits for ever.

Everything here is the real thing: [`Scheduler`](../minivllm/engine/scheduler.py),
[`KVCacheManager`](../minivllm/engine/kv_cache.py) and [`Request`](../minivllm/engine/request.py) are
the classes that serve a model. Only the model itself is left out until section 4, because the
scheduler never looks at it. The notebook needs no GPU.
"""

# %%
# %matplotlib inline
import itertools

from minivllm.config import SchedulerConfig
from minivllm.engine.kv_cache import KVCacheManager
from minivllm.engine.request import Request
from minivllm.engine.scheduler import Scheduler
from minivllm.inspect import (
    Recording,
    draw_budget,
    draw_gap,
    draw_ownership,
    draw_timeline,
    draw_token_times,
)
from minivllm.sampling_params import SamplingParams

# %% [markdown]
r"""
## The engine's loop, without a model

`EngineCore.step` is three lines: **schedule** a plan, **execute** it, **update** the requests with
the tokens that came out. For now the middle line is a stand-in: every request whose last known token
was computed gets some next token, here a running number. That is exactly the contract that the
model runner fulfils.
"""

# %%
fresh_token = itertools.count(1000)


def step(scheduler):
    """One step of the engine; returns the plan."""
    plan = scheduler.schedule()
    sampled = {}
    for request_id in plan.num_scheduled_tokens:
        request = scheduler.requests[request_id]
        if request.num_computed_tokens == request.num_tokens:  # its gap is closed
            sampled[request_id] = next(fresh_token)
    scheduler.update(plan, sampled)
    return plan


def run(scheduler):
    """Steps until nothing is left to do; returns the plans."""
    plans = []
    while scheduler.has_unfinished_requests:
        plans.append(step(scheduler).num_scheduled_tokens)
    return plans


def make_scheduler(budget, num_blocks=64, block_size=4, max_num_seqs=8):
    """A real scheduler over a real KV cache. Prefix caching comes in lesson 2; here it is off."""
    kv_cache = KVCacheManager(num_blocks, block_size, enable_caching=False)
    config = SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=max_num_seqs)
    return Scheduler(config, kv_cache, max_model_len=10_000)


def make_request(name, prompt_length, max_tokens):
    prompt = list(range(prompt_length))
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens), max_tokens)


# %% [markdown]
r"""
## 1. Two counters and a gap

All that the scheduler knows of a request's progress is

* `num_tokens`: how many tokens it has, prompt and output together;
* `num_computed_tokens`: for how many of them keys and values are in the cache.

The difference is the work to do. Here is one request with a prompt of 10 tokens and a budget of
4 tokens per step.
"""

# %%
scheduler = make_scheduler(budget=4)
recording = Recording(scheduler)
scheduler.add_request(make_request("A", prompt_length=10, max_tokens=4))
for number, plan in enumerate(run(scheduler), start=1):
    print(f"step {number}: {plan}")

# %%
draw_gap(recording, "A")

# %% [markdown]
r"""
Read the picture from left to right. The black line is what is known. In steps 1 and 2 the gap is
larger than the budget, so it is closed by four. In step 3 it closes, and **because** it closes, a
token is sampled: the black line rises by one, and there is a gap of one again. From then on each step
closes a gap of one and opens the next one.

What people call *prefill* is a gap larger than one. What they call *decode* is a gap of one. The
scheduler does not distinguish them, and so needs no rule for when to switch from one to the other.
Chunked prefill, prefix-cache hits (the counter simply starts higher) and preemption (the counter goes
back to zero) all fall out of the same two numbers.

One detail: the last sampled token (the fourth) is never computed. Nobody asks for what comes after it,
so it needs no slot in the cache. Remember that for exercise 3.
"""

# %% [markdown]
r"""
## 2. One budget for everybody: chunked prefill

`A` is generating when `B` arrives with a prompt of 20 tokens. The budget is 8 tokens per step.
"""

# %%
scheduler = make_scheduler(budget=8)
recording = Recording(scheduler)
scheduler.add_request(make_request("A", prompt_length=3, max_tokens=9))
step(scheduler)
step(scheduler)
scheduler.add_request(make_request("B", prompt_length=20, max_tokens=4))
run(scheduler)
draw_budget(recording, "budget 8: B's prompt comes in chunks")

# %%
draw_timeline(recording)

# %% [markdown]
r"""
In steps 3 to 5 running requests come first, so `A` gets its one token; **the rest of the budget** goes
to `B`: 7, 7 and 6 tokens. `B` samples nothing until its gap closes at the end of step 5. `A` never
skips a step.

This is the plan of step 3 as the model runner receives it. It is a *difference*: `B` is new, so
everything about it is sent; `A` is known, so only what changed is.
"""

# %%
scheduler = make_scheduler(budget=8)
scheduler.add_request(make_request("A", prompt_length=3, max_tokens=9))
step(scheduler)
step(scheduler)
scheduler.add_request(make_request("B", prompt_length=20, max_tokens=4))
plan = step(scheduler)
print("num_scheduled_tokens:", plan.num_scheduled_tokens)
for new in plan.new_requests:
    print(f"new:    {new.request_id}, {len(new.prompt_token_ids)} prompt tokens, blocks {new.block_ids}")
for cached in plan.cached_requests:
    print(
        f"cached: {cached.request_id}, {cached.num_computed_tokens} tokens computed, "
        f"new blocks {cached.new_block_ids}"
    )

# %% [markdown]
r"""
Notice `B`'s blocks: 7 tokens now, so 2 blocks of 4 now. Blocks are given out when tokens need them, not
when a request arrives.

With a large budget, the same arrival looks like this:
"""

# %%
scheduler = make_scheduler(budget=64)
recording = Recording(scheduler)
scheduler.add_request(make_request("A", prompt_length=3, max_tokens=9))
step(scheduler)
step(scheduler)
scheduler.add_request(make_request("B", prompt_length=20, max_tokens=4))
run(scheduler)
draw_budget(recording, "budget 64: the whole prompt at once")

# %% [markdown]
r"""
`B` has its first token two steps earlier. But step 3 is now a step of 21 tokens, and `A`'s token of that
step comes only when all 21 are done. Both requests share the step, so both pay for the longest part of
it. **The budget is a promise to the requests that are generating: no step will compute more tokens than this.**

| | small budget | large budget |
|---|---|---|
| pause of running requests when a prompt arrives | short | long |
| time until a new request's first token | longer | shorter |
| fixed cost per step (launches, reading all weights) | paid more often | paid less often |

How much each line matters depends on the machine. So let us measure.
"""

# %% [markdown]
r"""
## 3. The other limits

A step ends when the budget is spent, when `max_num_seqs` requests run, or when the next waiting request
does not fit into the pool. Waiting requests are taken strictly in their order: a small one does not
overtake a large one that does not fit yet, or the large one might wait for ever.
"""

# %%
scheduler = make_scheduler(budget=16, max_num_seqs=2)
recording = Recording(scheduler)
for name, prompt_length, max_tokens in [("A", 6, 3), ("B", 4, 6), ("C", 5, 3), ("D", 2, 2)]:
    scheduler.add_request(make_request(name, prompt_length, max_tokens))
run(scheduler)
draw_timeline(recording, "at most two requests run at a time")

# %% [markdown]
r"""
`C` enters in the step after `A` has finished, `D` in the step after the next one has. Requests come and go
between any two steps; nobody waits for a batch to end. That is *continuous batching* (Yu et al. 2022,
"Orca").

A request that could never fit, however long it waits, is refused at the door, with the numbers:
"""

# %%
from minivllm.errors import InvalidRequestError

scheduler = make_scheduler(budget=16, num_blocks=8, block_size=4)
try:
    scheduler.add_request(make_request("huge", prompt_length=30, max_tokens=5))
except InvalidRequestError as error:
    print(error)

# %% [markdown]
r"""
## 4. What chunks do to a running request: measured on a real model

Now the whole engine: a real transformer with random weights, the same scheduler inside. `A` generates 40
tokens. After its tenth token, `B` arrives with a prompt of 1,000 tokens. We record three runs with
different budgets and look at the moments at which `A` got its tokens.

A `Recording` stands in front of the engine's own scheduler and notes what it does.
"""

# %%
from minivllm import LLM


def serve(budget):
    """A generates; a long prompt arrives in the middle. Returns the recording and A's tokens."""
    with LLM("random:tiny", num_kv_blocks=128, max_num_batched_tokens=budget, dtype="float32") as llm:
        engine = llm.engine
        tokens = [(7 * i) % 250 + 1 for i in range(1000)]
        greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        llm.generate([tokens[:16]], greedy)  # the first steps of a process are slow; not recorded
        with Recording(engine.core.scheduler) as recording:
            engine.add_request("A", tokens[:16], greedy)
            outputs = [output for _ in range(10) for output in engine.step()]
            engine.add_request("B", tokens[::-1], SamplingParams(temperature=0, max_tokens=4))
            while engine.has_unfinished_requests:
                outputs += engine.step()
        answer = next(output for output in outputs if output.request_id == "A")
        return recording, answer.outputs[0].token_ids


runs = {budget: serve(budget) for budget in (32, 128, 2048)}
for budget, (recording, _) in runs.items():
    prompt_steps = sum(1 for s in recording.steps if (w := s.work_of("B")) and w.kind == "prefill")
    longest = max(s.total_tokens for s in recording.steps)
    print(f"budget {budget:4}: B's prompt took {prompt_steps:2} steps; longest step {longest:4} tokens")

# %%
draw_token_times({f"budget {budget}": recording for budget, (recording, _) in runs.items()}, "A")

# %% [markdown]
r"""
With the large budget, `A` stands still while `B`'s 1,000 tokens are computed in one step. With the small
one, its tokens keep coming, each a little slower than usual, for as long as `B`'s prompt lasts. The
times are those of the machine that made this notebook; run it on yours.

What must **not** change is the result. How a prompt is cut up, and who else is in the batch, is
nobody's business but the scheduler's. (We asked for float32. In bfloat16, the default on a GPU, a sum that
is rounded in another order can tip the scales between two equally good tokens.)
"""

# %%
answers = [answer for _, answer in runs.values()]
print("A's tokens are the same in all runs:", all(answer == answers[0] for answer in answers))

# %% [markdown]
r"""
## 5. When the pool is empty: preemption

A request's cache grows by a token per step. The scheduler admits requests as long as their *next* tokens
fit, because most requests end long before their limit and memory kept for later would be memory wasted.
So it can happen that running requests want more blocks than there are.

Three requests, and a pool of only 6 blocks of 4 tokens:
"""

# %%
scheduler = make_scheduler(budget=16, num_blocks=6, block_size=4)
recording = Recording(scheduler)
for name, prompt_length, max_tokens in [("A", 6, 8), ("B", 5, 8), ("C", 3, 4)]:
    scheduler.add_request(make_request(name, prompt_length, max_tokens))
run(scheduler)
draw_timeline(recording, "six blocks for three requests")

# %%
draw_ownership(recording)

# %% [markdown]
r"""
The second picture is the pool: one row per block, one column per step, coloured by owner. Follow it:

* When a running request needs a block and none is free, **the request that was admitted last** gives up
  all its blocks at once (the red cross). It goes to the *head* of the waiting queue, with
  `num_computed_tokens = 0`. Its generated tokens are kept: they are simply prompt now.
* When it is admitted again, it computes them again (cross-hatched), and goes on where it was.
* In a step that preempts, nobody is admitted. Otherwise the request that had just left, being first in
  line, would take back the very blocks that were missing, and be thrown out again in the next step.

**Why the last one, and why does nobody starve?** The oldest running request is never the victim as long as
anybody else runs, so it always makes progress and always finishes; then the next one is the oldest. A
request alone in the pool always fits, because one that does not was refused at the door.

**Why throw work away?** Copying blocks to the host and back is the alternative ("swapping", which vLLM
once had). Computing again uses the machine at its best, as one large chunk, and with prefix caching most
of it is found in the cache anyway: lesson 2 shows the same traffic with caching on.

And the tokens are the same as with plenty of memory. On the real model:
"""

# %%
def generate(num_kv_blocks):
    """Four requests in a pool of the given size: their tokens, and how often somebody had to leave."""
    with LLM("random:tiny", num_kv_blocks=num_kv_blocks, max_model_len=64, dtype="float32") as llm:
        prompts = [[10 * i + k for k in range(12)] for i in range(1, 5)]
        greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        outputs = llm.generate(prompts, greedy)
        return [o.outputs[0].token_ids for o in outputs], llm.stats()["scheduler"]["num_preemptions"]


roomy, _ = generate(num_kv_blocks=64)
cramped, num_preemptions = generate(num_kv_blocks=9)
print("preemptions in the small pool:", num_preemptions)
print("same tokens:", roomy == cramped)

# %% [markdown]
r"""
## 6. What vLLM does differently

The loop above is vLLM V1's: running first, then waiting unless somebody was preempted, one budget, victim
from the end of the list. vLLM's `Scheduler.schedule` is longer because it also serves drafts of
speculative decoding, image encoders, LoRA limits, KV transfer between machines, priorities, and steps
that are planned before the last one's tokens are known. The table of names is in
[the vLLM map](../docs/vllm-map.md); the walk through the code is in
[the scheduler's page](../docs/modules/scheduler.md).
"""

# %% [markdown]
r"""
## Exercises

Write your answer in the cell under the task, run it, and run the cell after it: it asks the real
scheduler. The solutions are folded away.

### Exercise 1: be the scheduler

The budget is 8. `A` (prompt 2, `max_tokens` 4) and `B` (prompt 13, `max_tokens` 2) are added together,
`A` first. Write down the plan of every step until both have finished, as a list of dicts, such as
`[{"A": 2, "B": 6}, ...]`.
"""

# %% tags=["answer-1"]
my_plans = None  # your answer: a list of dicts

# %% [markdown] tags=["solution-1"]
r"""
<details>
<summary>Solution</summary>

```python
my_plans = [{"A": 2, "B": 6}, {"A": 1, "B": 7}, {"A": 1, "B": 1}, {"A": 1}]
```

`A` closes its gap in step 1, so it samples then, and has one token to compute in each of the next three
steps. `B` gets what is left: 6 tokens, then 7, which makes 13: its gap closes in step 2, not in step 3.
Its second token is its last, and is not computed.

</details>
"""

# %% tags=["check-1"]
def check_plans(answer):
    if answer is None:
        return "No answer yet: fill in the cell above, run it, then run this one again."
    scheduler = make_scheduler(budget=8)
    scheduler.add_request(make_request("A", prompt_length=2, max_tokens=4))
    scheduler.add_request(make_request("B", prompt_length=13, max_tokens=2))
    real = run(scheduler)
    for number, (yours, engines) in enumerate(itertools.zip_longest(answer, real), start=1):
        assert yours == engines, f"step {number}: you say {yours}, the scheduler says {engines}"
    return f"Correct: the scheduler makes the same {len(real)} plans."


print(check_plans(my_plans))

# %% tags=["wrong-1"]
# Forgets that A's token comes out of the same budget.
my_plans = [{"A": 2, "B": 6}, {"A": 1, "B": 8}, {"A": 1, "B": 1}, {"A": 1}]

# %% tags=["wrong-1"]
# Computes the last sampled tokens too.
my_plans = [{"A": 2, "B": 6}, {"A": 1, "B": 7}, {"A": 1, "B": 1}, {"A": 1, "B": 1}, {"A": 1}]

# %% [markdown]
r"""
### Exercise 2: choose a budget

On some machine, a step of `t` tokens takes `2 + 0.5 · t` milliseconds. `A` is generating when `B` arrives
with a prompt of 100 tokens. `A`'s reader must never wait longer than 20 ms for a token, and `B` should be
served as fast as that allows. Which `budget` do you choose, and in how many steps (`steps_for_b`) is
`B`'s prompt computed then?
"""

# %% tags=["answer-2"]
budget = None  # your answer
steps_for_b = None  # your answer

# %% [markdown] tags=["solution-2"]
r"""
<details>
<summary>Solution</summary>

```python
budget = 36
steps_for_b = 3
```

2 + 0.5 · 36 = 20 ms. One token of each step is `A`'s, so `B` gets 35, 35 and 30.

</details>
"""

# %% tags=["check-2"]
def longest_step_and_chunks(budget):
    scheduler = make_scheduler(budget)
    recording = Recording(scheduler)
    scheduler.add_request(make_request("A", prompt_length=3, max_tokens=60))
    step(scheduler)
    scheduler.add_request(make_request("B", prompt_length=100, max_tokens=2))
    run(scheduler)
    chunks = [w for s in recording.steps if (w := s.work_of("B")) and w.kind == "prefill"]
    return max(2 + 0.5 * s.total_tokens for s in recording.steps), len(chunks)


def check_budget(budget, steps_for_b):
    if budget is None or steps_for_b is None:
        return "No answer yet: fill in the cell above, run it, then run this one again."
    longest, chunks = longest_step_and_chunks(budget)
    assert longest <= 20, f"with budget {budget}, A waits {longest} ms for a token"
    assert longest_step_and_chunks(budget + 1)[0] > 20, f"a budget of {budget + 1} would do as well"
    assert steps_for_b == chunks, f"the scheduler computes B's prompt in {chunks} steps"
    return f"Correct: the longest step takes {longest} ms, and B's prompt {chunks} steps."


print(check_budget(budget, steps_for_b))

# %% tags=["wrong-2"]
budget, steps_for_b = 40, 3

# %% tags=["wrong-2"]
# Keeps the promise, but B could be served faster.
budget, steps_for_b = 30, 4

# %% tags=["wrong-2"]
budget, steps_for_b = 36, 4

# %% [markdown]
r"""
### Exercise 3: how large must the pool be?

`n` requests arrive together, each with a prompt of `prompt_length` tokens and `max_tokens` tokens to
generate. Write `blocks_needed`, which returns the smallest number of blocks with which all of them run
together to the end and **nobody is ever preempted**.
"""

# %% tags=["answer-3"]
def blocks_needed(n, prompt_length, max_tokens, block_size):
    return None  # your answer


# %% [markdown] tags=["solution-3"]
r"""
<details>
<summary>Solution</summary>

```python
def blocks_needed(n, prompt_length, max_tokens, block_size):
    num_slots = prompt_length + max_tokens - 1  # the last token is sampled, but never computed
    return n * -(-num_slots // block_size)  # a block has one owner: round up for each request
```

</details>
"""

# %% tags=["check-3"]
def num_preemptions(num_blocks, n, prompt_length, max_tokens, block_size):
    scheduler = make_scheduler(1000, num_blocks, block_size)
    for i in range(n):
        scheduler.add_request(make_request(str(i), prompt_length, max_tokens))
    run(scheduler)
    return scheduler.stats.num_preemptions


def check_blocks(function):
    cases = [(3, 6, 10, 4), (2, 5, 12, 4), (4, 7, 8, 8), (2, 7, 10, 16), (3, 1, 9, 2)]
    for case in cases:
        answer = function(*case)
        if answer is None:
            return "No answer yet: fill in the cell above, run it, then run this one again."
        text = "n={}, prompt_length={}, max_tokens={}, block_size={}".format(*case)
        try:
            assert num_preemptions(answer, *case) == 0, f"{text}: {answer} blocks are too few"
        except InvalidRequestError:
            raise AssertionError(f"{text}: {answer} blocks do not even hold one request") from None
        if answer > case[0]:
            fewer = f"{text}: {answer - 1} blocks would do"
            assert num_preemptions(answer - 1, *case) > 0, fewer
    return f"Correct: in all {len(cases)} cases nobody is preempted, and with a block less somebody is."


print(check_blocks(blocks_needed))

# %% tags=["wrong-3"]
# Wants a slot for the last token.
def blocks_needed(n, prompt_length, max_tokens, block_size):
    return n * -(-(prompt_length + max_tokens) // block_size)


# %% tags=["wrong-3"]
# Lets requests share a half-full block.
def blocks_needed(n, prompt_length, max_tokens, block_size):
    return -(-n * (prompt_length + max_tokens - 1) // block_size)


# %% [markdown]
r"""
Next: [2 · The paged KV cache](02_paged_kv_cache.ipynb), where the blocks come from.
"""
