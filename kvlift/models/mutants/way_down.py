"""Faults of the way down: to the host, and to storage."""

from typing import Final

from kvlift.models.mutants.mutant import Mutant

WAY_DOWN: Final[tuple[Mutant, ...]] = (
    Mutant(
        name="write-through acknowledged before it has landed",
        file="local.py",
        old="        return Observation(self.progress, int(self.has_ended), self.ceiling)\n",
        new="        if self.kind is Kind.MIRROR:\n"
        "            return Observation(self.n_pages, 1, self.n_pages)\n"
        "        return Observation(self.progress, int(self.has_ended), self.ceiling)\n",
        why="The host's copy is believed when the copy is queued.",
        expects="mirror",
    ),
    Mutant(
        name="a write acknowledged before it has landed",
        file="local.py",
        old="        return Observation(self.progress, int(self.has_ended), self.ceiling)\n",
        new="        if self.kind is Kind.PERSIST:\n"
        "            return Observation(self.n_pages, 1, self.n_pages)\n"
        "        return Observation(self.progress, int(self.has_ended), self.ceiling)\n",
        why="The stored copy is believed when the write is queued.",
        expects="stow",
    ),
    Mutant(
        name="a failed copy down is believed",
        file="way_down.py",
        old="good = set(mirroring.positions[:n_good]) if",
        new="good = set(mirroring.positions) if",
        why="The host's page is kept although its copy failed.",
        expects="mirror",
    ),
    Mutant(
        name="a failed write is believed",
        file="way_down.py",
        old="        for segment in list(index.cover(prompt, start, start + n_good)):\n",
        new="        for segment in list(index.cover(prompt, start, stop)):\n",
        why="Pages that storage refused are never written again.",
        expects="stow",
    ),
    Mutant(
        name="a copy from before a flush is kept",
        file="way_down.py",
        old=" if mirroring.host_epoch == draft.host_epoch else ()\n",
        new="\n",
        why="A flush during a copy down is forgotten.",
        expects="what-went-down-before-a-flush-is-not-kept-after-it.story",
    ),
    Mutant(
        name="a child is stored without its parent",
        file="descent.py",
        old="return (Stowing() if is_whole else Settled()), (Persisted(phase, n_good),)",
        new="return Stowing(), (Persisted(phase, len(phase.positions)),)",
        why="A failed batch leaves pages behind a hole: they are stored and can't be found.",
        expects="stow",
    ),
    Mutant(
        name="a hole on the way down is stepped over",
        file="way_down.py",
        old="        if not has_host and not has_device:\n            break\n",
        new="        if not has_host and not has_device:\n            continue\n",
        why="Children are written although their parent is gone.",
        expects="no-page-is-written-behind-a-hole.story",
    ),
    Mutant(
        name="the page under a copy down is not pinned",
        file="way_down.py",
        old="        index.pin(Tier.DEVICE, prompt, start, stop)\n"
        "        for segment in list(index.cover(prompt, start, stop)):\n"
        "            index.mark_mirroring(segment, Switch.ON)\n",
        new="        for segment in list(index.cover(prompt, start, stop)):\n"
        "            index.mark_mirroring(segment, Switch.ON)\n",
        why="The source of a copy may be evicted while it is read.",
        expects="mirror",
    ),
    Mutant(
        name="the pin of a copy down leaks",
        file="way_down.py",
        old="        index.unpin(Tier.DEVICE, prompt, start, stop)\n"
        "    draft.free_host(tuple(useless))\n",
        new="    draft.free_host(tuple(useless))\n",
        why="Pages that went down once can never be evicted.",
        expects="mirror",
    ),
    Mutant(
        name="the pin of a write leaks",
        file="way_down.py",
        old="    index.unpin(tier, prompt, start, stop)\n",
        new="",
        why="Pages that were stored once can never be evicted.",
        expects="mirror",
    ),
    Mutant(
        name="host pages of a failed copy leak",
        file="way_down.py",
        old="    draft.free_host(tuple(useless))\n",
        new="",
        why="Room on the host is lost with every failure.",
        expects="mirror",
    ),
    Mutant(
        name="a page goes down twice at once",
        file="way_down.py",
        old="        and not segment.mirroring\n",
        new="",
        why="Two copies of one page run, and the mark is gone when the first has ended.",
        expects="a-page-goes-down-once.story",
    ),
    Mutant(
        name="a page is written twice at once",
        file="way_down.py",
        old="        if segment.persisting:\n            if positions:\n                break\n"
        "            return None\n",
        new="",
        why="Two writes of one page run, and the mark is gone when the first has ended.",
        expects="a-page-is-written-once.story",
    ),
    Mutant(
        name="the path down eats itself",
        file="way_down.py",
        old="    n_placed = _n_placed(draft, descent)\n    draft.index.pin",
        new="    n_placed = 0\n    draft.index.pin",
        why="Room for the end of a path is made by evicting its begin.",
        expects="a-path-longer-than-the-host-keeps-its-begin.story",
    ),
    Mutant(
        name="storage that is gone is written",
        file="way_down.py",
        old="    if draft.storage is Switch.OFF:\n        return NothingLeft()\n",
        new="",
        why="Writes go to a storage that has been detached.",
        expects="detached-storage-is-not-written.story",
    ),
    Mutant(
        name="known as stored in a storage that is gone",
        file="way_down.py",
        old="    is_believed = persisting.counts is Switch.ON\n",
        new="    is_believed = persisting is not None\n",
        why="A write that ends after a detach is believed, and the page is never written again.",
        expects="stow",
    ),
    Mutant(
        name="a useful host page is no room",
        file="draft.py",
        old="        return max(0, self.n_host_free() + n_useless)\n",
        new="        return max(0, self.n_host_free())\n",
        why="A host full of old pages takes no new ones: write-back stops.",
        expects="old-pages-on-the-host-make-room-for-dirty-ones.story",
    ),
    Mutant(
        name="a page is tried again and again that has no room",
        file="dirty.py",
        old="            n_room -= at.n_pages\n",
        new="            n_room -= 0\n",
        why="The pages in front of it count as room for it: it never goes, and no other is tried.",
        expects="halfway",
    ),
    Mutant(
        name="a page that cannot go down stops the others",
        file="dirty.py",
        old="        if n_going > 0:\n",
        new="        if n_going <= 0:\n            return\n        if n_going > 0:\n",
        why="Head-of-line blocking on the way down.",
        expects="halfway",
    ),
)
