"""Plays a workload once, in one mode, on a cluster of its own, and writes down what happened."""

import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

from attrs import define, field, frozen

from kvlift.runtime.demo.timeline import Timeline, timeline_of
from kvlift.runtime.demo.workload import Sizes, Turn, Workload, prompt_of
from kvlift.runtime.worker.gathering import Generation
from kvlift.runtime.worker.generation import (
    CachedTokens,
    EngineDownError,
    FinishKind,
    Request,
    Sampling,
)
from kvlift.runtime.worker.launch import Cluster
from kvlift.runtime.worker.settings import WorkerSettings

MODES: Final = ("none", "device", "host", "all")
RESTORING: Final = ("host", "all")
"""Modes in which pages come back to the device."""

REST_S: Final = 60.0
LOOK_S: Final = 0.05
JOURNAL: Final = "journal.ndjson"


@frozen(kw_only=True)
class Setup:
    """What is the same in every mode. `model` computes in float32."""

    n_ranks: int
    model: str
    seed: int
    device: str
    link_gbps: float
    workload: Workload
    sizes: Sizes


@frozen(kw_only=True)
class Played:
    """One request as its client saw it. `fault` is a sentence, empty where all went well."""

    turn: Turn
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: CachedTokens
    ttft_s: float
    tpot_s: float | None
    fault: str

    @property
    def n_tokens_from_peer(self) -> int:
        return len(self.prompt) - self.cached.total


@frozen(kw_only=True)
class ModeRun:
    """`ranks`: each rank's statistics at the end; `has_rested`: nothing was under way then.

    `fault`: why the run ended early, and then there are no statistics; empty where it did not.
    """

    mode: str
    device_pages: int
    host_pages: int
    played: tuple[Played, ...]
    ranks: tuple[dict[str, Any], ...]
    has_rested: bool
    timeline: Timeline | None
    fault: str = ""


def settings_of(setup: Setup, mode: str, folder: Path) -> WorkerSettings:
    """The same worker in every mode, with fewer and fewer tiers taken away."""
    has_host = mode in RESTORING
    return WorkerSettings(
        model=setup.model,
        seed=setup.seed,
        n_ranks=setup.n_ranks,
        page_tokens=setup.workload.page_tokens,
        device_pages=setup.sizes.device_pages,
        host_pages=setup.sizes.host_pages if has_host else 0,
        storage_folder=str(folder / "pages") if mode == "all" else "",
        device="cuda" if setup.device == "cuda" else "cpu",
        link_gbps=setup.link_gbps,
        decode_reuses=mode != "none",
        n_requests_max=max(256, len(setup.workload.turns)),
        driver={"journal": "file", "journal_path": str(folder / JOURNAL)},
    )


def play(setup: Setup, mode: str, *, damages: bool, on_answer: Callable[[], None]) -> ModeRun:
    """Raises `ClusterRefusedError`, `ModelRefusedError`, `EngineDownError` where it cannot start.

    `damages`: spoil one restored page on one rank after the flush. `on_answer` is called after each
    request, in this thread.
    """
    with tempfile.TemporaryDirectory(prefix="kvlift-demo-") as name:
        folder = Path(name)
        settings = settings_of(setup, mode, folder)
        ranks: tuple[dict[str, Any], ...] = ()
        has_rested, fault = False, ""
        with Cluster(settings) as cluster:
            player = Player(cluster, setup.workload, on_answer)
            try:
                cluster.verify_restored(is_on=True)
                player.play_all(damages=damages)
                ranks, has_rested = rested(cluster)
            except EngineDownError as error:
                fault = str(error)
        played = tuple(player.played)
        timeline = timeline_of(journal_of_rank_0(folder, setup.n_ranks), shown_of(played, setup))
    return ModeRun(
        mode=mode,
        device_pages=settings.device_pages,
        host_pages=settings.host_pages,
        played=played,
        ranks=ranks,
        has_rested=has_rested,
        timeline=timeline,
        fault=fault,
    )


