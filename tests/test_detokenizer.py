"""The incremental detokenizer against decoding everything at once, and against brute force."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from minivllm import SamplingParams
from minivllm.engine.detokenizer import IncrementalDetokenizer

# How long generating inputs takes says nothing about the code under test.
thorough = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Größe, naïve, cafe\u0301 — 日本語のテキスト, 中文字符, 한국어, မြန်မာ",
    "😀😃 👩‍👩‍👧‍👦 🇩🇪 🏳️‍🌈 \U0001f44d\U0001f3fd e\u0301\u0323",
    "code:\n\tif x  ==  1:  # two  spaces\n",
    "a real \ufffd replacement character",
]


def byte_level(pieces: Sequence[bytes]) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with one token for every byte, then `pieces`, then two specials."""
    letters = {}
    printable = [b for b in range(256) if chr(b).isprintable() and b not in (0x20, 0xA0, 0xAD)]
    for byte in printable:
        letters[byte] = chr(byte)
    for number, byte in enumerate(b for b in range(256) if b not in letters):
        letters[byte] = chr(256 + number)
    tokens = [*([b] for b in range(256)), *pieces]
    vocab = {"".join(letters[b] for b in token): i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|start|>", "<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


# Pieces of whole characters, of parts of characters, and from the middle of one to that of another.
PIECES = [
    b" the", b"ab", b"ba", b"aab", " é".encode(), "中文".encode(), "😀".encode(),
    b"\xf0\x9f", b"\x98\x80", b"\x98\x80\xf0\x9f", b"\xad\xe4\xb8", b"\xb8\xad", b"x\xe4",
]  # fmt: skip
BYTES = byte_level(PIECES)
END = BYTES.convert_tokens_to_ids("<|end|>")


def trained() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=350,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


WORDS = ["▁", "▁the", "▁a", "a", "b", "e", "▁fox", "\u0301", "中", "."]


def sentence_piece(decoder: decoders.Decoder) -> PreTrainedTokenizerFast:
    """Ids: 3 specials, 256 bytes, then `WORDS`."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *WORDS]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def llama_decoder() -> decoders.Decoder:
    return decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )


def metaspace_decoder() -> decoders.Decoder:
    return decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()])


PIECE_TOKENIZERS = [sentence_piece(llama_decoder()), sentence_piece(metaspace_decoder())]
FIRST_BYTE, FIRST_WORD = 3, 259


def byte_tokens(data: bytes) -> list[int]:
    return [FIRST_BYTE + byte for byte in data]


def word(text: str) -> int:
    return FIRST_WORD + WORDS.index(text)


def stream(
    tokenizer: PreTrainedTokenizerFast,
    output: Sequence[int],
    prompt: Sequence[int] = (),
    params: SamplingParams | None = None,
) -> str:
    """Feeds the tokens one by one, checks what is shown on the way, returns the final text."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, params or SamplingParams())
    shown, deltas = [""], []
    for token in output:
        detokenizer.append([token])
        deltas.append(detokenizer.next_text(finished=False))
        shown.append(detokenizer.visible_text(finished=False))
        assert "".join(deltas) == shown[-1]
    deltas.append(detokenizer.next_text(finished=True))
    final = detokenizer.visible_text(finished=True)
    assert "".join(deltas) == final == detokenizer.text
    for earlier, later in itertools.pairwise([*shown, final]):
        assert later.startswith(earlier)
    return final


def decode(tokenizer: PreTrainedTokenizerFast, token_ids: Sequence[int], skip: bool = True) -> str:
    return tokenizer.decode(list(token_ids), skip_special_tokens=skip)


# ---------------------------------------------------------------- byte-level tokenizers


@thorough
@given(output=st.lists(st.integers(0, len(BYTES) - 1), max_size=60), skip=st.booleans())
def test_any_tokens_give_the_text_that_decoding_them_at_once_gives(output, skip):
    params = SamplingParams(skip_special_tokens=skip)
    assert stream(BYTES, output, params=params) == decode(BYTES, output, skip)


@thorough
@given(
    output=st.lists(
        st.one_of(st.integers(256, len(BYTES) - 1), st.sampled_from([0x41, 0x80, 0xE4, 0xFF])),
        min_size=30,
        max_size=300,
    )
)
def test_long_outputs_of_broken_characters_are_decoded_like_short_ones(output):
    assert stream(BYTES, output) == decode(BYTES, output)


@thorough
@given(text=st.text(), data=st.data())
def test_characters_split_over_tokens_are_shown_whole(text, data):
    encoded = text.encode()
    output, position = [], 0
    while position < len(encoded):
        here = [i for i, piece in enumerate(PIECES) if encoded[position:].startswith(piece)]
        choice = data.draw(st.sampled_from([None, *here]))
        output.append(encoded[position] if choice is None else 256 + choice)
        position += 1 if choice is None else len(PIECES[choice])
    assert stream(BYTES, output) == text
    detokenizer = IncrementalDetokenizer(BYTES, [], SamplingParams())
    for token in output:
        detokenizer.append([token])
        assert text.startswith(detokenizer.visible_text(finished=False))


@thorough
@given(
    prompt=st.lists(st.integers(0, len(BYTES) - 1), max_size=30),
    output=st.lists(st.integers(0, len(BYTES) - 1), max_size=30),
)
def test_the_text_continues_the_prompt(prompt, output):
    before, everything = decode(BYTES, prompt), decode(BYTES, [*prompt, *output])
    if not everything.startswith(before):
        # The output has completed a character that the prompt had begun.
        before = before.removesuffix("\ufffd")
    assert before + stream(BYTES, output, prompt) == everything


@pytest.mark.parametrize("whole", ["é", "中", "😀"])
def test_the_output_completes_a_character_that_the_prompt_has_begun(whole):
    encoded = list(whole.encode())
    for length in range(1, len(encoded)):
        prompt, output = [*b"a\xff", *encoded[:length]], [*encoded[length:], ord("b")]
        assert stream(BYTES, output, prompt) == whole + "b"
        assert stream(BYTES, output[:-1], prompt) == whole
        tokenizer, space = PIECE_TOKENIZERS[0], word("▁")
        prompt = [space, *byte_tokens(bytes(encoded[:length]))]
        assert stream(tokenizer, byte_tokens(bytes(encoded[length:])), prompt) == whole


@pytest.mark.parametrize(
    "output",
    [
        [*b"\xf0\x9f", *[256 + PIECES.index(b"\x98\x80\xf0\x9f")] * 300, *b"\x98\x80 end"],
        [*b"\xff" * 300, *"😀 end".encode()],
        [*b"\xff" * 300, *"😀".encode()[:3]],
        [*[END] * 300, *"😀 end".encode()],
    ],
    ids=["no token ends with a whole character", "malformed", "malformed to the end", "special"],
)
def test_a_window_without_a_good_place_to_begin_is_shortened_too(output):
    assert stream(BYTES, output) == decode(BYTES, output)


def test_at_most_three_replacement_characters_are_held_back():
    detokenizer = IncrementalDetokenizer(BYTES, [], SamplingParams())
    for count in range(1, 200):
        detokenizer.append([0xFF])
        assert len(detokenizer.text) == max(0, count - 3)


@pytest.mark.parametrize("sentence", SENTENCES)
def test_a_trained_tokenizer_streams_real_text(sentence):
    tokenizer = trained()
    output = tokenizer(sentence * 5).input_ids
    assert stream(tokenizer, output) == sentence * 5
    for length in range(len(output)):
        assert stream(tokenizer, output[:length]) == decode(tokenizer, output[:length])


def test_many_tokens_at_once_give_the_same_text_as_one_by_one():
    output = list("naïve 中文 😀".encode())
    detokenizer = IncrementalDetokenizer(BYTES, [], SamplingParams())
    detokenizer.append(output[:5])
    detokenizer.append(output[5:])
    assert detokenizer.text == "naïve 中文 😀"


def test_a_character_is_shown_with_its_last_byte():
    detokenizer = IncrementalDetokenizer(BYTES, [], SamplingParams())
    shown = []
    for byte in "a😀".encode():
        detokenizer.append([byte])
        shown.append(detokenizer.next_text(finished=False))
    assert shown == ["a", "", "", "", "😀"]


def test_the_whole_characters_of_a_token_are_shown_though_its_last_one_is_not_complete():
    detokenizer = IncrementalDetokenizer(BYTES, [], SamplingParams())
    detokenizer.append([256 + PIECES.index(b"x\xe4")])
    assert detokenizer.next_text(finished=False) == "x"
    assert detokenizer.next_text(finished=True) == "\ufffd"


# ---------------------------------------------------------------- SentencePiece-like tokenizers


def characters_to_tokens(text: str) -> list[int]:
    tokens: list[int] = []
    for character in text:
        piece = character.replace(" ", "▁")
        tokens += [word(piece)] if piece in WORDS else byte_tokens(character.encode())
    return tokens


fallback_text = st.text("ab 中文😀é\u0301\u200d၏", max_size=40)


@pytest.mark.parametrize("tokenizer", PIECE_TOKENIZERS, ids=["llama", "metaspace"])
@thorough
@given(prompt=fallback_text, output=fallback_text, specials=st.booleans())
def test_byte_fallback_text_continues_the_prompt(tokenizer, prompt, output, specials):
    start = [1] if specials else []
    prompt_ids = start + characters_to_tokens("a" + prompt)
    output_ids = characters_to_tokens(output)
    if specials:
        output_ids.insert(len(output_ids) // 2, 1)
    assert stream(tokenizer, output_ids, prompt_ids) == output
    everything = decode(tokenizer, prompt_ids + output_ids)
    assert decode(tokenizer, prompt_ids) + output == everything


def longest_valid_prefix(data: bytes) -> int:
    for length in range(len(data), -1, -1):
        try:
            data[:length].decode()
        except UnicodeDecodeError:
            continue
        return length
    raise AssertionError("the empty prefix is valid")


@thorough
@given(
    runs=st.lists(
        st.lists(
            st.one_of(
                st.sampled_from([b"\xe4", b"\xf0\x9f", b"\x80", b"\xff", b"\xf0\x9f\x98"]),
                st.sampled_from(["😀", "中", "é", "a"]).map(str.encode),
            ),
            max_size=7,
        ).map(b"".join),
        max_size=8,
    )
)
def test_malformed_bytes_do_not_take_back_the_characters_before_them(runs):
    output, expected = [], ""
    for run in runs:
        output += [*byte_tokens(run), word("b")]
        valid = longest_valid_prefix(run)
        expected += run[:valid].decode() + "\ufffd" * (len(run) - valid) + "b"
    for tokenizer in PIECE_TOKENIZERS:
        assert stream(tokenizer, output, [word("▁a")]) == expected
        # The last run is cut off by the end of the output.
        assert stream(tokenizer, output[:-1], [word("▁a")]) == expected[:-1]


@thorough
@given(
    prompt=st.lists(st.integers(0, FIRST_WORD + len(WORDS) - 1), max_size=20),
    output=st.lists(st.integers(0, FIRST_WORD + len(WORDS) - 1), max_size=80),
)
def test_nothing_shown_is_taken_back_whatever_the_tokens(prompt, output):
    for tokenizer in PIECE_TOKENIZERS:
        stream(tokenizer, output, prompt)


@pytest.mark.parametrize("tokenizer", PIECE_TOKENIZERS, ids=["llama", "metaspace"])
def test_the_space_before_the_first_word_is_kept_after_a_prompt(tokenizer):
    assert stream(tokenizer, [word("▁the")], [1, word("▁a")]) == " the"
    assert stream(tokenizer, [word("▁the")]) == "the"
    assert stream(tokenizer, [word("▁"), word("▁the")]) == " the"


@pytest.mark.parametrize("tokenizer", PIECE_TOKENIZERS, ids=["llama", "metaspace"])
def test_spaces_are_kept_after_many_special_tokens(tokenizer):
    assert stream(tokenizer, [word("▁the")], [word("▁a"), 1, 2, 1, 2]) == " the"
    output = [word("▁the"), *[2] * 200, word("▁fox")]
    assert stream(tokenizer, output, [word("▁a")]) == " the fox"


# ---------------------------------------------------------------- cost


class CountingTokenizer:
    """Counts the tokens it is asked to decode."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.counts: list[int] = []

    def decode(self, token_ids, skip_special_tokens, clean_up_tokenization_spaces):
        self.counts.append(len(token_ids))
        return self.tokenizer.decode(
            token_ids,
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=clean_up_tokenization_spaces,
        )


@pytest.mark.parametrize(
    ("tokenizer", "output", "limit"),
    [
        (BYTES, list(b"plain text "), 20),
        (BYTES, list("中文😀".encode()), 20),
        (BYTES, [0xFF], 65),
        (BYTES, [256 + PIECES.index(b"\x98\x80\xf0\x9f")], 65),
        (BYTES, [END], 65),
        (PIECE_TOKENIZERS[0], byte_tokens("😀".encode()), 20),
        (PIECE_TOKENIZERS[0], byte_tokens(b"\xff"), 65),
    ],
    ids=["text", "characters", "malformed", "across characters", "specials", "runs", "bad runs"],
)
def test_the_cost_of_a_token_does_not_grow_with_the_output(tokenizer, output, limit):
    counting = CountingTokenizer(tokenizer)
    detokenizer = IncrementalDetokenizer(counting, [], SamplingParams())
    for token in itertools.islice(itertools.cycle(output), 2000):
        detokenizer.append([token])
    assert max(counting.counts) <= limit
    assert len(counting.counts) <= 2 * 2000


# ---------------------------------------------------------------- stop strings


def stop_reference(output: Sequence[int], params: SamplingParams) -> tuple[str, str | None, int]:
    """Text, stop string, and tokens used, by looking at everything after every token."""
    protected = len(decode(BYTES, output[: params.min_tokens]))
    for length in range(1, len(output) + 1):
        text = decode(BYTES, output[:length])
        matches = [
            (begin + len(stop), begin, stop)
            for stop in params.stop
            for begin in range(len(text))
            if text.startswith(stop, begin) and begin + len(stop) > protected
        ]
        if matches and length > params.min_tokens:
            end, begin, stop = min(matches)
            return text[: end if params.include_stop_str_in_output else begin], stop, length
    return decode(BYTES, output), None, len(output)


AB_TOKENS = [ord("a"), ord("b"), *(256 + PIECES.index(p) for p in (b"ab", b"ba", b"aab"))]


@thorough
@given(
    output=st.lists(st.sampled_from(AB_TOKENS), max_size=25),
    stop=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    min_tokens=st.integers(0, 8),
    include=st.booleans(),
)
def test_stop_strings_are_found_where_brute_force_finds_them(output, stop, min_tokens, include):
    params = SamplingParams(
        stop=stop, min_tokens=min_tokens, max_tokens=None, include_stop_str_in_output=include
    )
    final, stop_string, num_tokens = stop_reference(output, params)
    detokenizer = IncrementalDetokenizer(BYTES, [], params)
    deltas = []
    for token in output[:num_tokens]:
        assert detokenizer.stop_string is None
        found = detokenizer.append([token])
        deltas.append(detokenizer.next_text(finished=False))
        assert final.startswith("".join(deltas))
        if found is None:
            held_back = detokenizer.text.removeprefix("".join(deltas))
            ends = [end for end in suffixes(detokenizer.text) if begins_a_stop(end, stop)]
            assert held_back == ("" if include else max(ends, key=len))
    assert detokenizer.stop_string == stop_string
    deltas.append(detokenizer.next_text(finished=True))
    assert "".join(deltas) == final == detokenizer.text


def suffixes(text: str) -> list[str]:
    return [text[i:] for i in range(len(text) + 1)]


def begins_a_stop(end: str, stop: Sequence[str]) -> bool:
    return end == "" or any(s.startswith(end) and s != end for s in stop)


@pytest.mark.parametrize(
    ("stop", "stop_string", "text"),
    [
        (["cde"], "cde", "ab"),
        (["de", "cde"], "cde", "ab"),
        (["abcd", "bc"], "bc", "a"),
        (["bc", "bcd"], "bc", "a"),
        (["f", "g"], "f", "abcde"),
        (["abcdefg"], "abcdefg", ""),
        (["z", "gh"], None, "abcdefg"),
    ],
)
def test_the_stop_string_that_ends_first_counts_even_within_one_step(stop, stop_string, text):
    detokenizer = IncrementalDetokenizer(BYTES, [], SamplingParams(stop=stop))
    assert detokenizer.append(list(b"abcdefg")) == stop_string
    assert detokenizer.visible_text(finished=True) == text


def test_a_stop_string_within_the_prompt_does_not_count():
    params = SamplingParams(stop="ab")
    detokenizer = IncrementalDetokenizer(BYTES, list(b"ab a"), params)
    assert detokenizer.append(list(b"b c")) is None
    assert detokenizer.visible_text(finished=True) == "b c"


def test_a_stop_string_of_split_characters_is_found():
    detokenizer = IncrementalDetokenizer(BYTES, [], SamplingParams(stop="中😀"))
    found = [detokenizer.append([byte]) for byte in "x中😀".encode()]
    assert found == [None] * 7 + ["中😀"]
    assert detokenizer.text == "x"


def test_nothing_is_added_after_a_stop_string():
    detokenizer = IncrementalDetokenizer(BYTES, [], SamplingParams(stop="b"))
    assert detokenizer.append([*b"ab", 0xE4]) == "b"
    assert detokenizer.append([*b"cd"]) == "b"
    assert detokenizer.visible_text(finished=True) == "a"


# ---------------------------------------------------------------- the end of the output


@pytest.mark.parametrize(
    ("include", "skip", "text"),
    [(False, True, "ab"), (False, False, "ab"), (True, True, "ab"), (True, False, "ab<|end|>")],
)
def test_the_text_of_a_stop_token_is_left_out_unless_asked_for(include, skip, text):
    params = SamplingParams(include_stop_str_in_output=include, skip_special_tokens=skip)
    detokenizer = IncrementalDetokenizer(BYTES, [], params)
    detokenizer.append(list(b"a"))
    assert detokenizer.append([ord("b"), END], stop_terminated=True) is None
    assert detokenizer.text == text


def test_an_ordinary_token_can_be_the_stop_token():
    detokenizer = IncrementalDetokenizer(BYTES, [], SamplingParams(stop_token_ids=[ord("c")]))
    detokenizer.append(list(b"abc"), stop_terminated=True)
    assert detokenizer.visible_text(finished=True) == "ab"


def test_an_unfinished_character_before_a_stop_token_is_shown_as_the_decoder_shows_it():
    output = [*b"a", *"😀".encode()[:3], END]
    detokenizer = IncrementalDetokenizer(BYTES, [], SamplingParams())
    detokenizer.append(output, stop_terminated=True)
    assert detokenizer.text == decode(BYTES, output) == "a\ufffd"


def test_text_held_back_for_a_stop_string_is_shown_at_the_end():
    detokenizer = IncrementalDetokenizer(BYTES, [], SamplingParams(stop="bcd"))
    detokenizer.append(list(b"abc"))
    assert detokenizer.next_text(finished=False) == "a"
    assert detokenizer.next_text(finished=True) == "bc"
    assert detokenizer.next_text(finished=True) == ""


def test_without_a_tokenizer_the_text_stays_empty():
    detokenizer = IncrementalDetokenizer(None, [1, 2], SamplingParams(stop="a"))
    assert detokenizer.append([1, 2, 3]) is None
    assert detokenizer.append([4], stop_terminated=True) is None
    assert detokenizer.visible_text(finished=True) == ""
    assert detokenizer.next_text(finished=True) == ""
