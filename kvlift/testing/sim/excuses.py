"""Why a request may fail: what the weather did to its prefill node, and when.

The judge of `failed_by_cache`. It knows what the simulated nodes did and nothing of the core.
"""

from attrs import define, field


@define(eq=False)
class Excuses:
    """`of_request`: (when, what) by request. `of_node`: (from, to, what) by node.

    `to` None: still."""

    of_request: dict[str, list[tuple[int, str]]] = field(factory=dict)
    of_node: dict[str, list[tuple[int, int | None, str]]] = field(factory=dict)

    def request(self, rid: str, now_ns: int, what: str) -> None:
        self.of_request.setdefault(rid, []).append((now_ns, what))

    def node_is_bad(self, name: str, now_ns: int, what: str) -> None:
        self.of_node.setdefault(name, []).append((now_ns, None, what))

    def node_was_bad(self, name: str, now_ns: int, what: str) -> None:
        self.of_node.setdefault(name, []).append((now_ns, now_ns, what))

    def node_is_well(self, name: str, now_ns: int) -> None:
        spans = self.of_node.get(name, [])
        self.of_node[name] = [
            (start, now_ns if stop is None else stop, what) for start, stop, what in spans
        ]

    def found(self, rid: str, node: str, asked_ns: int) -> str | None:
        """What excuses the failure of a request that was submitted then; None: nothing does."""
        for when, what in self.of_request.get(rid, ()):
            if when >= asked_ns:
                return what
        for _start, stop, what in self.of_node.get(node, ()):
            if stop is None or stop >= asked_ns:
                return what
        return None
