"""How each phase ends or goes on, deed by deed."""

import pytest
from attrs import evolve

from kvlift.core.deed import (
    Announce,
    AnnounceReady,
    CloseTicket,
    Commit,
    Deed,
    DismissPeer,
    ForgetStored,
    GiveUpCopy,
    GiveUpRead,
    HoldBack,
    KnowStored,
    MirrorPrompt,
    ReleaseDevice,
    ReleaseHost,
    StowAll,
    UnpinDevice,
    UnpinHost,
)
from kvlift.core.descent import Descent, Reach, descend
from kvlift.core.event import (
    Aborted,
    AllLanded,
    AskedAgain,
    Finished,
    GivenUp,
    Grown,
    PeerStopped,
    Started,
    StorageAnswered,
    TailEnded,
    WantedBack,
)
from kvlift.core.ids import DeviceHandle, Ticket
from kvlift.core.illegal import IllegalEvent
from kvlift.core.landed import PeerCause
from kvlift.core.phase import (
    Asking,
    Draining,
    Ended,
    Outcome,
    Phase,
    Ready,
    Resuming,
    Retracted,
    Running,
    Waiting,
)
from kvlift.core.plan import Lease
from kvlift.core.step import step
from tests.core.test_step import (
    CHAINED,
    COPY,
    DOWN,
    DOWN_EVENTS,
    EVENTS,
    LEASE,
    LOOKUP,
    OWN,
    PHASES,
    PROMPT,
    READ,
    TAIL,
    TOKEN,
)
from tests.core.test_step_exactly import CHAIN, FILL, HOST, LANDED, RECOMPUTED

# Endings of a request that is being filled.


def test_when_all_has_landed_the_peer_may_go() -> None:
    ready = Ready(plan=FILL.plan, lease=LEASE)
    assert step(FILL, AllLanded()) == (ready, (Commit(), MirrorPrompt(), AnnounceReady()))
    resumed = Ready(plan=RECOMPUTED.plan, lease=LEASE)
    assert step(RECOMPUTED, AllLanded()) == (resumed, (AnnounceReady(),))


def test_an_abort_holds_back_what_may_still_be_touched() -> None:
    after, deeds = step(evolve(FILL, n_arrived=1), Aborted())
    assert after == Draining(outcome=Outcome.ABORTED)
    assert deeds == (
        GiveUpCopy(COPY),
        HoldBack(tickets=(COPY,), device=OWN[:1], pin_host_start=1, pin_host_stop=2),
        GiveUpRead(READ, 0),
        GiveUpCopy(CHAINED),
        HoldBack(tickets=(READ, CHAINED), device=OWN[1:3], host=HOST),
        CloseTicket(TOKEN),
        DismissPeer(device=OWN[4:]),
        ReleaseDevice(OWN[3:4]),
        UnpinDevice(1),
        Announce(outcome=Outcome.ABORTED, n_pages_landed=1),
    )


def test_an_abort_of_what_has_landed_releases_it() -> None:
    over = evolve(CHAIN, copy=None, read=None, host=(), n_landed=2)
    before = evolve(FILL, parts=(LANDED, over), n_arrived=2, token=None)
    assert step(before, Aborted())[1] == (
        DismissPeer(device=()),
        ReleaseDevice(OWN),
        UnpinDevice(1),
        Announce(outcome=Outcome.ABORTED, n_pages_landed=6),
    )


def test_an_abort_of_what_is_computed_again_has_no_peer_to_dismiss() -> None:
    reading = evolve(CHAIN, copy=None)
    deeds = step(evolve(RECOMPUTED, parts=(reading,)), Aborted())[1]
    assert deeds == (
        GiveUpRead(READ, 0),
        HoldBack(tickets=(READ,), host=HOST),
        ReleaseDevice(OWN),
        UnpinDevice(1),
        Announce(outcome=Outcome.ABORTED, n_pages_landed=1),
    )


# The other phases.


ASKING = Asking(lookup=LOOKUP, start=1, n_lookups=2)
WAITING = Waiting(stored_start=1, stored_stop=3, n_lookups=2)


def test_storage_says_which_pages_it_has_and_which_it_has_not() -> None:
    assert step(ASKING, StorageAnswered(LOOKUP, 2)) == (
        WAITING,
        (KnowStored(1, 3), ForgetStored(3, 4)),
    )
    assert step(ASKING, StorageAnswered(Ticket(99), 2)) == (ASKING, ())
    assert step(WAITING, AskedAgain(LOOKUP, 0)) == (
        Asking(lookup=LOOKUP, start=0, n_lookups=3),
        (),
    )


