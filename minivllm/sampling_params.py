"""How one request wants its tokens chosen, and when it wants to stop.

The names and defaults are vLLM's, so a script written for one runs on the other. Every value is
checked when the object is made: a request with impossible parameters never reaches the engine, and
cannot take down the requests that share a batch with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real

from minivllm.errors import InvalidRequestError

_MAX_N = 16384  # each completion is a request of its own


@dataclass(frozen=True)
class SamplingParams:
    """Sampling and stopping parameters of one request.

    Attributes:
        n: Number of completions for the prompt; they share the prompt's cached blocks.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: Keep the `top_k` most likely tokens; 0 or -1 keeps all.
        top_p: Keep the smallest set of tokens whose probabilities sum to at least `top_p`, and
            tokens exactly as likely as the last of them.
        min_p: Drop tokens less likely than `min_p` times the most likely one.
        repetition_penalty: Over 1 discourages tokens of the prompt and the output
            (Keskar et al. 2019, CTRL): positive logits are divided by it, negative multiplied.
        presence_penalty: Subtracted once from the logit of every token of the output so far.
        frequency_penalty: Subtracted from it once per occurrence in the output so far.
        seed: Same seed, same tokens, whatever batch the request lands in.
        stop: Strings that end the output; they are not part of it unless
            `include_stop_str_in_output`.
        stop_token_ids: Tokens that end the output, beside the model's end-of-sequence tokens.
        ignore_eos: Do not stop at the model's end-of-sequence tokens.
        max_tokens: Most tokens to generate; None is as many as the context length allows.
        min_tokens: Tokens to generate before any stop token or stop string may end the output.
        logprobs: If set, return log-probabilities of that many most likely tokens, and of the
            sampled one. They are taken from the model's raw logits, as in vLLM.
        include_stop_str_in_output: Keep the stop string at the end of the text.
        skip_special_tokens: Leave special tokens such as `<|im_end|>` out of the text.

    Raises:
        InvalidRequestError: A value is out of range or contradicts another one.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = field(default=())
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._normalize_numbers()
        self._normalize_stops()
        self._check_ranges()
        self._check_stops()

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether the logits depend on the tokens seen so far."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def _normalize_numbers(self) -> None:
        """Makes plain ints and floats of all numbers: numpy's are welcome, text is not."""
        for name in ("n", "top_k", "min_tokens"):
            object.__setattr__(self, name, _integer(name, getattr(self, name)))
        for name in ("seed", "max_tokens", "logprobs"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _integer(name, getattr(self, name)))
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        ):
            object.__setattr__(self, name, _finite_number(name, getattr(self, name)))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            value = getattr(self, name)
            _check(name, value, isinstance(value, bool), "True or False")

    def _normalize_stops(self) -> None:
        stop = () if self.stop is None else self.stop
        _check("stop", stop, isinstance(stop, Iterable), "a string or a list of strings")
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else tuple(stop))
        token_ids = () if self.stop_token_ids is None else self.stop_token_ids
        _check(
            "stop_token_ids",
            token_ids,
            isinstance(token_ids, Iterable) and not isinstance(token_ids, str | bytes),
            "a list of token ids",
        )
        object.__setattr__(
            self, "stop_token_ids", tuple(_integer("stop_token_ids", t) for t in token_ids)
        )

    def _check_ranges(self) -> None:
        _check("n", self.n, 1 <= self.n <= _MAX_N, f"an integer from 1 to {_MAX_N}")
        _check(
            "temperature",
            self.temperature,
            self.temperature >= 0.0,
            "0 (greedy) or a positive number",
        )
        _check("top_k", self.top_k, self.top_k >= -1, "a positive integer, or 0 or -1 for no limit")
        _check("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "a number in (0, 1]")
        _check("min_p", self.min_p, 0.0 <= self.min_p <= 1.0, "a number in [0, 1]")
        _check(
            "repetition_penalty",
            self.repetition_penalty,
            self.repetition_penalty > 0.0,
            "a positive number",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(name, value, -2.0 <= value <= 2.0, "a number in [-2, 2]")
        if self.seed is not None:
            _check("seed", self.seed, 0 <= self.seed < 2**63, "None or an integer in [0, 2**63)")
        if self.logprobs is not None:
            _check("logprobs", self.logprobs, self.logprobs >= 0, "None or an integer, at least 0")
        self._check_lengths()

    def _check_lengths(self) -> None:
        expected = "an integer of at least 0"
        _check("min_tokens", self.min_tokens, self.min_tokens >= 0, expected)
        if self.max_tokens is None:
            return
        _check(
            "max_tokens", self.max_tokens, self.max_tokens >= 1, "None or an integer, at least 1"
        )
        if self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens={self.min_tokens} is larger than max_tokens={self.max_tokens}: "
                "no output can satisfy both; lower min_tokens or raise max_tokens"
            )

    def _check_stops(self) -> None:
        for string in self.stop:
            _check(
                "stop",
                string,
                isinstance(string, str) and string != "",
                "a non-empty string or a list of them",
            )
        for token in self.stop_token_ids:
            _check("stop_token_ids", token, token >= 0, "token ids of at least 0")


def _check(name: str, value: object, ok: bool, expected: str) -> None:
    if not ok:
        raise InvalidRequestError(f"{name}={value!r} is not valid: expected {expected}")


def _integer(name: str, value: object) -> int:
    # True counts as an Integral in Python; here it is a mistake.
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise InvalidRequestError(f"{name}={value!r} is not valid: expected an integer")
    return int(value)


def _finite_number(name: str, value: object) -> float:
    expected = "a finite number"
    if not isinstance(value, Real) or isinstance(value, bool):
        raise InvalidRequestError(f"{name}={value!r} is not valid: expected {expected}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    _check(name, value, math.isfinite(number), expected)
    return number
