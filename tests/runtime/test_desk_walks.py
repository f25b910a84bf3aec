"""Random walks of a prefill node's desk: many ranks, weather, time; every promise of the wire.

The router is a double that keeps what is sent. What a rank was told stays true: after the last
word about a request nothing of it comes, and the engine hears of each request's end once, when
nothing reads its pages.
"""

import random
from collections.abc import Sequence
from typing import Any, cast

import pytest
import zmq
from attrs import define, field

from kvlift.core.ids import Attempt, Rid
from kvlift.core.prompt import token_bytes
from kvlift.effects import wire
from kvlift.runtime.prefill_desk import Desk
from kvlift.runtime.prefill_ports import Limits, Outlet
from kvlift.runtime.prefill_requests import How, Key, Request
from kvlift.runtime.prefill_sessions import Terms

PAGE, PAGE_BYTES, N_ACTS = 4, 16, 1_000
LEASE_S = 4.0
LAST_WORDS = (wire.AbortedAck, wire.Rejected, wire.Gone)


@define(eq=False)
class Tracker:
    done: bool = False


@define(eq=False)
class Rank:
    """One connection of a decode rank: what it has said, and what it was told."""

    identity: bytes
    group: str
    rank: int
    n_ranks: int
    number: int
    is_proved: bool = False
    is_gone: bool = False
    is_full: bool = False
    is_refused: bool = False
    open: set[Key] = field(factory=set)
    wanted: dict[Key, list[int]] = field(factory=dict)
    asked_from: dict[Key, int] = field(factory=dict)
    tokens: set[Key] = field(factory=set)
    held: dict[Key, bytes] = field(factory=dict)
    committed: set[Key] = field(factory=set)
    challenge: wire.Challenge | None = None


@define(eq=False)
class Router:
    """Messages to ranks that are there; a connection that is full takes nothing."""

    walk: "Walk"
    _to: Rank | None = None
    _head: bytes | None = None

    def send(self, data: Any, flags: int = 0, *, copy: bool = True, track: bool = False) -> Any:
        if self._to is None:
            rank = self.walk.ranks.get(bytes(data))
            if rank is None or rank.is_gone:
                raise zmq.ZMQError(zmq.EHOSTUNREACH)
            if rank.is_full:
                raise zmq.Again
            self._to = rank
            return None
        if flags & zmq.SNDMORE:
            self._head = bytes(data)
            return None
        rank, head = self._to, self._head
        self._to = self._head = None
        frames = [data] if head is None else [head, bytes(data)]
        heard = wire.heard_by_decode([memoryview(frame) for frame in frames], PAGE_BYTES)
        self.walk.told(rank, heard)
        if not isinstance(page := heard.message, wire.Page):
            return None
        tracker = Tracker()
        self.walk.reading.setdefault((page.rid, page.attempt), []).append(tracker)
        return tracker


