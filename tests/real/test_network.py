"""The prefill node on another host, and what a network does: cuts, resets, hosts that come back.

The other host is a network namespace of this machine; the link to it is real, and so are the
packets that are lost.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from attrs import define, field

from kvlift.runtime.worker.gathering import Generation
from kvlift.runtime.worker.generation import EngineDownError, FinishKind
from kvlift.runtime.worker.launch import Cluster
from kvlift.runtime.worker.model import Decoder
from tests.real.harm_server import ROOT
from tests.real.harm_world import (
    PAGE,
    WAIT_S,
    Running,
    assert_as_plain,
    likeliest,
    pids_of,
    prompt_of,
    ranks_at_rest,
    request_of,
    settings_of,
    until,
    whole_decoder,
)
from tests.real.net_world import Host, another_host

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

SECRET = "a secret of thirty-two letters.."
PORT = 7411
PEER_DEAD_S = 3.0
RECOVERY_S = 20.0
LONG_TOKENS = 1600
LINK_GBPS = 0.02
"""2.5 MB/s: a long prompt's pages are under way for more than a second."""


@define(eq=False)
class Node:
    """`kvlift serve --role prefill` on the other host."""

    host: Host
    process: "subprocess.Popen[str] | None" = None
    said: list[str] = field(factory=list)

    @property
    def peer(self) -> str:
        return f"tcp://{self.host.address}:{PORT}"

    def start(self) -> None:
        options = ["serve", "--role", "prefill", "--prefill-bind", self.peer]
        sizes = ["--page-tokens", str(PAGE), "--link-gbps", str(LINK_GBPS)]
        self.process = subprocess.Popen(
            self.host.command(sys.executable, "-m", "kvlift", *options, *sizes),
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "KVLIFT_SECRET": SECRET},
        )
        self.said = []
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()
        until(lambda: f"ready {self.peer}\n" in self.said, f"the node is ready: {self.said}")

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stderr is not None
        with process.stderr as lines:
            self.said.extend(lines)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return whole_decoder()


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with another_host() as host:
        made = Node(host)
        made.start()
        try:
            yield made
        finally:
            made.kill()


