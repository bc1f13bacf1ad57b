"""From tokens to text that may be shown, one request at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lockstep.request import FinishReason, RequestOutput
from lockstep.tokenizer import IncrementalDecoder, StopFinder, Tokenizer


@dataclass(frozen=True)
class StreamDelta:
    """What came since the last delta of the same request.

    Attributes:
        index: Place of its prompt among those given.
        request_id: The request.
        text: New text. It lags behind the tokens while a character is not whole or a
            stop string may be coming.
        token_ids: New tokens.
        logprobs: For each new token, log-probabilities by token id; None unless asked
            for.
        output: The whole output, on the last delta alone.
    """

    index: int
    request_id: str
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, float]] | None = None
    output: RequestOutput | None = None


class Reply:
    """A request's text as it grows.

    Args:
        index: Place of its prompt.
        request_id: The request.
        stop: Its stop strings.
        tokenizer: None where there is none, and so no text.

    Attributes:
        deltas: What nobody has taken yet.
        output: The whole output, once the request has ended.
    """

    def __init__(
        self,
        index: int,
        request_id: str,
        stop: Sequence[str],
        tokenizer: Tokenizer | None,
    ) -> None:
        """Start with no token."""
        self.index, self.request_id = index, request_id
        self.deltas: list[StreamDelta] = []
        self.output: RequestOutput | None = None
        self._decoder = IncrementalDecoder(tokenizer) if tokenizer else None
        self._finder = StopFinder(stop)
        self._text = self._unsent = ""
        self._count = 0

    @property
    def has_stopped(self) -> bool:
        """Whether the text has come to a stop string."""
        return self._finder.found

    def take(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[dict[int, float]] | None,
        output: RequestOutput | None = None,
    ) -> None:
        """Take what the request has generated and make a delta of what is new.

        Where the text has come to a stop string, that waits for the output.

        Args:
            token_ids: All generated tokens.
            logprobs: Of all of them; None unless asked for.
            output: The engine's output, once the request has ended.
        """
        new, is_last = list(token_ids[self._count :]), output is not None
        text = self._decoder.push(new, is_last) if self._decoder else ""
        text = self._finder.push(text, is_last)
        self._text += text
        self._unsent += text
        if output is None and self.has_stopped:
            return
        if output is not None:
            is_cut = self.has_stopped and output.finish_reason is FinishReason.LENGTH
            reason = FinishReason.STOP if is_cut else output.finish_reason
            output = replace(output, text=self._text, finish_reason=reason)
            self.output = output
        if new or output:
            values = None if logprobs is None else list(logprobs[self._count :])
            place = self.index, self.request_id
            self.deltas.append(StreamDelta(*place, self._unsent, new, values, output))
            self._unsent = ""
        self._count += len(new)
