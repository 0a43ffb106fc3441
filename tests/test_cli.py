"""The command line: what it prints, what it refuses and how, and that it starts without torch."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from minivllm import LLM, SamplingParams
from minivllm.cli import ENGINE_OPTIONS, SAMPLING_OPTIONS, main
from minivllm.cli_options import attribute_docs, option_type
from minivllm.config import EngineConfig

TINY = ("--model", "random:tiny", "--num-kv-blocks", "64", "--max-num-batched-tokens", "256")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command line in this process, as the installed script would."""

    def call(*args: str, stdin: bytes = b"") -> Result:
        monkeypatch.setattr(sys, "argv", ["minivllm", *args])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with random weights, a tokenizer of bytes and a chat template."""
    path = tmp_path_factory.mktemp("llama")
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        eos_token_id=fast.eos_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def test_help_and_version_answer_without_importing_torch_or_transformers():
    program = (
        "import sys\n"
        "from minivllm.cli import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit:\n"
        "    heavy = {'torch', 'transformers', 'numpy', 'triton'} & set(sys.modules)\n"
        "    sys.exit(f'imported: {sorted(heavy)}' if heavy else 0)\n"
    )
    for args in (["--help"], ["--version"], ["generate", "--help"], ["chat", "--help"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *args], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert "minivllm" in done.stdout or "Usage" in done.stdout


def test_every_parameter_of_the_library_is_an_option_with_a_help_text(run: Run):
    text = run("generate", "--help").out
    for group in (SAMPLING_OPTIONS, ENGINE_OPTIONS):
        for cls in group.classes:
            documented = attribute_docs(cls)
            for field in dataclasses.fields(cls):
                if field.name in group.skip:
                    continue
                option = "--" + group.rename.get(field.name, field.name).replace("_", "-")
                assert option in text.split()
                assert documented[field.name]


def test_the_options_of_the_engine_are_those_that_llm_takes():
    import inspect

    names = {f.name for cls in ENGINE_OPTIONS.classes for f in dataclasses.fields(cls)}
    taken = set(inspect.signature(LLM).parameters) - {"model"}
    assert names - ENGINE_OPTIONS.skip == taken


def test_a_field_that_no_option_can_express_is_refused_at_once():
    with pytest.raises(TypeError, match="no command-line option"):
        option_type(dict[str, int])


def test_generated_tokens_are_those_of_the_library(run: Run):
    result = run("generate", *TINY, "--token-ids", "1,2,3", "--max-tokens", "9", "--ignore-eos")
    with LLM("random:tiny", num_kv_blocks=64) as llm:
        params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
        expected = llm.generate([1, 2, 3], params)[0].outputs[0].token_ids
    assert result.code == 0
    assert result.out == " ".join(map(str, expected)) + "\n"
    assert result.err == ""


def test_streamed_text_is_the_text_of_the_json_document(run: Run, folder: Path):
    args = ("generate", "Grüße, 世界", "-m", str(folder), "--temperature", "1", "--seed", "7")
    streamed = run(*args, "--max-tokens", "40")
    document = run(*args, "--max-tokens", "40", "--json").json
    completion = document["outputs"][0]["completions"][0]
    assert len(completion["token_ids"]) == 40
    assert streamed.out == completion["text"] + "\n"


def test_text_is_shown_before_the_generation_has_ended(
    monkeypatch: pytest.MonkeyPatch, run: Run, folder: Path
):
    shown: list[int] = []
    step = LLM._step

    def watched(self: LLM) -> None:
        shown.append(sys.stdout.tell())
        step(self)

    monkeypatch.setattr(LLM, "_step", watched)
    run("generate", "Hello", "-m", str(folder), "--max-tokens", "20", "--ignore-eos")
    assert len(set(shown)) > 10


def test_the_json_document_holds_tokens_logprobs_timings_and_counters(run: Run):
    args = ("--max-tokens", "4", "--ignore-eos", "--logprobs", "2", "--n", "2", "--seed", "3")
    document = run("generate", *TINY, "--json", "--token-ids", "5,6,7,8", *args).json
    output = document["outputs"][0]
    first, second = output["completions"]
    assert output["prompt_token_ids"] == [5, 6, 7, 8]
    assert output["num_cached_tokens"] == 0
    assert (first["index"], second["index"]) == (0, 1)
    assert first["finish_reason"] == "length"
    assert len(first["logprobs"]) == 4
    for token, entry in zip(first["token_ids"], first["logprobs"], strict=True):
        assert entry[str(token)]["rank"] == 1  # greedy
        assert entry[str(token)]["logprob"] <= 0
    sampled = [e[str(t)]["logprob"] for t, e in zip(first["token_ids"], first["logprobs"])]
    assert first["cumulative_logprob"] == pytest.approx(sum(sampled))
    timings = output["timings"]
    assert 0 <= timings["queue_time"] <= timings["time_to_first_token"]
    assert timings["time_per_output_token"] > 0
    assert document["stats"]["kv_cache"]["num_blocks"] == 64
    assert document["device"] in ("cpu", "cuda")


def test_a_time_that_does_not_exist_is_null(run: Run):
    document = run("generate", *TINY, "--json", "--token-ids", "5", "--max-tokens", "1").json
    assert document["outputs"][0]["timings"]["time_per_output_token"] is None


def test_prompts_come_from_arguments_files_and_token_ids_in_that_order(
    run: Run, folder: Path, tmp_path: Path
):
    text, many = tmp_path / "one.txt", tmp_path / "many.json"
    text.write_text("from a file\n", encoding="utf-8")
    many.write_text(json.dumps(["from json", [1, 2], {"prompt_token_ids": [3]}]), encoding="utf-8")
    files = ("--prompt-file", str(text), "--prompt-file", str(many), "--prompt-file", "-")
    args = ("generate", "an argument", *files, "--token-ids", "4,5", "--max-tokens", "1")
    result = run(*args, "-m", str(folder), "--json", stdin=b"from a pipe")
    outputs = result.json["outputs"]
    texts = ["an argument", "from a file", "from json", None, None, "from a pipe", None]
    assert [output["prompt"] for output in outputs] == texts
    assert [outputs[i]["prompt_token_ids"] for i in (3, 4, 6)] == [[1, 2], [3], [4, 5]]


def test_several_completions_are_printed_under_headings(run: Run):
    prompts = ("--token-ids", "1", "--token-ids", "2")
    shown = run("generate", *TINY, *prompts, "--n", "2", "--max-tokens", "2").out
    headings = [line for line in shown.splitlines() if line.startswith("---")]
    assert headings == [
        f"--- prompt {p} of 2, completion {c} of 2 ---" for p in (1, 2) for c in (1, 2)
    ]


def test_repeated_options_make_lists(run: Run, folder: Path):
    letters = "abcdefghijklmnopqrstuvwxyz"
    stops = [argument for letter in letters for argument in ("--stop", letter)]
    hot = ("--temperature", "5", "--seed", "1", "--max-tokens", "200", "--ignore-eos")
    document = run("generate", "a", "-m", str(folder), "--json", *hot, *stops).json
    completion = document["outputs"][0]["completions"][0]
    assert completion["stop_reason"] in set(letters)
    assert not set(letters) & set(completion["text"])


def test_stats_are_one_line_on_standard_error(run: Run):
    result = run("generate", *TINY, "--token-ids", "1", "--max-tokens", "3", "--stats")
    assert result.err.count("\n") == 1
    assert result.err.startswith("3 tokens in ")
    assert "tokens/s" in result.err


def test_a_chat_remembers_what_was_said(run: Run, folder: Path):
    args = ("chat", "-m", str(folder), "--system", "S", "--max-tokens", "3")
    result = run(*args, stdin=b"one\n\ntwo\n")
    with LLM(str(folder)) as llm:
        params = SamplingParams(temperature=0, max_tokens=3)
        messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "one"}]
        first = llm.chat(messages, params)[0].outputs[0].text
        messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "two"}]
        second = llm.chat(messages, params)[0].outputs[0].text
    assert result.code == 0
    assert result.out == f"{first}\n{second}\n"


def test_a_message_as_an_argument_is_answered_once(run: Run, folder: Path):
    args = ("-m", str(folder), "--max-tokens", "3")
    once = run("chat", "one", *args, stdin=b"never read\n")
    assert once.out == run("chat", *args, stdin=b"one\n").out


def test_a_turn_that_is_too_long_is_refused_and_the_chat_goes_on(run: Run, folder: Path):
    args = ("chat", "-m", str(folder), "--max-tokens", "3")
    result = run(*args, stdin=b"one\n" + b"x" * 400 + b"\n" + b"two\n")
    assert result.code == 1
    assert result.err.startswith("error: the prompt has ")
    assert result.err.count("\n") == 1
    assert result.out == run(*args, stdin=b"one\ntwo\n").out


def test_a_model_without_a_chat_template_is_refused_before_anything_is_typed(run: Run):
    result = run("chat", *TINY)
    assert (result.code, result.out) == (1, "")
    assert "no chat template" in result.err


def _broken_model(kind: str, folder: Path, tmp_path: Path) -> str:
    """Makes a model that is broken in one way; returns its name."""
    if kind == "gguf":
        (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(range(256)))
        return str(tmp_path / "bad.gguf")
    config = json.loads((folder / "config.json").read_text())
    weights = (folder / "model.safetensors").read_bytes()
    if kind == "architecture":
        config["architectures"] = ["GPT2LMHeadModel"]
    elif kind == "truncated":
        weights = weights[: len(weights) // 2]
    elif kind == "garbage":
        weights = b"\xff" * 64
    elif kind == "config":
        config["num_hidden_layers"] = -1
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(weights)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("architecture", ("GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM")),
        ("truncated", ("model.safetensors",)),
        ("garbage", ("model.safetensors",)),
        ("config", ("num_hidden_layers=-1",)),
        ("gguf", ("bad.gguf",)),
    ],
)
def test_a_broken_model_is_one_error_line(
    run: Run, folder: Path, tmp_path: Path, kind: str, said: tuple[str, ...]
):
    name = _broken_model(kind, folder, tmp_path)
    result = run("generate", "--model", name, "--token-ids", "1")
    _assert_one_error(result, *said)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--token-ids", ""), ("empty",)),
        (("--token-ids", ",".join(["1"] * 2000)), ("the prompt has 2000 tokens",)),
        (("--token-ids", "1,-2"), ("-2", "out of range")),
        (("--token-ids", "1,99999999"), ("99999999", "out of range")),
        (("--token-ids", "1,two"), ("1,two", "integers")),
        (("text",), ("no tokenizer",)),
        (("--token-ids", "1", "--stop", "x"), ("tokenizer",)),
        (("--token-ids", "1", "--stop-token-ids", "99999999"), ("99999999",)),
        (("--token-ids", "1", "--temperature", "-1"), ("temperature=-1.0",)),
        (("--token-ids", "1", "--temperature", "nan"), ("temperature",)),
        (("--token-ids", "1", "--top-p", "0"), ("top_p=0.0",)),
        (("--token-ids", "1", "--top-k", "-2"), ("top_k=-2",)),
        (("--token-ids", "1", "--min-p", "2"), ("min_p=2.0",)),
        (("--token-ids", "1", "--n", "0"), ("n=0",)),
        (("--token-ids", "1", "--max-tokens", "0"), ("max_tokens=0",)),
        (("--token-ids", "1", "--max-tokens", "2", "--min-tokens", "3"), ("min_tokens=3",)),
        (("--token-ids", "1", "--logprobs", "-1"), ("logprobs=-1",)),
        (("--token-ids", "1", "--seed", "-1"), ("seed=-1",)),
        (("--token-ids", "1", "--repetition-penalty", "0"), ("repetition_penalty",)),
        (("--token-ids", "1", "--presence-penalty", "3"), ("presence_penalty",)),
        (("--token-ids", "1", "--block-size", "17"), ("block_size=17", "power of two")),
        (("--token-ids", "1", "--num-kv-blocks", "0"), ("num_kv_blocks=0",)),
        (("--token-ids", "1", "--num-kv-blocks", "2", "--max-model-len", "64"), ("KV blocks",)),
        (("--token-ids", ",".join("1" * 40), "--num-kv-blocks", "2"), ("40 tokens", "32")),
        (("--token-ids", "1", "--num-kv-blocks", str(10**9)), ("KV cache", "GiB")),
        (("--token-ids", "1", "--num-kv-blocks", str(10**18)), ("num_kv_blocks", "at most")),
        (("--token-ids", "1", "--max-model-len", str(10**9)), ("max_model_len",)),
        (("--token-ids", "1", "--device", "tpu"), ("device='tpu'",)),
        (("--token-ids", "1", "--dtype", "int8"), ("dtype='int8'",)),
        (("--token-ids", "1", "--attention-backend", "magic"), ("attention_backend='magic'",)),
        (("--token-ids", "1", "--gpu-memory-utilization", "0"), ("gpu_memory_utilization",)),
        (("--token-ids", "1", "--model", "random:huge"), ("huge", "tiny")),
        (("--token-ids", "1", "--model", "/no/such/folder"), ("/no/such/folder",)),
        (("--token-ids", "1", "--model", "no-such-model"), ("no-such-model",)),
        (("--prompt-file", "/no/such/file"), ("/no/such/file", "No such file")),
        (("--prompt-file", "/"), ("'/'", "directory")),
    ],
)
def test_bad_input_is_one_error_line(run: Run, args: tuple[str, ...], said: tuple[str, ...]):
    _assert_one_error(run("generate", *TINY, *args), *said)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[1, 2", "not valid JSON"),
        (b"{}", "expected a list of prompts"),
        (b"[]", "at least one"),
        (b"[1.5]", "expected a string, a list of token ids"),
        (b"[[true]]", "expected a string, a list of token ids"),
        (b'"\xff"', "not UTF-8"),
    ],
)
def test_a_bad_prompt_file_is_one_error_line(run: Run, tmp_path: Path, content: bytes, said: str):
    file = tmp_path / "prompts.json"
    file.write_bytes(content)
    _assert_one_error(run("generate", *TINY, "--prompt-file", str(file)), said)


def test_a_prompt_that_is_not_utf8_is_one_error_line(run: Run, folder: Path):
    broken = os.fsdecode(b"caf\xe9")
    _assert_one_error(run("generate", broken, "-m", str(folder)), "not valid UTF-8")
    _assert_one_error(run("chat", broken, "-m", str(folder)), "not valid UTF-8")
    _assert_one_error(run("chat", "-m", str(folder), stdin=b"caf\xe9\n"), "not valid UTF-8")


def test_an_error_says_nothing_on_standard_output_even_with_json(run: Run):
    result = run("generate", *TINY, "--json", "--token-ids", "1", "--token-ids", "-1")
    _assert_one_error(result, "out of range")


@pytest.mark.parametrize(
    "args",
    [
        ("generate", *TINY),
        ("generate", *TINY, "--token-ids", "1", "--max-tokens", "many"),
        ("generate", *TINY, "--token-ids", "1", "--max-tokens", "1.5"),
        ("generate", *TINY, "--token-ids", "1", "--temperature", "warm"),
        ("generate", *TINY, "--token-ids", "1", "--no-such-option"),
        ("no-such-command",),
    ],
)
def test_a_wrong_option_ends_with_code_2_and_points_to_the_help(run: Run, args: tuple[str, ...]):
    result = run(*args)
    assert (result.code, result.out) == (2, "")
    assert "--help" in result.err


def test_ctrl_c_ends_with_code_130_and_without_a_traceback(tmp_path: Path):
    pipe = tmp_path / "prompt"
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "minivllm", "generate", "--prompt-file", str(pipe)]
    # A shell starts background jobs with the signal ignored, and children inherit that.
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with open(pipe, "w"):  # opens only once the command is reading
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == ""


def test_ctrl_c_while_generating_aborts_the_request(monkeypatch: pytest.MonkeyPatch, run: Run):
    engines = []
    step = LLM._step

    def interrupted(self: LLM) -> None:
        step(self)
        engines.append(self.engine)
        if len(engines) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "_step", interrupted)
    result = run("generate", *TINY, "--token-ids", "1", "--ignore-eos")
    assert result.code == 130
    assert "Traceback" not in result.err
    assert not engines[-1].has_unfinished_requests


def test_an_error_of_our_own_making_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, run: Run):
    def broken(self: LLM) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(LLM, "_step", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        run("generate", *TINY, "--token-ids", "1")


def test_verbose_shows_what_the_engine_logs():
    command = [sys.executable, "-m", "minivllm", "generate", *TINY, "--token-ids", "1"]
    quiet = subprocess.run([*command, "--max-tokens", "1"], capture_output=True, text=True)
    loud = subprocess.run(
        [*command, "--max-tokens", "1", "--verbose"], capture_output=True, text=True
    )
    assert quiet.stderr == ""
    assert "INFO minivllm" in loud.stderr
    assert quiet.stdout == loud.stdout


def test_defaults_are_decided_by_the_engine_and_not_by_the_command_line(run: Run):
    document = run("generate", *TINY, "--json", "--token-ids", "1", "--max-tokens", "1").json
    config = EngineConfig("random:tiny").resolved()
    decided = (config.device, config.dtype, config.attention_backend)
    assert decided == tuple(document[key] for key in ("device", "dtype", "attention_backend"))


def _assert_one_error(result: Result, *said: str) -> None:
    assert result.code == 1
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1, result.err
    assert result.err.endswith("\n")
    for words in said:
        assert words in result.err
