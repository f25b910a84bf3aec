"""What the host scheduler of a story does with the outcome of a tick."""

from collections.abc import Iterator, Mapping

from kvlift.core.prompt import Prompt
from kvlift.runtime.tick import Tick
from kvlift.testing.sim_memory import PageValue, SimMemory
from kvlift.testing.story_host import HostRequests
from kvlift.testing.story_land import Dock
from kvlift.testing.story_view import RankView


def hear(requests: HostRequests, rank: int, tick: Tick, memory: SimMemory) -> None:
    """Note page tables, endings and growth; compute again what a resumed request has lost."""
    for ready in tick.ready:
        request = requests.by_name[ready.rid]
        request.tables[rank] = tuple(ready.device_pages)
        request.first_tokens[rank] = ready.token
        request.n_sampled = max(1, request.n_sampled)
        if ready.needs_prefill_from is not None:
            request.write_from(ready.needs_prefill_from, rank, memory)
    for ended in tick.ended:
        request = requests.by_name[ended.rid]
        request.outcome, request.reason = ended.outcome.value, ended.reason
        request.leave(rank)
    for grown in tick.grown:
        request = requests.by_name[grown.rid]
        request.grow_outcome = "granted" if grown.device_pages else "refused"
        request.tables[rank] += tuple(grown.device_pages)
        request.n_grown += len(grown.device_pages) if rank == 0 else 0
    for refused in tick.refused:
        text = f"{refused.call} came when {refused.rid} was {refused.phase}"
        requests.by_name[refused.rid].refusals.append(text)


def differences(ticks: Mapping[int, Tick]) -> Iterator[str]:
    """Where the ranks told their hosts different things."""
    said = {number: _said(tick) for number, tick in ticks.items()}
    first = min(said, default=0)
    for number, words in said.items():
        if words != said[first]:
            yield f"rank {number} reports {words} where rank {first} reports {said[first]}"


def _said(tick: Tick) -> str:
    parts = [
        *(f"{one.rid} ready with {len(one.device_pages)} pages" for one in tick.ready),
        *(f"{one.rid} {one.outcome.value}" for one in tick.ended),
        *(f"{rid} retracted" for rid in tick.retracted),
        *(f"{one.rid} refused to {one.call}" for one in tick.refused),
        *(f"{one.rid} grown by {len(one.device_pages)}" for one in tick.grown),
    ]
    return ", ".join(parts) or "nothing"


def wrong_tokens(requests: HostRequests) -> Iterator[str]:
    """Ready requests whose first token is not the one that the prefill node sampled."""
    for name, request in requests.by_name.items():
        right = request.prompt.stream.token_at(request.prompt.prompt.n_tokens)
        for rank, token in enumerate(request.first_tokens):
            if token is not None and token != right:
                yield f"rank {rank}: {name} begins with token {token}, not with {right}"


def note_owners(dock: Dock, view: RankView, requests: HostRequests) -> None:
    """Remember for which request each ticket was opened."""
    dock.attempts.update(view.attempts)
    for ticket, attempt in view.owners.items():
        dock.owners.setdefault(ticket, dock.attempts.get(attempt, ""))
    for ticket, path in view.paths.items():
        owner = _owner_of_path(path, requests)
        if owner is not None:
            dock.owners.setdefault(ticket, owner)


def _owner_of_path(path: Prompt, requests: HostRequests) -> str | None:
    """The request whose prompt, answer included, is this path; the nearest in length."""
    value = PageValue(path.namespace, path.tokens)
    mine = [one.prompt for one in requests.by_name.values() if one.prompt.is_mine(value)]
    nearest = sorted(mine, key=lambda one: abs(one.prompt.n_pages_full - path.n_pages_full))
    return nearest[0].name if nearest else None
