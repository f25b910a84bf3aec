"""Random conversations, aborts, flushes, damage and preemption on a pair of doubles.

The oracle of `vllm_double` compares all that a request stands on at each of its steps. Afterwards
nothing may be held, and every request that was not aborted has its answer.
"""

import contextlib
import random
import time
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvlift.core.invariants import breaches
from kvlift.core.tier import Tier
from tests.hosts.test_vllm_connector import TO_KEEP, assert_at_rest, drawn, files
from tests.hosts.vllm_double import BLOCK, PAGE_BYTES, Engine, Request
from tests.hosts.vllm_stand_in import connector_class

N_ACTS = 120


@attrs.define
class Soak:
    """One run; `stems` are conversations that turns continue."""

    source: random.Random
    prefill: Engine
    decode: Engine
    store: Path
    stems: list[list[int]] = attrs.field(factory=lambda: [drawn(n, 12) for n in range(4)])
    asked: list[Request] = attrs.field(factory=list)
    n_made: int = 0

    def act(self) -> None:
        choice = self.source.random()
        if choice < 0.45:
            self._ask(from_prefill=self.source.random() < 0.6)
        elif choice < 0.6 and self.asked:
            self.decode.abort(self.source.choice(self.asked).request_id)
        elif choice < 0.66:
            self.decode.pool.reset()
        elif choice < 0.72:
            tiers = self.source.choice([(Tier.HOST,), (Tier.STORAGE,), (Tier.HOST, Tier.STORAGE)])
            self.decode.connector._scheduler.core.flush(tiers)
        elif choice < 0.78:
            self._damage()
        for _ in range(self.source.randrange(4)):
            self.step()

    def step(self) -> None:
        for engine in (self.prefill, self.decode):
            if engine.has_requests():
                engine.step()
            assert breaches(engine.connector._scheduler.core.state.agreed) == ()

    def _ask(self, *, from_prefill: bool) -> None:
        at = self.source.randrange(len(self.stems))
        tokens = self.stems[at] + drawn(self.source.randrange(1 << 30), self.source.randrange(20))
        if self.source.random() < 0.5:
            self.stems[at] = tokens[: 20 * BLOCK]
        params = self._kept(tokens) if from_prefill else None
        self.n_made += 1
        n_tokens = self.source.choice([1, 2, 9])
        request = Request(f"r{self.n_made}", tokens, n_tokens, kv_transfer_params=params)
        self.asked.append(self.decode.add(request))

    def _kept(self, tokens: list[int]) -> dict[str, Any] | None:
        self.n_made += 1
        request = Request(f"p{self.n_made}", tokens, 1, kv_transfer_params=dict(TO_KEEP))
        self.prefill.add(request)
        deadline = time.monotonic() + 10
        while request.answer is None:
            self.step()
            assert time.monotonic() < deadline
        params: dict[str, Any] | None = request.answer["params"]
        return params

    def _damage(self) -> None:
        pages = files(self.store)
        if pages:
            path = self.source.choice(pages)
            with contextlib.suppress(FileNotFoundError):  # a flush may be under way
                content = bytearray(path.read_bytes())
                content[self.source.randrange(len(content))] ^= 0x55
                path.write_bytes(content)

    def end(self) -> None:
        deadline = time.monotonic() + 30
        while self.prefill.has_requests() or self.decode.has_requests():
            self.step()
            time.sleep(0.0005)
            assert time.monotonic() < deadline, [
                (r.request_id, r.status, r.num_tokens, len(r.blocks))
                for r in self.decode.requests.values()
            ]


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    return connector_class(monkeypatch)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_no_byte_is_wrong_and_nothing_is_left(
    known: type[Any], tmp_path: Path, seed: int
) -> None:
    source, store = random.Random(seed), tmp_path / "store"
    n_ranks = 1 + seed % 2
    host_pages = source.choice([0, 3, 12, 60])
    extra: dict[str, Any] = {"host_bytes": host_pages * PAGE_BYTES, "unplaced_steps_max": 50}
    if seed % 3 != 2:
        extra["storage"] = str(store)
    prefill = Engine(known, "kv_producer", {"kept_s": 1.0}, n_blocks=200, n_ranks=n_ranks)
    decode = Engine(known, "kv_consumer", extra, n_blocks=48, n_ranks=n_ranks, name="decode")
    soak = Soak(source, prefill, decode, store)
    try:
        for _ in range(N_ACTS):
            soak.act()
        soak.end()
        for request in soak.asked:
            assert request.answer is not None
        assert_at_rest(prefill)
        assert_at_rest(decode)
    finally:
        prefill.close()
        decode.close()
