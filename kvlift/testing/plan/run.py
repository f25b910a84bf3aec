"""A plan: a trace played on some decode nodes of one size, and what came of it."""

from collections.abc import Callable, Sequence
from typing import Final

from attrs import frozen

from kvlift.core.tier import Tier
from kvlift.runtime.demo.trace import BLOCK_TOKENS, TraceRequest
from kvlift.testing.plan.node import Node, Tally
from kvlift.testing.plan.ports import Prefill, Shelf
from kvlift.testing.plan.sizes import NS, Ask, Rates, Sizes, config_of, n_pages_of
from kvlift.testing.sim.agenda import Agenda

IDLE_STEPS_MAX: Final = 100_000
"""Steps in which no request ends: then something is wrong."""


@frozen(kw_only=True)
class Row:
    """`hit`: shares of all prompt tokens; `ttft_s`: from arrival until every page is in place."""

    sizes: Sizes
    hit: dict[str, float]
    ttft_s: dict[str, float]
    peer_bytes: int
    n_requests: int
    n_refused: int
    n_failed: int
    n_retracted: int
    seconds: float

    def as_json(self) -> dict[str, object]:
        return {
            "device_gib": self.sizes.device_gib,
            "host_gib": self.sizes.host_gib,
            "storage_gib": self.sizes.storage_gib,
            "hit": self.hit,
            "ttft_s": self.ttft_s,
            "peer_bytes": self.peer_bytes,
            "requests": self.n_requests,
            "refused": self.n_refused,
            "failed": self.n_failed,
            "retracted": self.n_retracted,
            "seconds": self.seconds,
        }


def planned(
    requests: Sequence[TraceRequest],
    sizes: Sizes,
    rates: Rates,
    n_nodes: int,
    on_over: Callable[[int], None] = lambda _n: None,
) -> Row:
    """Play them. `on_over`: is told how many requests are over. Raises `PlanRefused`."""
    begin_ms = requests[0].timestamp
    asks = [Ask.of(number, request, begin_ms) for number, request in enumerate(requests, 1)]
    n_tokens_by_rid = {ask.rid: ask.n_tokens for ask in asks}
    agenda, tally = Agenda(), Tally()
    shelf = Shelf(n_pages_of(sizes.storage_gib, rates))
    prefill = Prefill(rates, n_tokens_by_rid.__getitem__)
    config = config_of(sizes, rates)
    nodes = [Node(config, rates, agenda, shelf, prefill, tally) for _ in range(n_nodes)]
    _play(asks, nodes, agenda, tally, on_over)
    return Row(
        sizes=sizes,
        hit={
            tier.value: round(tally.hit[tier.value] * BLOCK_TOKENS / max(1, tally.n_tokens), 6)
            for tier in Tier
        },
        ttft_s=summary(tally.ttft_ns),
        peer_bytes=sum(node.peers.n_bytes for node in nodes),
        n_requests=len(asks),
        n_refused=tally.n_refused,
        n_failed=tally.n_failed,
        n_retracted=tally.n_retracted,
        seconds=round(agenda.now_ns / NS, 3),
    )


def _play(
    asks: Sequence[Ask],
    nodes: Sequence[Node],
    agenda: Agenda,
    tally: Tally,
    on_over: Callable[[int], None],
) -> None:
    step_ns, n_come, n_idle = nodes[0].rates.step_ns, 0, 0
    while tally.n_over < len(asks):
        until_ns = agenda.now_ns + step_ns
        if not any(node.is_awake() for node in nodes):
            arrival_ns = asks[n_come].arrival_ns if n_come < len(asks) else None
            coming = (arrival_ns, agenda.next_ns(), *(node.next_ns() for node in nodes))
            times = [time_ns for time_ns in coming if time_ns is not None]
            until_ns = max(until_ns, -(-min(times, default=until_ns) // step_ns) * step_ns)
        agenda.run_until(until_ns)
        while n_come < len(asks) and asks[n_come].arrival_ns <= agenda.now_ns:
            _node_for(asks[n_come], nodes).submit(asks[n_come])
            n_come += 1
        n_over = tally.n_over
        for node in nodes:
            if node.is_awake():
                node.step()
        n_idle = 0 if tally.n_over > n_over else n_idle + 1
        if n_idle > IDLE_STEPS_MAX:
            raise AssertionError(f"{len(asks) - tally.n_over} requests do not end any more")
        on_over(tally.n_over)


def _node_for(ask: Ask, nodes: Sequence[Node]) -> Node:
    """Where most of its prefix is, as a router that knows the caches would choose; then the one
    with the fewest requests."""
    if len(nodes) == 1:
        return nodes[0]

    def worth(node: Node) -> tuple[int, int]:
        return node.driver.hit(ask.prompt).host, -len(node.jobs)

    return max(nodes, key=worth)


def summary(times_ns: Sequence[int]) -> dict[str, float]:
    """Seconds; of nothing, zeros."""
    ordered = sorted(times_ns) or [0]

    def at(share: float) -> float:
        place = min(len(ordered) - 1, int(share * len(ordered)))
        return round(ordered[place] / NS, 6)

    mean = round(sum(ordered) / len(ordered) / NS, 6)
    return {"mean": mean, "p50": at(0.5), "p90": at(0.9), "p99": at(0.99)}
