"""Turns tokens into text as they come, and finds stop strings in it.

A token need not be text: a character may be spread over several tokens, and a decoder may drop or
keep a space depending on what stands before it. So a short window of tokens, beginning inside the
prompt, is decoded each time, and what has grown since is the new text. Two things are held back: an
unfinished character, and, while streaming, an end of the text that may become a stop string. What
has been shown is never taken back.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from minivllm.sampling_params import SamplingParams

REPLACEMENT = "\ufffd"  # how decoders show bytes that are not a character, or not one yet
# A character has at most four bytes, so an unfinished one at most three; one token has at least
# one of them, and shows as at most one replacement character per byte.
_MAX_UNFINISHED = 3
_CONTEXT_TOKENS = 8
_WINDOW_TOKENS = 16
_MAX_WINDOW_TOKENS = 64


class IncrementalDetokenizer:
    """The text of one request.

    Its text continues the prompt's: for all tokenizers
    `decode(prompt) + text == decode(prompt + output)`, and `text == decode(output)` for those that
    treat the first token like any other (byte-level ones). One case is different on purpose: a
    byte-fallback decoder (SentencePiece) replaces ALL bytes of a run when one of them is malformed,
    also the complete characters before it; here those stay, because they may have been shown.

    Args:
        tokenizer: A fast tokenizer, or None: then the text stays empty.
        prompt_token_ids: Their end is the context of the first output tokens.
        sampling_params: Its stop strings, `min_tokens`, `skip_special_tokens` and
            `include_stop_str_in_output`.

    Attributes:
        text: All text that is certain, up to the stop string if there was one.
        stop_string: The stop string that was found, or None.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
    ) -> None:
        self.text = ""
        self.stop_string: str | None = None
        self._params = sampling_params
        self._stop = tuple(sampling_params.stop)
        self._num_tokens = 0
        self._num_shown = 0
        self._window = None
        if tokenizer is not None:
            self._window = _DecodeWindow(
                tokenizer, prompt_token_ids, sampling_params.skip_special_tokens
            )

    def append(self, new_token_ids: Sequence[int], stop_terminated: bool = False) -> str | None:
        """Adds output tokens; does nothing after a stop string.

        Args:
            new_token_ids: The next tokens of the output.
            stop_terminated: The last of them is a stop token, whose text belongs to the output only
                with `include_stop_str_in_output`.

        Returns:
            The stop string that was found: the one that ends first, and of several that end at the
            same place the one that begins first. It must end behind the first `min_tokens` tokens.
        """
        if self._window is None or self.stop_string is not None:
            return self.stop_string
        if stop_terminated and not self._params.include_stop_str_in_output:
            new_token_ids = new_token_ids[:-1]
        search_from = len(self.text)
        for token_id in new_token_ids:
            self.text += self._window.push(token_id)
            self._num_tokens += 1
            if self._num_tokens <= self._params.min_tokens:
                search_from = len(self.text)
        if stop_terminated:
            self.text += self._window.flush()
        return self._find_stop(search_from)

    def visible_text(self, finished: bool) -> str:
        """All text that can be shown now; with each call it only grows.

        Args:
            finished: No token will follow, so that nothing has to be held back.
        """
        if self.stop_string is not None or self._window is None:
            return self.text
        if finished:
            self.text += self._window.flush()
            return self.text
        return self.text[: len(self.text) - self._num_held_back()]

    def next_text(self, finished: bool) -> str:
        """The part of `visible_text` that earlier calls of this method have not returned."""
        new_text = self.visible_text(finished)[self._num_shown :]
        self._num_shown += len(new_text)
        return new_text

    def _find_stop(self, search_from: int) -> str | None:
        """Looks for a stop string that ends behind `search_from`, and cuts the text there."""
        matches = []
        for stop in self._stop:
            begin = self.text.find(stop, max(0, search_from - len(stop) + 1))
            if begin >= 0:
                matches.append((begin + len(stop), begin, stop))
        if not matches:
            return None
        end, begin, self.stop_string = min(matches)
        self.text = self.text[: end if self._params.include_stop_str_in_output else begin]
        return self.stop_string

    def _num_held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        if self._params.include_stop_str_in_output:
            return 0
        longest = max(map(len, self._stop), default=0)
        for length in range(min(longest, len(self.text)), 0, -1):
            end = self.text[-length:]
            if any(stop.startswith(end) and stop != end for stop in self._stop):
                return length
        return 0


