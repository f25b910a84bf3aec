"""The prefill half inside one vLLM worker: finished prompts, kept for the decode instance.

vLLM has computed a prompt before anybody may ask for it, so all of its pages are ready at once. Its
blocks stay allocated until the node says that nothing reads them: committed, aborted, the lease
ended, or nobody came within `kept_s`.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from attrs import define, field

from kvlift.core.ids import Attempt, Rid
from kvlift.effects.ports import DeviceMemory
from kvlift.effects.wire_security import SharedSecret
from kvlift.runtime.hosts.vllm_metadata import Keep
from kvlift.runtime.prefill import PrefillNode
from kvlift.runtime.prefill_requests import Asked, Ended, How

_log = logging.getLogger(__name__)

EARLY_S: Final = 5.0
"""How long a request that this rank does not know yet may wait for its engine's step to say so."""

GONE_MAX: Final = 4_096
"""Names of prompts that were freed, kept so that who comes too late hears of it at once."""


@define(eq=False)
class _Kept:
    keep: Keep
    until_s: float
    n_asked: int = 0


@define(eq=False)
class KeptPrompts:
    """Implements `PageSource`. `released` are the requests whose blocks vLLM may free.

    Called on the worker's thread and on the node's; `clock` counts seconds."""

    memory: DeviceMemory
    kept_s: float
    clock: Callable[[], float] = time.monotonic
    n_bytes_sent: int = field(default=0, init=False)
    _kept: dict[str, _Kept] = field(factory=dict, init=False)
    _early: list[tuple[float, Asked]] = field(factory=list, init=False)
    _given_back: dict[str, float] = field(factory=dict, init=False)
    _released: list[str] = field(factory=list, init=False)
    _gone: OrderedDict[str, None] = field(factory=OrderedDict, init=False)
    _lock: threading.RLock = field(factory=threading.RLock, init=False)
    _node: PrefillNode | None = field(default=None, init=False)

    def open(
        self,
        bind: str,
        fingerprint: str,
        model: str,
        *,
        lease_s: float,
        secret: SharedSecret | None,
    ) -> str:
        """Listen. The address that decode instances reach. Raises `ValueError`."""
        self._node = PrefillNode(
            bind,
            fingerprint,
            self,
            model=model,
            secret=secret,
            lease_s=lease_s,
            n_ranks_max=1,
            on_change=self.on_change,
        )
        self.on_change()
        return self._node.address

    @property
    def n_kept(self) -> int:
        return len(self._kept)

    def keep(self, keep: Keep) -> None:
        """This prompt is computed; its blocks stay as they are until it is released."""
        with self._lock:
            self._kept[keep.rid] = _Kept(keep, self.clock() + self.kept_s)
            if self._given_back.pop(keep.rid, None) is not None:
                self._release(keep.rid)
        self.on_change()

    def taken_released(self) -> set[str]:
        """Requests that are over since the last call. Ends what nobody asked for in time."""
        self.on_change()
        now = self.clock()
        with self._lock:
            for rid, kept in list(self._kept.items()):
                if kept.n_asked == 0 and now > kept.until_s:
                    _log.warning("nobody asked for prompt %s within %g s", rid[:64], self.kept_s)
                    self._release(rid)
            released, self._released = set(self._released), []
        return released

    def page_bytes_for(self, rid: Rid, position: int, rank: int, n_ranks: int) -> bytearray:
        """On the node's thread: one page, read from the engine's blocks."""
        del rank, n_ranks  # this node has one rank's shard
        with self._lock:
            block = self._kept[rid].keep.blocks[position]
        page = bytearray(self.memory.page_bytes)
        self.memory.read_page(block, memoryview(page))
        self.n_bytes_sent += len(page)
        return page

    def on_change(self) -> None:
        """The node has news, or this side has."""
        if self._node is None:
            return
        with self._lock:
            now = self.clock()
            waiting = self._early + [(now + EARLY_S, asked) for asked in self._node.poll()]
            n_early, self._early = len(self._early), []
            for until_s, asked in waiting:
                if asked.rid in self._kept:
                    self._answer(self._node, asked, self._kept[asked.rid])
                elif now > until_s or asked.rid in self._gone:
                    self._node.reject(asked.rid, asked.attempt, "this prompt is not kept here")
                else:
                    self._early.append((until_s, asked))
            if len(self._early) > n_early:
                self._look_later()
            for ended in self._node.ended():
                self._end(ended)

    def _look_later(self) -> None:
        """An engine that is idle makes no step in which somebody could be refused."""
        later = threading.Timer(EARLY_S + 0.1, self.on_change)
        later.daemon = True
        later.start()

    def _answer(self, node: PrefillNode, asked: Asked, kept: _Kept) -> None:
        if kept.keep.namespace != asked.prompt.namespace:
            node.reject(asked.rid, asked.attempt, "kept under another model, salt or adapter")
            return
        n_asked = len(asked.prompt.tokens)
        if kept.keep.tokens[:n_asked] != asked.prompt.tokens or not n_asked:
            node.reject(asked.rid, asked.attempt, "another prompt is kept under this name")
            return
        if asked.prompt.n_pages > len(kept.keep.blocks):
            node.reject(asked.rid, asked.attempt, "pages of another size than this node's")
            return
        kept.n_asked += 1
        node.page_ready(asked.rid, asked.attempt, asked.prompt.n_pages)

    def _end(self, ended: Ended) -> None:
        self._early = [
            (until_s, asked) for until_s, asked in self._early if _key(asked) != _key(ended)
        ]
        kept = self._kept.get(ended.rid)
        if kept is None and ended.how is not How.REJECTED:
            now = self.clock()
            self._given_back = {rid: t for rid, t in self._given_back.items() if t > now}
            self._given_back[ended.rid] = now + EARLY_S  # before this engine's step has said so
        if kept is None or ended.how is How.REJECTED or kept.n_asked == 0:
            return
        kept.n_asked -= 1
        if kept.n_asked == 0:
            self._release(ended.rid)

    def _release(self, rid: str) -> None:
        del self._kept[rid]
        self._released.append(rid)
        self._gone[rid] = None
        while len(self._gone) > GONE_MAX:
            self._gone.popitem(last=False)

    def close(self) -> bool:
        """True: nothing reads the engine's blocks any more."""
        node, self._node = self._node, None
        return node is None or node.close()


def _key(named: Asked | Ended) -> tuple[Rid, Attempt]:
    return named.rid, named.attempt
