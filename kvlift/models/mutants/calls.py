"""Faults in what the host scheduler asks for: finish, abort, retract, detach, names."""

from typing import Final

from kvlift.models.mutants.mutant import Mutant

CALLS: Final[tuple[Mutant, ...]] = (
    Mutant(
        name="one token too many in the index",
        file="apply.py",
        old="n_with_kv = max(request.prompt.n_tokens, whole.n_tokens - 1)",
        new="n_with_kv = max(request.prompt.n_tokens, whole.n_tokens)",
        why="The last sampled token has no KV yet; a page that ends with it is cached as full.",
        expects="retract",
    ),
    Mutant(
        name="a finished request keeps its pages",
        file="step.py",
        old="                StowAll(),\n                UnpinDevice(phase.lease.n_shared),\n"
        "                ReleaseDevice(phase.lease.own),\n",
        new="                StowAll(),\n                UnpinDevice(phase.lease.n_shared),\n",
        why="Pages of the answer leak at the end of every request.",
        expects="peer",
    ),
    Mutant(
        name="a finished request keeps its pins",
        file="step.py",
        old="                StowAll(),\n                UnpinDevice(phase.lease.n_shared),\n",
        new="                StowAll(),\n",
        why="The prefix of every finished request stays locked.",
        expects="calm",
    ),
    Mutant(
        name="an abort in the queue leaves its lookup",
        file="step.py",
        old="            return _before_filling(Outcome.ABORTED, None, "
        "CloseTicket(phase.lookup))\n",
        new="            return _before_filling(Outcome.ABORTED, None)\n",
        why="A handle that is not closed on one abort path.",
        expects="restore",
    ),
    Mutant(
        name="an abort of a ready request is not heard",
        file="step.py",
        old="        case Started():\n"
        "            return Running(plan=phase.plan, lease=phase.lease), ()\n"
        "        case Aborted():\n",
        new="        case Started():\n"
        "            return Running(plan=phase.plan, lease=phase.lease), ()\n"
        "        case Aborted() if phase.plan.n_pages > 64:\n",
        why="An abort that is acted on in all phases but one.",
        expects="restore",
    ),
    Mutant(
        name="an aborted ready request leaks",
        file="step.py",
        old="            return Running(plan=phase.plan, lease=phase.lease), ()\n"
        "        case Aborted():\n"
        "            return Draining(outcome=Outcome.ABORTED), (\n"
        "                UnpinDevice(phase.lease.n_shared),\n"
        "                ReleaseDevice(phase.lease.own),\n",
        new="            return Running(plan=phase.plan, lease=phase.lease), ()\n"
        "        case Aborted():\n"
        "            return Draining(outcome=Outcome.ABORTED), (\n"
        "                ReleaseDevice(phase.lease.own),\n",
        why="Between the last page and the first step of decoding an abort forgets the pins.",
        expects="restore",
    ),
    Mutant(
        name="a retraction frees the page that is copied",
        file="step.py",
        old="            own = tuple(page for page in phase.lease.own if page != device)\n",
        new="            own = phase.lease.own\n",
        why="The partial page is given away while it goes down.",
        expects="retract",
    ),
    Mutant(
        name="a lost last page is believed",
        file="step.py",
        old="    if n_good > 0:\n        return landed, (ReleaseDevice(device),)\n",
        new="    if n_good >= 0:\n        return landed, (ReleaseDevice(device),)\n",
        why="The copy of the partial page failed, and the request comes back with it.",
        expects="retract",
    ),
    Mutant(
        name="an abort while retracted frees the page that is copied",
        file="step.py",
        old="        return (unpin, HoldBack(tickets=(phase.tail_copy,), "
        "device=device, host=host))\n",
        new="        return (unpin, ReleaseDevice(device), ReleaseHost(host))\n",
        why="Abort and retraction meet, and nobody waits for the copy.",
        expects="retract",
    ),
    Mutant(
        name="a retraction pins nothing",
        file="calls.py",
        old="    draft.index.pin(Tier.HOST, request.prompt, 0, n_full)\n",
        new="",
        why="Pages of a retracted request are unlocked twice, or evicted before it comes back.",
        expects="retract",
    ),
    Mutant(
        name="a detach leaves its reads",
        file="calls.py",
        old="        if isinstance(phase, Filling):\n            for part in phase.parts:\n",
        new="        if isinstance(phase, Filling):\n            for part in phase.parts[:0]:\n",
        why="Requests wait for a storage that was taken away.",
        expects="a-detach-ends-the-reads-that-run.story",
    ),
    Mutant(
        name="a name stays taken",
        file="apply.py",
        old="            del draft.attempt_by_rid[request.rid]\n",
        new="",
        why="The next attempt under a name is refused, or taken for the one that has ended.",
        expects="peer",
    ),
    Mutant(
        name="a lookup from before a flush is believed",
        file="calls.py",
        old="            _give_up_lookups(draft)\n        case _:",
        new="        case _:",
        why="What storage had a moment ago counts as stored, and is never written again.",
        expects="wiped",
    ),
    Mutant(
        name="what was flushed counts as stored",
        file="calls.py",
        old="            forget_stored(draft)\n            draft.effects",
        new="            draft.effects",
        why="A flush empties storage and not the notes about it.",
        expects="wiped",
    ),
    Mutant(
        name="the last page of a lease is taken for the partial one",
        file="calls.py",
        old="    device = phase.lease.own[0]\n",
        new="    device = phase.lease.own[-1]\n",
        why="After a growth the last page is an empty one: it goes down, and comes back as KV.",
        expects="retract",
    ),
)