class _DecodeWindow:
    """Decodes a stream of tokens, at a cost per token that does not depend on how many there were.

    The library's `DecodeStream` is not used: it holds back everything since the last token that
    ended with a whole character (for ever, if bytes are malformed, decoding ever more of them), and
    fails for good when a decoder changes its mind about bytes it has shown already.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._token_ids = self._context(prompt_token_ids)
        self._shown = self._decode(self._token_ids)  # the beginning of the window's text
        # After how many of the window's tokens all text was shown: latest, and the time before.
        self._clean = self._previous_clean = len(self._token_ids)

    def push(self, token_id: int) -> str:
        """Adds a token; returns the text that has become certain."""
        self._token_ids.append(token_id)
        text = self._decode(self._token_ids)
        if not text.startswith(self._shown):
            text = self._reconcile(text)
        if text and text == self._shown and not text.endswith(REPLACEMENT):
            # A special token without text must not push the context out of the window.
            self._token_ids.pop()
            return ""
        certain = _without_unfinished(text)
        new_text = certain[len(self._shown) :]
        self._shown += new_text
        if self._shown == text:
            self._previous_clean, self._clean = self._clean, len(self._token_ids)
        self._forget_old_tokens(text)
        return new_text

    def flush(self) -> str:
        """Returns what has been held back, as the tokenizer shows it at the end of a text."""
        text = self._decode(self._token_ids)
        if not text.startswith(self._shown):
            text = self._reconcile(text)
        new_text = text[len(self._shown) :]
        self._shown = text
        return new_text

    def _reconcile(self, text: str) -> str:
        """Deals with a text that contradicts what has been shown; returns what to take instead."""
        for unfinished in range(1, _MAX_UNFINISHED + 1):
            before = self._shown.removesuffix(REPLACEMENT * unfinished)
            if before != self._shown and text.startswith(before):
                # The prompt ended within a character, and the output has completed it.
                self._shown = before
                return text
        # Byte fallback: a run with an unfinished character looks malformed as a whole. Decode the
        # bytes since the last whole character on their own; in the middle of a run there is no
        # leading space to lose.
        del self._token_ids[: self._clean]
        self._clean = self._previous_clean = 0
        self._shown = ""
        return self._decode(self._token_ids)

    def _forget_old_tokens(self, text: str) -> None:
        size = len(self._token_ids)
        if size > _WINDOW_TOKENS and self._clean == size:
            first = self._previous_clean
        elif size > _MAX_WINDOW_TOKENS:
            # Malformed bytes, or every token ends within a character: there is no good place for
            # the window to begin, but its end, from which new text is counted, is the same.
            first = size - _CONTEXT_TOKENS
        else:
            return
        rest = self._decode(self._token_ids[first:])
        num_pending = len(text) - len(self._shown)
        self._shown = rest[: max(0, len(rest) - num_pending)]
        del self._token_ids[:first]
        self._clean = max(0, self._clean - first)
        self._previous_clean = 0

    def _context(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The last tokens of the prompt, beginning with a whole character if possible."""
        for size in range(_CONTEXT_TOKENS, _CONTEXT_TOKENS + _MAX_UNFINISHED + 1):
            context = list(prompt_token_ids[-size:])
            if REPLACEMENT not in self._decode(context):
                return context
        return list(prompt_token_ids[-_CONTEXT_TOKENS:])

    def _decode(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(
            token_ids,
            skip_special_tokens=self._skip_special_tokens,
            # Joining " ." to "." would change text that has been shown.
            clean_up_tokenization_spaces=False,
        )
        assert isinstance(text, str)
        return text


def _without_unfinished(text: str) -> str:
    """Cuts off what may be the beginning of a character: three replacement characters at most."""
    end = text[-_MAX_UNFINISHED:]
    return text[: len(text) - len(end) + len(end.rstrip(REPLACEMENT))]