@pytest.fixture(scope="module")
def shared_cluster(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    settings = settings_of(
        tmp_path_factory.mktemp("network") / "kv",
        role="decode",
        n_ranks=2,
        peers=(node.peer,),
        peer_dead_s=PEER_DEAD_S,
    )
    with Cluster(settings, SECRET) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    """Whole at the beginning, and with nothing held at the end."""
    if shared_cluster.died.is_set():
        shared_cluster.restart_decode()
    yield shared_cluster
    ranks_at_rest(shared_cluster)


def play(cluster: Cluster, name: str, prompts: Sequence[tuple[int, ...]]) -> list[Generation]:
    return cluster.generate(
        [request_of(f"{name}-{index}", prompt, 4) for index, prompt in enumerate(prompts)]
    )


def until_served(cluster: Cluster, decoder: Decoder, name: str, seed: int) -> None:
    """New prompts come through again, and say what they must."""
    started_s = time.monotonic()
    for turn in range(1000):
        prompt = prompt_of(seed + turn, 60)
        [generation] = play(cluster, f"{name}-{turn}", [prompt])
        if generation.finish.kind is FinishKind.LENGTH:
            return assert_as_plain(decoder, prompt, generation)
        assert generation.finish.retryable, generation.finish
        assert time.monotonic() - started_s < RECOVERY_S, generation.finish
        time.sleep(0.2)
    raise AssertionError("unreachable: time ends first")


def transfers_under_way(cluster: Cluster, name: str, seed: int) -> "list[object]":
    """Three long prompts of which some pages have come and not all."""
    before = [rank["bytes_from_peer"] for rank in ranks_at_rest(cluster)]
    prompts = [prompt_of(seed + index, LONG_TOKENS) for index in range(3)]
    going = [
        cluster.submit(request_of(f"{name}-{index}", prompt, 4))
        for index, prompt in enumerate(prompts)
    ]

    def n_pages_come() -> int:
        ranks = cluster.stats()["ranks"]
        pairs = zip(ranks, before, strict=True)
        return int(min((rank["bytes_from_peer"] - n) // rank["page_bytes"] for rank, n in pairs))

    until(lambda: n_pages_come() > 10, "pages under way")
    assert not any(future.done() for future in going)
    return list(going)


def assert_ended_retryable(going: Sequence[object], node: Node, within_s: float) -> None:
    started_s = time.monotonic()
    for future in going:
        finish = future.result(WAIT_S).finish  # type: ignore[attr-defined]
        assert finish.kind is FinishKind.ERROR, finish
        assert finish.retryable
        assert finish.status == 503
        assert f"prefill node {node.peer}" in finish.message
    assert time.monotonic() - started_s < within_s


def test_a_prefill_node_on_another_host_serves_all_prompts(
    cluster: Cluster, decoder: Decoder
) -> None:
    prompts = [prompt_of(seed, 40 + 30 * seed) for seed in range(1, 7)]
    for prompt, generation in zip(prompts, play(cluster, "far", prompts), strict=True):
        assert_as_plain(decoder, prompt, generation)
        assert generation.n_pages_from_peer == -(-len(prompt) // PAGE)
    again = play(cluster, "far-again", prompts)
    assert all(each.cached.device >= len(p) - PAGE for each, p in zip(again, prompts, strict=True))


def test_a_cable_that_is_pulled_in_mid_transfer_ends_what_needs_it_and_nothing_else(
    cluster: Cluster, decoder: Decoder, node: Node
) -> None:
    short = prompt_of(20, 40)
    decoding = Running.started(cluster, request_of("decoding", short, 400))
    going = transfers_under_way(cluster, "cut", 30)
    with node.host.is_cut():
        assert_ended_retryable(going, node, PEER_DEAD_S + 5)
        # What has its prompt goes on, and new requests are told within a bounded time.
        assert decoding.finish.result(WAIT_S).kind is FinishKind.LENGTH
        assert likeliest(decoder, short, decoding.tokens) == decoding.tokens
        [lost] = play(cluster, "while-it-is-cut", [prompt_of(40, 30)])
        assert (lost.finish.kind, lost.finish.retryable) == (FinishKind.ERROR, True)
    until_served(cluster, decoder, "mended", 50)


def test_a_cable_that_is_pulled_for_a_moment_costs_nothing_but_the_moment(
    cluster: Cluster, decoder: Decoder, node: Node
) -> None:
    prompt = prompt_of(60, LONG_TOKENS)
    going = cluster.submit(request_of("blink", prompt, 4))
    time.sleep(0.3)
    with node.host.is_cut():
        time.sleep(PEER_DEAD_S / 3)
    assert_as_plain(decoder, prompt, going.result(WAIT_S))


def test_a_connection_that_is_reset_in_mid_transfer_is_made_again(
    cluster: Cluster, decoder: Decoder, node: Node
) -> None:
    going = transfers_under_way(cluster, "reset", 70)
    with node.host.resets(PORT):
        assert_ended_retryable(going, node, PEER_DEAD_S + 5)
    until_served(cluster, decoder, "after-reset", 80)


def test_ranks_that_die_behind_a_cut_cable_are_followed_by_new_ones(
    cluster: Cluster, decoder: Decoder, node: Node
) -> None:
    """The node's end of their connections stays half open: no packet says that they are gone."""
    going = transfers_under_way(cluster, "dying", 90)
    with node.host.is_cut():
        for pid in pids_of(cluster):
            os.kill(pid, signal.SIGKILL)
        until(cluster.died.is_set, "the launcher has noticed")
        for future in going:
            with contextlib.suppress(EngineDownError):
                assert future.result(WAIT_S).finish.kind is FinishKind.ERROR  # type: ignore[attr-defined]
    cluster.restart_decode()
    until_served(cluster, decoder, "new-ranks", 100)


def test_a_host_that_is_switched_off_and_on_again_is_found_at_its_address(
    cluster: Cluster, decoder: Decoder, node: Node, tmp_path: Path
) -> None:
    """It goes without a word (the cable is cut first), and comes back as another process."""
    going = transfers_under_way(cluster, "off", 110)
    with node.host.is_cut():
        node.kill()
        assert_ended_retryable(going, node, PEER_DEAD_S + 5)
    node.start()
    until_served(cluster, decoder, "on-again", 120)