@define(eq=False)
class Walk:
    source: random.Random
    desk: Desk = field(init=False)
    now: float = 100.0
    ranks: dict[bytes, Rank] = field(factory=dict)
    asked: dict[Key, Request] = field(factory=dict)
    reading: dict[Key, list[Tracker]] = field(factory=dict)
    n_ready: dict[Key, int] = field(factory=dict)
    n_attempts: dict[int, int] = field(factory=dict)
    n_pages_sent: int = 0
    n_ended: int = 0

    def __attrs_post_init__(self) -> None:
        terms = Terms(
            layout_fingerprint="l",
            model="m",
            secret=None,
            lease_s=LEASE_S,
            heartbeat_s=1.0,
            n_ranks_max=4,
            sessions_max=self.source.choice([4, 64]),
            incarnation=wire.new_incarnation(),
        )
        limits = Limits(
            requests_max=self.source.choice([3, 64]),
            tokens_bytes_max=4096,
            tokens_bytes_total_max=self.source.choice([200, 1 << 20]),
            send_queue_pages_max=4,
        )
        outlet = Outlet(asked=self._asked, ended=self._ended)
        self.desk = Desk(cast("Any", Router(self)), terms, limits, self, outlet)

    # The engine.

    def _asked(self, request: Request) -> None:
        assert request.key not in self.asked, "asked for twice"
        self.asked[request.key] = request
        self.n_ready[request.key] = 0

    def _ended(self, request: Request, how: How) -> None:
        assert self.asked.pop(request.key) is request, "the end of somebody else"
        assert all(tracker.done for tracker in self.reading.pop(request.key, [])), how
        self.n_ended += 1

    def page_bytes_for(self, rid: Rid, position: int, rank: int, n_ranks: int) -> bytes:
        assert any(key[0] == rid and position < self.n_ready[key] for key in self.asked)
        if self.source.random() < 0.01:
            raise RuntimeError("the engine's own bug")
        return bytes([rank]) * (PAGE_BYTES if self.source.random() < 0.99 else 3)

    def _compute(self) -> None:
        if not self.asked:
            return
        key = self.source.choice(list(self.asked))
        match self.source.randrange(8):
            case 0:
                self.desk.first_token(key, 7, 0.5)
            case 1 if self.source.random() < 0.1:
                self.desk.reject(key, "no" + "\ud800")
            case 2 if self.source.random() < 0.1:
                self.desk.expire(key)
            case _:
                n_pages = self.asked[key].prompt.n_pages
                self.n_ready[key] = max(self.n_ready[key], self.source.randrange(n_pages + 1))
                self.desk.page_ready(key, self.n_ready[key])

    # What the ranks hear.

    def told(self, rank: Rank, heard: wire.Heard) -> None:
        match heard.message:
            case wire.Challenge() as challenge:
                rank.challenge = challenge
            case wire.Welcome():
                rank.is_proved = True
            case wire.Refused():
                rank.is_refused = True
            case wire.Page(rid=rid, attempt=attempt, position=position):
                key = (rid, attempt)
                assert rank.is_proved
                assert key in rank.open, "a page after the last word"
                assert rank.wanted[key].pop(0) == position, "not in the order of the wants"
                assert position < self.n_ready[key]
                assert bytes(heard.payload) == bytes([rank.rank]) * PAGE_BYTES
                self.n_pages_sent += 1
            case wire.FirstToken(rid=rid, attempt=attempt):
                is_known = (rid, attempt) in rank.open | rank.committed
                assert is_known, "a token after the last word"
                assert (rid, attempt) not in rank.tokens, "two tokens"
                rank.tokens.add((rid, attempt))
            case wire.AbortedAck() | wire.Rejected() | wire.Gone() as last:
                rank.open.discard((last.rid, last.attempt))
            case _:
                pass

    # What the ranks say.

    def say(self, rank: Rank, message: wire.Message, payload: bytes | None = None) -> None:
        frames = [rank.identity, wire.encoded(message)]
        if payload is not None:
            frames.append(payload)
        self.desk.hear([memoryview(frame) for frame in frames], self.now)

    def _connect(self) -> None:
        n_ranks = self.source.choice([1, 2])
        number = self.source.randrange(1 << 20)
        group = self.source.choice(["g", "h", ""])
        for at in range(n_ranks):
            if self.source.random() < 0.1:
                continue
            identity = self.source.randbytes(5)
            rank = Rank(identity, group, at, n_ranks, number)
            self.ranks[identity] = rank
            self._greet(rank)

    def _greet(self, rank: Rank) -> None:
        hello = wire.Hello(
            protocol=wire.PROTOCOL_VERSION,
            layout="l",
            model="m",
            group=rank.group,
            rank=rank.rank,
            n_ranks=rank.n_ranks,
            page_bytes=PAGE_BYTES,
            lease_s=self.source.choice([1.0, 60.0]),
            incarnation=wire.Incarnation(number=rank.number, started_unix_s=1),
            nonce=bytes(32),
        )
        self.say(rank, hello)
        if self.source.random() < 0.95:
            self.say(rank, wire.Proof(b""))

    def _mates(self, rank: Rank) -> Sequence[Rank]:
        return [
            other
            for other in self.ranks.values()
            if (other.group, other.number) == (rank.group, rank.number) and not other.is_gone
        ]

    def _talk(self) -> None:
        living = [rank for rank in self.ranks.values() if not rank.is_gone and rank.is_proved]
        if not living:
            self._connect()
            return
        rank = self.source.choice(living)
        match self.source.randrange(10):
            case 0 | 1 | 2:
                self._hold(rank)
            case 3 | 4 | 5 | 6 if rank.open:
                self._want(rank, self.source.choice(sorted(rank.open)))
            case 7 if rank.open:
                key = self.source.choice(sorted(rank.open))
                rank.open.discard(key)
                rank.committed.add(key)
                self.say(rank, wire.Committed(*key))
            case 8 if rank.open:
                self.say(rank, wire.Aborted(*self.source.choice(sorted(rank.open))))
            case _:
                nobodys: list[wire.Message] = [wire.Aborted(Rid("nobody's"), Attempt(0))]
                self.say(rank, self.source.choice([wire.Renew(), *nobodys]))

    def _hold(self, rank: Rank) -> None:
        """A new attempt by most ranks of a worker, or one that its mates hold already."""
        mates = self._mates(rank)
        known = {key: tokens for each in mates for key, tokens in each.held.items()}
        if known and self.source.random() < 0.4:
            key = self.source.choice(sorted(known))
            tokens = known[key]
        else:
            self.n_attempts[rank.number] = self.n_attempts.get(rank.number, 0) + 1
            attempt = Attempt(self.n_attempts[rank.number])
            key = (Rid(f"r{self.source.randrange(4)}"), attempt)
            tokens = token_bytes(range(self.source.choice([3, 8, 17])))
        for each in mates:
            if each.is_proved and self.source.random() < 0.8 and key not in each.held:
                each.open.add(key)
                each.held[key] = tokens
                each.wanted[key] = []
                self.say(each, wire.Hold(*key, bytes(32), PAGE), tokens)

    def _want(self, rank: Rank, key: Key) -> None:
        request = self.asked.get(key)
        n_pages = 1 if request is None else request.prompt.n_pages
        stop = min(rank.asked_from.get(key, n_pages), n_pages)
        if self.source.random() < 0.02:
            stop = n_pages  # a rank that asks twice
        start = self.source.randrange(stop + 1)
        n_wanted = stop - start
        for each in self._mates(rank):
            if key in each.open and self.source.random() < 0.97:
                each.wanted[key].extend(range(start, start + n_wanted))
                each.asked_from[key] = start
                want = wire.Want(*key, start=start, n_pages=n_wanted, promise=0)
                self.say(each, want)

    # Steps.

    def act(self) -> None:
        choice = self.source.random()
        if choice < 0.02:
            self._connect()
        elif choice < 0.55:
            self._talk()
        elif choice < 0.8:
            self._compute()
        elif choice < 0.83 and self.ranks:
            rank = self.source.choice(list(self.ranks.values()))
            match self.source.randrange(5):
                case 0:
                    rank.is_gone = True
                case 1:
                    self._greet(rank)
                case _:
                    rank.is_full = not rank.is_full
        for tracker in (one for each in self.reading.values() for one in each):
            tracker.done = tracker.done or self.source.random() < 0.3
        self.step(self.source.choice([0.2, 1.5]) if self.source.random() < 0.05 else 0.01)

    def step(self, spent_s: float) -> None:
        self.now += spent_s
        if self.source.random() < 0.02:
            self.desk.stood_still(spent_s)
        self.desk.on_time(self.now)
        self.desk.pump()
        self.desk.report_ended()

    def end(self) -> None:
        for tracker in (one for each in self.reading.values() for one in each):
            tracker.done = True
        for rank in self.ranks.values():
            rank.is_gone = True
        for _ in range(40):
            self.step(0.5)
        assert not self.desk.requests
        assert not self.desk.sessions
        assert not self.desk._over
        assert self.desk._tokens_bytes == 0
        assert not self.asked, "the engine was never told of an end"


@pytest.mark.parametrize("seed", range(60))
def test_what_ranks_were_told_stays_true_and_every_request_ends_once(seed: int) -> None:
    walk = Walk(random.Random(seed))
    for _ in range(N_ACTS):
        walk.act()
    walk.end()
    assert walk.n_ended
