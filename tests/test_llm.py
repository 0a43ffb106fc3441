"""The offline API: what goes in, what comes out, what is refused, and what survives a refusal."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.errors import ConfigError, InvalidRequestError, ModelError, OutOfMemoryError
from minivllm.models.presets import PRESETS

GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def llm():
    with LLM("random:tiny", device="cpu", max_model_len=128) as llm:
        yield llm


@pytest.fixture(scope="module")
def smollm2():
    with LLM("smollm2", device="cpu", dtype="float32", max_model_len=512) as llm:
        yield llm


def test_one_prompt_a_list_and_a_dict_are_all_accepted(llm: LLM) -> None:
    one = llm.generate([1, 2, 3], GREEDY)
    several = llm.generate([[1, 2, 3], {"prompt_token_ids": [1, 2, 3]}], GREEDY)
    assert [len(one), len(several)] == [1, 2]
    tokens = {tuple(o.outputs[0].token_ids) for o in one + several}
    assert len(tokens) == 1
    assert one[0].prompt_token_ids == [1, 2, 3]


def test_each_prompt_can_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n) for n in (1, 4)]
    outputs = llm.generate([[1], [2]], params)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 4]
    with pytest.raises(InvalidRequestError, match="2 sampling parameters for 1 prompts"):
        llm.generate([[1]], params)


def test_seeded_requests_get_the_same_tokens_alone_and_in_a_batch(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=20, seed=7)
    alone = llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids
    others = [SamplingParams(temperature=0.9, max_tokens=30)] * 5
    crowd = llm.generate([[i] * 9 for i in range(5)] + [[5, 6, 7]], [*others, params])
    assert crowd[-1].outputs[0].token_ids == alone


def test_a_seed_survives_preemption() -> None:
    params = [SamplingParams(max_tokens=40, seed=i) for i in range(4)]
    prompts = [[i + 1] * 30 for i in range(4)]
    with LLM("random:tiny", device="cpu", max_model_len=128) as roomy:
        expected = [o.outputs[0].token_ids for o in roomy.generate(prompts, params)]
    with LLM("random:tiny", device="cpu", max_model_len=80, num_kv_blocks=12) as tight:
        outputs = tight.generate(prompts, params)
        assert tight.stats()["scheduler"]["num_preemptions"] > 0
    assert [o.outputs[0].token_ids for o in outputs] == expected


def test_unseeded_requests_differ(llm: LLM) -> None:
    outputs = llm.generate([[1, 2]] * 3, SamplingParams(temperature=1.0, max_tokens=12))
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 3


def test_n_completions_share_a_prompt_and_differ(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, max_tokens=8, seed=1)
    first, again = (llm.generate([[1, 2, 3]], params)[0] for _ in range(2))
    assert [c.index for c in first.outputs] == [0, 1, 2]
    tokens = [c.token_ids for c in first.outputs]
    assert len({tuple(t) for t in tokens}) == 3
    assert tokens == [c.token_ids for c in again.outputs]


def test_logprobs_add_up_and_are_ranked(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=3)
    completion = llm.generate([[1, 2, 3]], params)[0].outputs[0]
    assert completion.logprobs is not None
    sampled = [e[t] for e, t in zip(completion.logprobs, completion.token_ids, strict=True)]
    assert completion.cumulative_logprob == pytest.approx(sum(e.logprob for e in sampled))
    assert all(entry.rank == 1 for entry in sampled)
    assert all(len(entries) == 3 for entries in completion.logprobs)


def test_timings_are_in_order(llm: LLM) -> None:
    output = llm.generate([[1, 2, 3]], GREEDY)[0]
    m = output.metrics
    assert m.arrival <= m.scheduled <= m.first_token <= m.finished
    assert m.time_to_first_token >= m.queue_time >= 0
    assert m.time_per_output_token(6) == pytest.approx((m.finished - m.first_token) / 5)


def test_streaming_yields_growing_outputs_and_then_the_same_result(llm: LLM) -> None:
    whole = llm.generate([[4, 5]], GREEDY)[0].outputs[0].token_ids
    seen = [o.outputs[0].token_ids for o in llm.stream([4, 5], GREEDY)]
    assert seen == [whole[: i + 1] for i in range(len(whole))]


def test_leaving_a_stream_early_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream([4, 5], SamplingParams(max_tokens=50))
    next(stream)
    assert llm.stats()["kv_cache"]["num_used_blocks"] > 0
    stream.close()
    assert llm.stats()["kv_cache"]["num_used_blocks"] == 0
    assert not llm.engine.has_unfinished_requests


def test_a_stream_and_a_call_of_generate_can_overlap(llm: LLM) -> None:
    expected = llm.generate([[4, 5]], GREEDY)[0].outputs[0].token_ids
    stream = llm.stream([4, 5], GREEDY)
    next(stream)
    assert llm.generate([[4, 5]], GREEDY)[0].outputs[0].token_ids == expected
    *_, last = stream
    assert last.outputs[0].token_ids == expected


def test_abort_frees_everything_at_once_and_returns_what_there_is(llm: LLM) -> None:
    llm.engine.add_request("x", [1, 2, 3], SamplingParams(n=2, max_tokens=50))
    llm.engine.step()
    output = llm.engine.abort_request("x")
    assert [c.finish_reason for c in output.outputs] == ["abort", "abort"]
    assert [len(c.token_ids) for c in output.outputs] == [1, 1]
    assert llm.stats()["kv_cache"]["num_used_blocks"] == 0
    assert not llm.engine.has_unfinished_requests
    assert llm.engine.abort_request("x") is None


def test_max_tokens_is_cut_to_the_context_length(llm: LLM) -> None:
    for max_tokens in (None, 1000):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        completion = llm.generate([[1] * 120], params)[0].outputs[0]
        assert len(completion.token_ids) == 8
        assert completion.finish_reason == "length"


def test_a_stop_token_ends_the_output(llm: LLM) -> None:
    free = llm.generate([[9, 8]], GREEDY)[0].outputs[0].token_ids
    params = dataclasses.replace(GREEDY, stop_token_ids=[free[2]])
    completion = llm.generate([[9, 8]], params)[0].outputs[0]
    assert completion.token_ids == free[: free.index(free[2]) + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", free[2])


BAD_PROMPTS = {
    "empty": ([], "the prompt is empty"),
    "too long": ([1] * 128, "128 tokens, but the context length is 128"),
    "token too large": ([1, 512], r"token id 512 is out of range: .* 0 to 511"),
    "negative token": ([-1], "token id -1 is out of range"),
    "text without a tokenizer": ("Hello", "has no tokenizer"),
    "neither text nor tokens": ([1.5, 2], "expected a string, a list of token ids"),
    "a dict without tokens": ({"prompt": "x"}, "expected a string, a list of token ids"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt_is_refused_in_one_line_and_harms_nobody(llm: LLM, name: str) -> None:
    prompt, message = BAD_PROMPTS[name]
    llm.engine.add_request("other", [1, 2], GREEDY)
    with pytest.raises(InvalidRequestError, match=message) as caught:
        llm.generate([[3, 4], prompt], GREEDY)
    assert "\n" not in str(caught.value)
    assert list(llm.engine.core.scheduler.requests) == ["other"]
    outputs = []
    while llm.engine.has_unfinished_requests:
        outputs += llm.engine.step()
    assert [len(o.outputs[0].token_ids) for o in outputs] == [6]


def test_stop_strings_without_a_tokenizer_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="needs a tokenizer"):
        llm.generate([[1]], SamplingParams(stop="x"))


BAD_CONFIGS = {
    "device": ({"device": "tpu"}, "device='tpu': expected one of auto, cpu, cuda"),
    "dtype": ({"dtype": "int8"}, "dtype='int8'"),
    "block size": ({"block_size": 12}, "block_size=12: expected a power of two"),
    "budget": ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0"),
    "huge budget": ({"max_num_batched_tokens": 10**12}, "expected at most 1,048,576"),
    "many sequences": ({"max_num_seqs": 10**9}, "max_num_seqs=1000000000: expected at most"),
    "endless pool": ({"num_kv_blocks": 10**18}, "num_kv_blocks=1000000000000000000: expected at"),
    "endless seed": ({"seed": 10**23}, "seed=100000000000000000000000: expected an integer in"),
    "utilisation": ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5"),
    "too long": ({"max_model_len": 10**6}, "more than the model was made for"),
    "pool too small": ({"max_model_len": 64, "num_kv_blocks": 3}, "needs 4 KV blocks of 16"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_a_bad_configuration_fails_when_the_engine_is_built(name: str) -> None:
    options, message = BAD_CONFIGS[name]
    with pytest.raises(ConfigError, match=message):
        LLM("random:tiny", **{"device": "cpu", **options})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_gpu_is_named() -> None:
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        LLM("random:tiny", device="cuda")


def test_a_pool_beyond_all_memory_is_one_clear_error() -> None:
    with pytest.raises(OutOfMemoryError, match="a KV cache of 1000000000 blocks takes"):
        LLM("random:tiny", device="cpu", num_kv_blocks=10**9)


def test_the_context_length_follows_the_pool_when_none_was_asked_for() -> None:
    with LLM("random:tiny", device="cpu", num_kv_blocks=3) as llm:
        assert llm.engine.core.max_model_len == 48


def test_an_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"smollm2-135m"):
        LLM("random:nothing", device="cpu")


@pytest.mark.parametrize("preset", [name for name in PRESETS if name.startswith("tiny")])
def test_every_tiny_preset_generates(preset: str) -> None:
    with LLM(f"random:{preset}", device="cpu") as llm:
        assert len(llm.generate([[1, 2]], GREEDY)[0].outputs[0].token_ids) == 6


def test_a_closed_llm_says_so() -> None:
    llm = LLM("random:tiny", device="cpu")
    llm.close()
    llm.close()
    with pytest.raises(ConfigError, match="closed"):
        llm.generate([[1]])


def test_a_stop_string_ends_the_output_and_frees_the_request(smollm2: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40)
    free = smollm2.generate("The first president of the United States was", params)[0]
    stop = free.outputs[0].text[12:20]  # begins and ends inside of tokens
    params = dataclasses.replace(params, stop=[stop])
    completion = smollm2.generate("The first president of the United States was", params)[0]
    assert completion.outputs[0].text == free.outputs[0].text[:12]
    assert completion.outputs[0].finish_reason == "stop"
    assert completion.outputs[0].stop_reason == stop
    assert len(completion.outputs[0].token_ids) < len(free.outputs[0].token_ids)
    assert smollm2.stats()["kv_cache"]["num_used_blocks"] == 0


def test_streamed_text_only_grows_and_never_shows_half_a_character(smollm2: LLM) -> None:
    prompt = "A list of emoji: 😀 😃 😄 😁"
    params = SamplingParams(temperature=0, max_tokens=30)
    texts = [o.outputs[0].text for o in smollm2.stream(prompt, params)]
    for shorter, longer in itertools.pairwise(texts):
        assert longer.startswith(shorter)
    assert all("\ufffd" not in text for text in texts[:-1])


def test_logprobs_carry_the_text_of_their_tokens(smollm2: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2)
    completion = smollm2.generate("One, two, three,", params)[0].outputs[0]
    sampled = [e[t] for e, t in zip(completion.logprobs, completion.token_ids, strict=True)]
    assert "".join(entry.decoded_token for entry in sampled) == completion.text


def test_a_model_without_a_chat_template_says_so(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="no chat template"):
        llm.chat([{"role": "user", "content": "Hi"}])


def test_several_conversations_can_be_answered_together(smollm2: LLM) -> None:
    conversations = [
        [{"role": "user", "content": "What is 2 + 2?"}],
        [{"role": "user", "content": "Name a colour."}],
    ]
    outputs = smollm2.chat(conversations, SamplingParams(temperature=0, max_tokens=12))
    assert len(outputs) == 2
    assert all(o.outputs[0].text for o in outputs)
