"""The way from prefill to decode as a `Peers` port: real bytes, at a rate that is kept by a clock.

Pages leave in the order of their requests, each as soon as it is computed, several in one batch;
a batch lands when its copy has ended and the link of the given rate would have carried it.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from attrs import define, field

from kvlift.cli.benches.ttft.prefill import Prefill
from kvlift.cli.benches.ttft.stage import Stage
from kvlift.cli.benches.ttft.workload import Turn
from kvlift.core.ids import Attempt, Rid, Ticket
from kvlift.core.keys import TOKEN_BYTES
from kvlift.core.landed import Landed, PagesArrived, PeerLetGo, TokenArrived
from kvlift.core.prompt import Prompt

BATCH_S = 0.002
"""What one batch takes on the link at most, if it has more than a page."""

LOGPROB = -1.0


@define
class Moments:
    """When one request was heard of, asked for its first page, had its last page and its token."""

    held_s: float
    wanted_s: float = 0.0
    landed_s: float = 0.0
    token_s: float = 0.0


@define(eq=False)
class Talk:
    """One request's conversation: what is still wanted, in order, and where it goes."""

    ticket: Ticket
    turn: Turn
    wanted: deque[tuple[int, int]] = field(factory=deque)
    n_arrived: int = 0
    n_flying: int = 0
    is_aborted: bool = False


@define(eq=False)
class Batch:
    talk: Talk
    n_pages: int
    due_s: float
    done: torch.cuda.Event | None


class Link:
    """Implements `ports.Peers`. `rate_bytes_s` bounds all transfers together."""

    def __init__(
        self,
        prefill: Prefill,
        stage: Stage,
        turns: Sequence[Turn],
        rate_bytes_s: float,
        on_landed: Callable[[], None],
    ) -> None:
        self._prefill = prefill
        self._stage = stage
        self._turns = {turn.rid: turn for turn in turns}
        self._rate_bytes_s = rate_bytes_s
        self._batch_max = max(1, min(stage.n_pages, int(BATCH_S * rate_bytes_s / stage.page_bytes)))
        self._on_landed = on_landed
        self._changed = threading.Condition()
        self._talks: dict[Ticket, Talk] = {}
        self._ticket_by_rid: dict[str, Ticket] = {}
        self._reports: deque[Landed] = deque()
        self._is_closing = False
        self.n_bytes = 0
        self.moments: dict[str, Moments] = {}
        self.error: BaseException | None = None
        prefill.on_pages = self._wake
        prefill.on_token = self._token
        self._thread = threading.Thread(target=self._live, name="bench-link", daemon=True)
        self._thread.start()

    # The port.

    def send_hold(
        self, ticket: Ticket, rid: Rid, attempt: Attempt, peer: str, prompt: Prompt
    ) -> None:
        turn = self._turns[rid]
        assert len(prompt.tokens) == turn.n_tokens * TOKEN_BYTES
        with self._changed:
            self._talks[ticket] = Talk(ticket, turn)
            self._ticket_by_rid[rid] = ticket
            self.moments[rid] = Moments(time.perf_counter())
        self._prefill.ask(turn)

    def send_want(
        self, ticket: Ticket, start: int, device_pages: Sequence[int], promise: int
    ) -> None:
        with self._changed:
            talk = self._talks[ticket]
            talk.wanted.extend(enumerate(device_pages, start))
            moments = self.moments[talk.turn.rid]
            moments.wanted_s = moments.wanted_s or time.perf_counter()
            self._changed.notify_all()

    def send_committed(self, ticket: Ticket) -> None:
        with self._changed:
            self._talks.pop(ticket, None)

    def send_aborted(self, ticket: Ticket) -> None:
        with self._changed:
            talk = self._talks.get(ticket)
            if talk is not None:
                talk.is_aborted = True
                talk.wanted.clear()
                self._let_go_if_quiet(talk)

    def close_peer(self, ticket: Ticket) -> None:
        self.send_aborted(ticket)

    def landed(self) -> list[Landed]:
        if self.error is not None:
            raise RuntimeError("the link's thread has stopped") from self.error
        with self._changed:
            reports = list(self._reports)
            self._reports.clear()
        return reports

    def close(self, deadline_s: float) -> bool:
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    # What prefill tells; on its thread.

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _token(self, rid: str) -> None:
        with self._changed:
            ticket = self._ticket_by_rid[rid]
            self.moments[rid].token_s = time.perf_counter()
            first = int.from_bytes(self._turns[rid].output[:TOKEN_BYTES], "little")
            self._reports.append(TokenArrived(ticket, first, LOGPROB))
        self._on_landed()

    # The link's own thread.

    def _live(self) -> None:
        try:
            flying: deque[Batch] = deque()
            free_s = 0.0
            while True:
                chosen = self._next(is_idle=not flying)
                if chosen is None and not flying:
                    return
                if chosen is not None:
                    free_s = self._send(*chosen, free_s, flying)
                if flying and (chosen is None or len(flying) > 1):
                    self._land(flying.popleft())
        except BaseException as error:  # noqa: BLE001 - raised again by landed()
            self.error = error
            self._on_landed()

    def _next(self, *, is_idle: bool) -> tuple[Talk, list[tuple[int, int]]] | None:
        """The pages that leave now. Waits for some while nothing flies; None: there are none."""
        with self._changed:
            while not self._is_closing:
                for talk in self._talks.values():
                    pages = self._sendable(talk)
                    if pages:
                        talk.n_flying += len(pages)
                        return talk, pages
                if not is_idle:
                    return None
                self._changed.wait()
        return None

    def _sendable(self, talk: Talk) -> list[tuple[int, int]]:
        kept = self._prefill.kept[talk.turn.conversation]
        n_ready = kept.n_computed // self._prefill.model.sizes.page_tokens
        pages: list[tuple[int, int]] = []
        while talk.wanted and talk.wanted[0][0] < n_ready and len(pages) < self._batch_max:
            if pages and talk.wanted[0][0] != pages[-1][0] + 1:
                break
            pages.append(talk.wanted.popleft())
        return pages

    def _send(
        self, talk: Talk, pages: list[tuple[int, int]], free_s: float, flying: deque[Batch]
    ) -> float:
        """When the link is free again."""
        size_bytes = len(pages) * self._stage.page_bytes
        due_s = max(free_s, time.perf_counter()) + size_bytes / self._rate_bytes_s
        words = self._prefill.kept[talk.turn.conversation].words
        done = self._stage.carry(words, pages[0][0], [place for _, place in pages])
        self.n_bytes += size_bytes
        flying.append(Batch(talk, len(pages), due_s, done))
        return due_s

    def _land(self, batch: Batch) -> None:
        if batch.done is not None:
            batch.done.synchronize()
        left_s = batch.due_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)
        talk = batch.talk
        with self._changed:
            talk.n_flying -= batch.n_pages
            talk.n_arrived += batch.n_pages
            self.moments[talk.turn.rid].landed_s = time.perf_counter()
            if talk.is_aborted:
                self._let_go_if_quiet(talk)
            else:
                self._reports.append(PagesArrived(talk.ticket, talk.n_arrived))
        self._on_landed()

    def _let_go_if_quiet(self, talk: Talk) -> None:
        if not talk.n_flying:
            self._talks.pop(talk.ticket, None)
            self._reports.append(PeerLetGo(talk.ticket))