def journal_of_rank_0(folder: Path, n_ranks: int) -> Path:
    path = folder / JOURNAL
    return path if n_ranks == 1 else path.with_name(f"{path.stem}.rank0{path.suffix}")


def shown_of(played: tuple[Played, ...], setup: Setup) -> str:
    """The request whose life is drawn: the one with most sources, then most from storage."""

    def richness(one: Played) -> tuple[int, int, int]:
        parts = (one.cached.device, one.cached.host, one.cached.storage, one.n_tokens_from_peer)
        return sum(part > 0 for part in parts), one.cached.storage, one.cached.total

    after = [p for p in played if p.turn.round_number in setup.workload.rounds_after_flush]
    return max(after or played, key=richness).turn.name if played else ""


def rested(cluster: Cluster) -> tuple[tuple[dict[str, Any], ...], bool]:
    """The ranks' statistics once nothing is under way on any of them, or after a minute.

    Asking makes the ranks compare the restored pages that they have set aside.
    """
    until_s = time.monotonic() + REST_S
    while True:
        ranks = tuple(cluster.stats()["ranks"])
        has_rested = all(rank["leaks"] is not None for rank in ranks)
        if has_rested or time.monotonic() > until_s:
            return ranks, has_rested
        time.sleep(LOOK_S)


@define(eq=False)
class Player:
    """The clients of one mode. `played` grows act by act."""

    cluster: Cluster
    workload: Workload
    on_answer: Callable[[], None]
    played: list[Played] = field(factory=list, init=False)

    def play_all(self, *, damages: bool) -> None:
        """Raises `EngineDownError` between two acts; within one, requests end with the reason."""
        histories: dict[int, tuple[int, ...]] = {}
        for number, act in enumerate(self.workload.acts):
            if number > 0:
                rested(self.cluster)
            if number == self.workload.flush_before:
                self.cluster.flush(["device", "host"])
                if damages:
                    self.cluster.damage_next_restored()
            for one in self._play_act(act, histories):
                self.played.append(one)
                if one.turn.conversation is not None:
                    histories[one.turn.conversation] = (*one.prompt, *one.answer)

    def _play_act(
        self, act: tuple[Turn, ...], histories: dict[int, tuple[int, ...]]
    ) -> list[Played]:
        started_s = time.monotonic()
        asked: list[tuple[Turn, tuple[int, ...], Future[Generation]]] = []
        for turn in sorted(act, key=lambda each: each.delay_s):
            time.sleep(max(0.0, started_s + turn.delay_s - time.monotonic()))
            prompt = prompt_of(turn, histories)
            sampling = Sampling(max_new_tokens=turn.n_output, temperature=0.0, ignore_eos=True)
            request = Request(rid=turn.name, tokens=prompt, sampling=sampling)
            asked.append((turn, prompt, self.cluster.submit(request)))
        played = []
        for turn, prompt, future in asked:
            played.append(answered(turn, prompt, future))
            self.on_answer()
        return played


def answered(turn: Turn, prompt: tuple[int, ...], future: Future[Generation]) -> Played:
    """Wait for the answer, or for the reason why there is none."""
    try:
        return played_of(turn, prompt, future.result())
    except EngineDownError as error:
        return Played(
            turn=turn,
            prompt=prompt,
            answer=(),
            logprobs=(),
            cached=CachedTokens(),
            ttft_s=0.0,
            tpot_s=None,
            fault=f"{turn.name}: {error}",
        )


def played_of(turn: Turn, prompt: tuple[int, ...], generation: Generation) -> Played:
    finish = generation.finish
    is_whole = finish.kind is FinishKind.LENGTH and len(generation.tokens) == turn.n_output
    fault = "" if is_whole else f"{turn.name}: {finish.message or finish.kind.value}"
    return Played(
        turn=turn,
        prompt=prompt,
        answer=generation.tokens,
        logprobs=generation.logprobs,
        cached=generation.cached,
        ttft_s=generation.ttft_s,
        tpot_s=generation.tpot_s,
        fault=fault,
    )
