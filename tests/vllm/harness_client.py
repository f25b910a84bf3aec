"""Conversations by token ids, their log-probabilities, and what a turn costs."""

import json
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs
import httpx

N_LABELS: Final = 24
"""Every step reports the log-probabilities of these first tokens of the vocabulary, too."""

TOLERANCE: Final = 1e-4


@attrs.frozen
class Answer:
    """What one request brought. Times are seconds on the client's clock."""

    tokens: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...]
    """One mapping a generated token: the sampled one and the labels."""
    n_cached: int
    ttft_s: float
    token_gaps_s: tuple[float, ...]
    finish_reason: str


@attrs.define
class Client:
    """Talks to a server or a proxy."""

    url: str
    timeout_s: float = 120.0

    def complete(self, prompt: Sequence[int], n_tokens: int, **more: Any) -> Answer:
        """Greedy, streamed. The frequency penalty keeps random weights from cycling."""
        body = {
            "model": "model",
            "prompt": list(prompt),
            "max_tokens": n_tokens,
            "temperature": 0,
            "frequency_penalty": 2.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "logprobs": 1,
            "logprob_token_ids": list(range(3, 3 + N_LABELS)),
            **more,
        }
        began = time.perf_counter()
        reader = _Reader(began)
        with (
            httpx.Client(timeout=self.timeout_s) as http,
            http.stream("POST", f"{self.url}/v1/completions", json=body) as answer,
        ):
            if answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code}: {answer.read().decode()[:500]}")
            for line in answer.iter_lines():
                reader.read(line)
        return reader.answer()


class _Reader:
    """Server-sent events of one completion."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._at: list[float] = []
        self._tokens: list[int] = []
        self._logprobs: list[Mapping[int, float]] = []
        self._n_cached = 0
        self._finish = ""

    def read(self, line: str) -> None:
        if not line.startswith("data: ") or line == "data: [DONE]":
            return
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise RuntimeError(f"the server says {event['error']}")
        for choice in event["choices"]:
            new = choice.get("token_ids") or []
            if new:
                self._at.append(time.perf_counter())
            self._tokens += new
            if choice.get("logprobs"):
                self._logprobs += map(_by_token, choice["logprobs"]["top_logprobs"])
            self._finish = choice.get("finish_reason") or self._finish
        details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
        self._n_cached = details.get("cached_tokens") or self._n_cached

    def answer(self) -> Answer:
        if not self._tokens:
            raise RuntimeError(f"an answer without a token, finish_reason {self._finish!r}")
        gaps = [after - before for before, after in zip(self._at, self._at[1:], strict=False)]
        return Answer(
            tokens=tuple(self._tokens),
            logprobs=tuple(self._logprobs),
            n_cached=self._n_cached,
            ttft_s=self._at[0] - self._began,
            token_gaps_s=tuple(gaps),
            finish_reason=self._finish,
        )


def _by_token(top: Mapping[str, float]) -> dict[int, float]:
    return {int(name.removeprefix("token_id:")): value for name, value in top.items()}


def difference(one: Answer, other: Answer) -> float:
    """The largest difference of a log-probability; infinite where the answers went apart.

    Tokens of both were chosen greedily, so they may differ only where two are equally likely; a
    comparison behind that place would compare different sequences.
    """
    if len(one.tokens) != len(other.tokens):
        return float("inf")
    worst = 0.0
    steps = zip(one.tokens, other.tokens, one.logprobs, other.logprobs, strict=True)
    for mine, yours, here, there in steps:
        common = here.keys() & there.keys()
        worst = max([worst, *(abs(here[token] - there[token]) for token in sorted(common))])
        if mine != yours:
            gap = abs(here[mine] - there[yours])
            return worst if gap < TOLERANCE else float("inf")
    return worst


@attrs.frozen
class Script:
    """A conversation: what the user says in each turn, as token ids."""

    turns: tuple[tuple[int, ...], ...]
    n_answer: int

    @classmethod
    def drawn(
        cls, seed: int, *, n_turns: int = 6, n_first: int = 600, n_next: int = 200,
        n_answer: int = 24, vocab: int = 1024,
    ) -> "Script":  # fmt: skip
        chance = random.Random(seed)
        sizes = [n_first, *([n_next] * (n_turns - 1))]
        turns = tuple(tuple(chance.randrange(3, vocab) for _ in range(size)) for size in sizes)
        return cls(turns, n_answer)

    def prompt(self, turn: int, answers: Sequence[Answer]) -> list[int]:
        """All that was said before this turn, by both, and what the user says now.

        `answers` are those of the reference: every system under test is asked the same.
        """
        said: list[int] = []
        for words, answer in zip(self.turns[:turn], answers, strict=False):
            said += [*words, *answer.tokens]
        return [*said, *self.turns[turn]]

    def play(self, client: Client, reference: Sequence[Answer] | None = None) -> list[Answer]:
        """All turns, one after the other. Without a reference its own answers are history."""
        answers: list[Answer] = []
        for turn in range(len(self.turns)):
            prompt = self.prompt(turn, answers if reference is None else reference)
            answers.append(client.complete(prompt, self.n_answer))
        return answers