@pytest.mark.parametrize(("before", "first"), [(ASKING, (CloseTicket(LOOKUP),)), (WAITING, ())])
def test_a_request_without_pages_ends_at_once(before: Phase, first: tuple[Deed, ...]) -> None:
    dismissed = DismissPeer(device=())
    assert step(before, Aborted()) == (
        Ended(outcome=Outcome.ABORTED),
        (*first, dismissed, Announce(outcome=Outcome.ABORTED)),
    )
    assert step(before, PeerStopped(PeerCause.LOST)) == (
        Ended(outcome=Outcome.FAILED),
        (*first, dismissed, Announce(outcome=Outcome.FAILED, cause=PeerCause.LOST)),
    )


READY, RUNNING = Ready(plan=FILL.plan, lease=LEASE), Running(plan=FILL.plan, lease=LEASE)


@pytest.mark.parametrize("before", [READY, RUNNING])
def test_an_abort_of_a_whole_request_gives_everything_back(before: Phase) -> None:
    assert step(before, Aborted()) == (
        Draining(outcome=Outcome.ABORTED),
        (UnpinDevice(1), ReleaseDevice(OWN), Announce(outcome=Outcome.ABORTED)),
    )


def test_a_running_request_grows_ends_and_is_retracted() -> None:
    more = (DeviceHandle(50),)
    assert step(READY, Started()) == (RUNNING, ())
    assert step(RUNNING, Grown(more)) == (
        Running(plan=FILL.plan, lease=Lease(n_shared=1, own=OWN + more)),
        (),
    )
    assert step(RUNNING, Finished()) == (
        Draining(outcome=Outcome.DONE),
        (StowAll(), UnpinDevice(1), ReleaseDevice(OWN), Announce(outcome=Outcome.DONE)),
    )
    tail = {"tail_device": OWN[2], "tail_host": HOST[0], "tail_copy": TAIL}
    assert (
        step(RUNNING, GivenUp(2, OWN[2], HOST[0], TAIL))
        == (
            Retracted(plan=FILL.plan, n_pages_pinned=2, **tail),  # type: ignore[arg-type]
            (UnpinDevice(1), ReleaseDevice(OWN[:2] + OWN[3:])),
        )
    )


@pytest.mark.parametrize("kind", [Retracted, Resuming])
def test_the_last_page_of_a_retracted_request_is_safe_or_lost(
    kind: type[Retracted] | type[Resuming],
) -> None:
    before = kind(
        plan=FILL.plan,
        n_pages_pinned=2,
        tail_device=OWN[0],
        tail_host=HOST[0],
        tail_copy=TAIL,
    )
    safe = evolve(before, tail_device=None, tail_copy=None)
    lost = evolve(safe, tail_host=None)
    back = ReleaseDevice(OWN[:1])
    assert step(before, TailEnded(TAIL, 1)) == (safe, (back,))
    assert step(before, TailEnded(TAIL, 0)) == (lost, (back, ReleaseHost(HOST[:1])))
    assert step(before, TailEnded(Ticket(99), 0)) == (before, ())
    told = Announce(outcome=Outcome.ABORTED)
    held = HoldBack(tickets=(TAIL,), device=OWN[:1], host=HOST[:1])
    assert step(before, Aborted())[1] == (UnpinHost(0, 2), held, told)
    assert step(safe, Aborted())[1] == (
        UnpinHost(0, 2),
        ReleaseDevice(()),
        ReleaseHost(HOST[:1]),
        told,
    )
    assert step(lost, Aborted())[1] == (UnpinHost(0, 2), ReleaseDevice(()), ReleaseHost(()), told)
    unsent = evolve(before, tail_copy=None)
    assert step(unsent, Aborted())[1][1] == back


def test_a_retracted_request_comes_back_with_all_that_it_has() -> None:
    before = Retracted(
        plan=FILL.plan, n_pages_pinned=2, tail_device=OWN[0], tail_host=HOST[0], tail_copy=TAIL
    )
    assert step(before, WantedBack()) == (
        Resuming(
            plan=FILL.plan, n_pages_pinned=2, tail_device=OWN[0], tail_host=HOST[0], tail_copy=TAIL
        ),
        (),
    )


def test_what_is_illegal_names_the_phase_and_the_event() -> None:
    named: list[bool] = []
    for before in PHASES:
        for event in EVENTS:
            try:
                step(before, event)
            except IllegalEvent as error:
                named.append(error.phase is before and error.event is event)
    for phase in DOWN:
        descent = Descent(id=1, prompt=PROMPT, n_pages=2, reach=Reach.BOTH, phase=phase)
        for down in DOWN_EVENTS:
            try:
                descend(descent, down)
            except IllegalEvent as error:
                named.append(error.phase is phase and error.event is down)
    assert len(named) > 200
    assert all(named)
