"""One answer as it grows: tokens, log-probabilities, text, and where it must stop."""

from typing import Final

from attrs import define, field

from kvlift.runtime.worker.generation import CachedTokens, Finish, FinishKind, Output, Request
from kvlift.runtime.worker.tokenizer import TextCodec

UNFINISHED_CHARACTER: Final = "\ufffd"


@define(eq=False)
class Answer:
    """Collects the outputs of one request.

    Text is decoded a few tokens at a time (vLLM's and SGLang's two-offset scheme), so that a
    character split over tokens is shown whole and the cost does not grow with the answer.
    """

    request: Request
    codec: TextCodec
    stop_texts: tuple[str, ...] = ()
    tokens: list[int] = field(factory=list, init=False)
    logprobs: list[float] = field(factory=list, init=False)
    cached: CachedTokens = field(factory=CachedTokens, init=False)
    finish: Finish | None = field(default=None, init=False)
    stopped_by: str | None = field(default=None, init=False)
    _text: str = field(default="", init=False)
    _decoded_from: int = field(default=0, init=False)
    _decoded_to: int = field(default=0, init=False)

    @property
    def is_done(self) -> bool:
        return self.finish is not None

    @property
    def text(self) -> str:
        """What may be shown: text that could still become a stop text is held back."""
        if self.is_done:
            return self._text
        held = 0
        for stop in self.stop_texts:
            for length in range(min(len(stop) - 1, len(self._text)), held, -1):
                if self._text.endswith(stop[:length]):
                    held = length
                    break
        return self._text[: len(self._text) - held]

    def add(self, output: Output) -> None:
        """Take the next output; after a stop text the answer is done, whatever the engine does."""
        if output.cached is not None:
            self.cached = output.cached
        for token, logprob in zip(output.tokens, output.logprobs, strict=True):
            self.tokens.append(token)
            self.logprobs.append(logprob)
            self._decode(is_last=False)
            if self._cut_at_stop():
                return
        if output.finish is not None:
            self._decode(is_last=True)
            if not self._cut_at_stop():
                self.finish = output.finish

    def _decode(self, *, is_last: bool) -> None:
        known = self.codec.decode(self.tokens[self._decoded_from : self._decoded_to])
        whole = self.codec.decode(self.tokens[self._decoded_from :])
        if len(whole) > len(known) and (is_last or not whole.endswith(UNFINISHED_CHARACTER)):
            self._text += whole[len(known) :]
            self._decoded_from, self._decoded_to = self._decoded_to, len(self.tokens)

    def _cut_at_stop(self) -> bool:
        found = [(at, stop) for stop in self.stop_texts if (at := self._text.find(stop)) >= 0]
        if not found:
            return False
        at, self.stopped_by = min(found)
        self._text = self._text[:at]
        self.finish = Finish(kind=FinishKind.STOP)
        return True
