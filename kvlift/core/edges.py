"""The arrows of the request machine, as data: (phase, event, next phase).

The code in `step` is checked against this table, the drawing and the statechart are made from it,
and `takes` answers which calls a phase can take. Arrows from a phase to itself stand only where the
phase changes its fields.
"""

from typing import Final

from kvlift.core.descent import (
    Due,
    Mirroring,
    MirrorOver,
    MirrorSkipped,
    MirrorStarted,
    NothingLeft,
    Persisting,
    PersistOver,
    PersistStarted,
    Settled,
    Stowing,
)
from kvlift.core.event import (
    Aborted,
    Admitted,
    AllLanded,
    AskedAgain,
    CopyEnded,
    CopyShort,
    Drained,
    Finished,
    GivenUp,
    Grown,
    HandedOver,
    LeaderLost,
    PagesCame,
    PeerStopped,
    Published,
    ReadEnded,
    ReadOverdue,
    ReadShort,
    SharedCame,
    Started,
    StorageAnswered,
    TailEnded,
    TokenCame,
    WantedBack,
    Widened,
)
from kvlift.core.phase import (
    Asking,
    Draining,
    Ended,
    Filling,
    Ready,
    Resuming,
    Retracted,
    Running,
    Waiting,
)

Edge = tuple[type, type, type]

EDGES: Final[frozenset[Edge]] = frozenset(
    {
        (Asking, StorageAnswered, Waiting),  # what storage has is known
        (Asking, Aborted, Ended),
        (Asking, PeerStopped, Ended),
        (Waiting, AskedAgain, Asking),  # at submission, or when the index has lost pages
        (Waiting, Admitted, Filling),  # the lease is held, the promise given
        (Waiting, Aborted, Ended),
        (Waiting, PeerStopped, Ended),
        (Filling, ReadShort, Filling),  # a boundary moves to the left
        (Filling, ReadOverdue, Filling),
        (Filling, ReadEnded, Filling),
        (Filling, CopyShort, Filling),
        (Filling, CopyEnded, Filling),
        (Filling, PagesCame, Filling),
        (Filling, TokenCame, Filling),
        (Filling, PeerStopped, Filling),  # everything is here that it was to give
        (Filling, SharedCame, Filling),
        (Filling, LeaderLost, Filling),
        (Filling, HandedOver, Filling),
        (Filling, Published, Filling),
        (Filling, Widened, Filling),  # the peer is asked for what is missing
        (Filling, AllLanded, Ready),
        (Filling, Aborted, Draining),
        (Filling, PeerStopped, Draining),  # failed: nobody can give the pages
        (Filling, ReadShort, Draining),  # the peer was gone, and now its pages are needed
        (Filling, ReadOverdue, Draining),
        (Filling, CopyShort, Draining),
        (Filling, LeaderLost, Draining),
        (Ready, Started, Running),
        (Ready, Aborted, Draining),
        (Running, Grown, Running),
        (Running, Published, Running),
        (Running, Finished, Draining),
        (Running, GivenUp, Retracted),
        (Running, Aborted, Draining),
        (Retracted, TailEnded, Retracted),
        (Retracted, WantedBack, Resuming),
        (Retracted, Aborted, Draining),
        (Resuming, TailEnded, Resuming),
        (Resuming, Admitted, Filling),
        (Resuming, Aborted, Draining),
        (Draining, Drained, Ended),
    }
)

MIRROR_EDGES: Final[frozenset[Edge]] = frozenset(
    {
        (Due, MirrorStarted, Mirroring),
        (Due, MirrorSkipped, Stowing),
        (Due, MirrorSkipped, Settled),
        (Mirroring, MirrorOver, Stowing),
        (Mirroring, MirrorOver, Settled),
        (Stowing, PersistStarted, Persisting),
        (Stowing, NothingLeft, Settled),
        (Persisting, PersistOver, Stowing),
        (Persisting, PersistOver, Settled),  # a page is missing: its children stay unwritten
    }
)

_TAKEN: Final[frozenset[tuple[type, type]]] = frozenset((a, e) for a, e, _b in EDGES)


def takes(phase: type, event: type) -> bool:
    """Whether the phase has an arrow for this kind of event."""
    return (phase, event) in _TAKEN
