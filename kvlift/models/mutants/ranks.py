"""Faults between ranks: what is decided from one rank's own view."""

from typing import Final

from kvlift.models.mutants.mutant import Mutant

RANKS: Final[tuple[Mutant, ...]] = (
    Mutant(
        name="deadline decided locally",
        file="advance.py",
        old="    agreed, decision = advance_agreed(state.agreed, verdict, submissions, policy)\n",
        new="    if any(watch.ceiling < 0 and watch.kind.value == 'read'\n"
        "           for watch in state.local.watches.values()):\n"
        "        verdict = None\n"
        "    agreed, decision = advance_agreed(state.agreed, verdict, submissions, policy)\n",
        why="A rank on which a deadline has passed acts on it before the others know.",
        expects="ranks",
    ),
    Mutant(
        name="abort acted on where nothing runs",
        file="advance.py",
        old="    agreed, decision = advance_agreed(state.agreed, verdict, submissions, policy)\n",
        new="    if any(watch.has_ended for watch in state.local.watches.values()):\n"
        "        submissions = ()\n"
        "    agreed, decision = advance_agreed(state.agreed, verdict, submissions, policy)\n",
        why="A rank takes an abort later than the others because its own copy has ended.",
        expects="ranks",
    ),
    Mutant(
        name="room of the richest",
        file="verdicts.py",
        old="device_room=verdict.device_room,",
        new="device_room=max(verdict.device_room, draft.policy.n_device_pages),",
        why="Room is decided by what was configured, not by what the poorest rank has left.",
        expects="a-wedge-comes-and-goes.story",
    ),
    Mutant(
        name="progress of one rank is progress",
        file="local.py",
        old="        return Observation(self.progress, int(self.has_ended), self.ceiling)\n",
        new="        n_pages = self.n_pages if self.has_ended else self.progress\n"
        "        return Observation(n_pages, int(self.has_ended), self.ceiling)\n",
        why="A rank that has ended says that all pages are good: the hit is not reduced.",
        expects="ranks",
    ),
    Mutant(
        name="bad news is not news",
        file="ballot.py",
        old="        if ended or progress != known.progress or ceiling != known.ceiling:\n",
        new="        if ended or progress != known.progress:\n",
        why="A failure of one rank is in the ballot and nobody reads it.",
        expects="ranks",
    ),
    Mutant(
        name="a lookup's answer is the first rank's",
        file="verdicts.py",
        old="        _tell(draft, known, StorageAnswered(ticket, seen.progress))\n",
        new="        _tell(draft, known, StorageAnswered(ticket, known.n_pages))\n",
        why="The hit length is not reduced over the ranks.",
        expects="a-deadline-starts-again-when-the-peer-is-asked-for-more.story",
    ),
    Mutant(
        name="slots stand still",
        file="ballot.py",
        old="    first = agreed.tick * n_slots % len(tickets)\n",
        new="    first = 0\n",
        why="With more operations than a ballot has slots the last ones are never voted on.",
        expects="slots-go-round.story",
    ),
    Mutant(
        name="priorities upside down",
        file="admission.py",
        old="return sorted(waiting, key=lambda r: (-r.priority, r.attempt))",
        new="return sorted(waiting, key=lambda r: (r.priority, r.attempt))",
        why="The least urgent request goes first.",
        expects="the-most-urgent-goes-first.story",
    ),
)
