"""How one request wants its tokens chosen, and when it wants to stop.

The names and defaults are vLLM's, so a script written for one runs on the other. Every value is
checked when the object is made: a request with impossible parameters never reaches the engine, and
cannot take down the requests that share a batch with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from minivllm.errors import InvalidRequestError


@dataclass(frozen=True)
class SamplingParams:
    """Sampling and stopping parameters of one request.

    Attributes:
        n: Number of completions for the prompt; they share the prompt's cached blocks.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: Keep the `top_k` most likely tokens; 0 or -1 keeps all.
        top_p: Keep the smallest set of tokens whose probabilities sum to at least `top_p`.
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
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
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

    def _check_ranges(self) -> None:
        _check("n", self.n, isinstance(self.n, int) and self.n >= 1, "an integer of at least 1")
        # The two-sided comparisons are false for NaN and for infinities, so those are refused too.
        _check(
            "temperature",
            self.temperature,
            0.0 <= self.temperature < float("inf"),
            "0 (greedy) or a positive finite number",
        )
        _check(
            "top_k",
            self.top_k,
            isinstance(self.top_k, int) and self.top_k >= -1,
            "a positive integer, or 0 or -1 for no limit",
        )
        _check("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "in (0, 1]")
        _check("min_p", self.min_p, 0.0 <= self.min_p <= 1.0, "in [0, 1]")
        _check(
            "repetition_penalty",
            self.repetition_penalty,
            0.0 < self.repetition_penalty < float("inf"),
            "a positive finite number",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(name, value, -2.0 <= value <= 2.0, "in [-2, 2]")
        if self.seed is not None:
            _check(
                "seed",
                self.seed,
                isinstance(self.seed, int) and 0 <= self.seed < 2**63,
                "None or an integer in [0, 2**63)",
            )
        if self.max_tokens is not None:
            _check(
                "max_tokens",
                self.max_tokens,
                isinstance(self.max_tokens, int) and self.max_tokens >= 1,
                "None or an integer of at least 1",
            )
        _check(
            "min_tokens",
            self.min_tokens,
            isinstance(self.min_tokens, int) and self.min_tokens >= 0,
            "an integer of at least 0",
        )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens={self.min_tokens} is larger than max_tokens={self.max_tokens}: "
                "no output can satisfy both; lower min_tokens or raise max_tokens"
            )
        if self.logprobs is not None:
            _check(
                "logprobs",
                self.logprobs,
                isinstance(self.logprobs, int) and self.logprobs >= 0,
                "None or an integer of at least 0",
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
            _check(
                "stop_token_ids",
                token,
                isinstance(token, int) and token >= 0,
                "a list of token ids of at least 0",
            )


def _check(name: str, value: object, ok: bool, expected: str) -> None:
    if not ok:
        raise InvalidRequestError(f"{name}={value!r} is not valid: expected {expected}")
