"""Faults of requests that are being filled: copies, reads, failures, endings."""

from typing import Final

from kvlift.models.mutants.mutant import Mutant

FILLING: Final[tuple[Mutant, ...]] = (
    Mutant(
        name="a page asked for while a copy still writes it",
        file="step_filling.py",
        old="taken = (*phase.wanted, *spans_under_copy(phase))",
        new="taken = phase.wanted",
        why="A failed restore runs on, on another rank, into pages that the prefill node fills.",
        expects="ranks",
    ),
    Mutant(
        name="abort frees pages under a copy",
        file="step_filling.py",
        old="            busy.append(Span(part.start, part.stop))\n"
        "        if tickets:\n"
        "            deeds.append(_held_part(phase, part, tickets))\n",
        new="        if tickets:\n"
        "            deeds.append(evolve(_held_part(phase, part, tickets), device=()))\n",
        why="An abort gives device pages away that a running copy still writes.",
        expects="restore",
    ),
    Mutant(
        name="abort frees pages twice",
        file="step_filling.py",
        old="phase.lease.n_shared + len(phase.lease.own), (*busy, *at_peer)",
        new="phase.lease.n_shared + len(phase.lease.own), at_peer",
        why="Double free: at the abort, and again when the copy has ended.",
        expects="restore",
    ),
    Mutant(
        name="abort leaks pages",
        file="step_filling.py",
        old="    deeds.append(ReleaseDevice(_own_pages(phase, idle)))\n",
        new="",
        why="Pages that nothing touches are forgotten when a request is aborted.",
        expects="restore",
    ),
    Mutant(
        name="pins leaked on failure",
        file="step_filling.py",
        old="    deeds.append(UnpinDevice(phase.lease.n_shared))\n",
        new="",
        why="The lock on the shared prefix outlives a request that ends early.",
        expects="share",
    ),
    Mutant(
        name="host pages of an aborted read are not held back",
        file="step_filling.py",
        old="        host=part.host,\n        pin_host_start=part.start if is_pinned else 0,\n",
        new="        host=(),\n        pin_host_start=part.start if is_pinned else 0,\n",
        why="Host pages leak when a request is aborted during a read.",
        expects="restore",
    ),
    Mutant(
        name="the host's pin of an aborted restore is dropped",
        file="step_filling.py",
        old="    is_pinned = not part.host\n",
        new="    is_pinned = False\n",
        why="The host's lock is not released when a request is aborted during a restore.",
        expects="restore",
    ),
    Mutant(
        name="a read that goes on loses its pages",
        file="step_filling.py",
        old="    elif part.read is None:\n        deeds = (\n            KeepHost(",
        new="    elif part.host:\n        deeds = (\n            KeepHost(",
        why="A read was given up but still writes; its host pages are given away.",
        expects="restore",
    ),
    Mutant(
        name="a failed read is believed",
        file="step_filling.py",
        old="start=part.start, n_good=n_landed, pages=part.host",
        new="start=part.start, n_good=part.stop - part.start, pages=part.host",
        why="A partial prefetch is taken for a full one: garbage joins the cache.",
        expects="restore",
    ),
    Mutant(
        name="boundary not moved",
        file="plan.py",
        old="storage=min(self.storage, end),",
        new="storage=self.storage,",
        why="A failure is noticed, but nobody is asked for the pages.",
        expects="restore",
    ),
    Mutant(
        name="promise not reduced",
        file="settle.py",
        old="    promise = phase.plan.bounds.storage\n",
        new="    promise = phase.plan.promise\n",
        why="A prefetch is declined or fails, and the prefill node still believes the old promise.",
        expects="restore",
    ),
    Mutant(
        name="widened again and again",
        file="settle.py",
        old="    happen(draft, attempt, Widened(owed, promise))\n",
        new="    draft.effects[:] = draft.effects\n",
        why="What has been asked for is not noted: it is asked for a second time.",
        expects="restore",
    ),
    Mutant(
        name="ready before the transfer",
        file="settle.py",
        old="    n_needed = phase.plan.n_pages\n",
        new="    n_needed = phase.plan.bounds.storage\n",
        why="The request runs on pages that have not come.",
        expects="orphan",
    ),
    Mutant(
        name="ready before the token",
        file="settle.py",
        old="if phase.token is not None or phase.follow is not None:",
        new="if phase.follow is not None:",
        why="The first token is not awaited: it is lost, or sampled again.",
        expects="peer",
    ),
    Mutant(
        name="ready while a copy still runs",
        file="settle.py",
        old="    if any(part.copy is not None for part in phase.parts):\n"
        "        return\n    n_needed",
        new="    n_needed",
        why="A copy that was given up still writes into pages that the request computes on.",
        expects="a-resumed-request-waits-for-the-copy-that-failed-elsewhere.story",
    ),
    Mutant(
        name="a follower is not woken",
        file="settle.py",
        old="for attempt in sorted({**touched, **followers}):",
        new="for attempt in sorted(touched):",
        why="The leader of a shared flight ends; who waits for it is not looked at.",
        expects="share",
    ),
    Mutant(
        name="a follower waits for a leader that is gone",
        file="settle.py",
        old="    if leader is None or not isinstance(leader.phase, Filling):\n"
        "        happen(draft, attempt, LeaderLost())\n",
        new="    if leader is not None and not isinstance(leader.phase, Filling):\n"
        "        happen(draft, attempt, LeaderLost())\n",
        why="Single flight without a fall-back: the follower hangs when its leader has left.",
        expects="share",
    ),
    Mutant(
        name="a flight is cancelled under its follower",
        file="calls.py",
        old="    hand_over(draft, request.attempt)\n"
        "    happen(draft, request.attempt, Aborted())\n",
        new="    happen(draft, request.attempt, Aborted())\n",
        why="The last share should cancel a flight; here the first to leave does.",
        expects="a-restore-that-is-handed-over-is-not-done-again.story",
    ),
    Mutant(
        name="a flight's pages stay with who leaves",
        file="handover.py",
        old="lease=with_own(mine.lease, start, heirs_pages)",
        new="lease=mine.lease",
        why="Two owners of the same pages after a hand-over.",
        expects="share",
    ),
    Mutant(
        name="a flight's news goes to who left",
        file="handover.py",
        old="    return evolve(ticket, owner=owner)\n",
        new="    return ticket\n",
        why="The heir never hears that its copy has ended.",
        expects="share",
    ),
    Mutant(
        name="a copy that fails on one rank is over on all",
        file="verdicts.py",
        old="            if seen.ended:\n                _tell(draft, known, CopyEnded(ticket))\n",
        new="            if seen.ended or seen.ceiling < known.n_pages:\n"
        "                _tell(draft, known, CopyEnded(ticket))\n",
        why="Taken for done when the first rank is done: the others still write.",
        expects="ranks",
    ),
    Mutant(
        name="held back for one of two",
        file="verdicts.py",
        old="        left = tuple(t for t in drain.tickets if t != ticket)\n",
        new="        left = tuple(t for t in drain.tickets if t == 0)\n",
        why="Pages under a read and a copy are free when the first of the two has ended.",
        expects="restore",
    ),
    Mutant(
        name="held host pages leak",
        file="verdicts.py",
        old="        draft.free_host(drain.host)\n",
        new="",
        why="Host pages of an aborted prefetch never come back.",
        expects="restore",
    ),
    Mutant(
        name="held pins leak",
        file="verdicts.py",
        old="        draft.index.unpin(Tier.HOST, drain.prompt, "
        "drain.pin_host_start, drain.pin_host_stop)\n",
        new="",
        why="The lock on the host's copy outlives an aborted restore.",
        expects="restore",
    ),
)
