"""The other half: a prefill node around an engine that computes KV. Here the KV is made up."""

import threading
from types import TracebackType
from typing import Self

from kvlift import PageLayout, PrefillNode


class MadeUpEngine:
    """A thread that answers whatever is asked: a page's bytes are its position, the token is 5."""

    def __init__(self, layout: PageLayout) -> None:
        self._page_bytes = layout.page_bytes
        self._changed = threading.Event()
        self._is_closing = False
        self._node = PrefillNode(
            "tcp://127.0.0.1:*", layout.fingerprint(), self, on_change=self._changed.set
        )
        self.address = self._node.address
        self._thread = threading.Thread(target=self._compute, name="made-up-engine")
        self._thread.start()

    def page_bytes_for(self, rid: str, position: int, rank: int, n_ranks: int) -> bytes:
        """Called by the node when a page goes out: one page of one decode rank's shard."""
        return bytes([position % 256]) * self._page_bytes

    def _compute(self) -> None:
        while not self._is_closing:
            self._changed.wait()
            self._changed.clear()
            for asked in self._node.poll():  # a real engine batches these and computes for a while
                self._node.page_ready(asked.rid, asked.attempt, asked.prompt.n_pages)
                self._node.first_token(asked.rid, asked.attempt, token=5, logprob=-0.5)
            for _ended in self._node.ended():
                pass  # a real engine frees the request's pages now

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_closing = True
        self._changed.set()
        self._thread.join()
        self._node.close()
