"""Device pages that the host's own cache owns, as vLLM's does: its blocks behind kvlift's handles.

The host lends blocks for a request after kvlift has said how much of its prompt it can bring. Until
then the request has its lease, and what would touch device pages is kept back here (decision 0015).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from attrs import define, field

from kvlift.core.agreed import Open
from kvlift.core.ballot import N_HEADER
from kvlift.core.effect import (
    CancelPrefetch,
    CancelRestore,
    Effect,
    FreeDevice,
    SendAborted,
    SendHold,
    SendWant,
    StartPrefetch,
    StartRestore,
)
from kvlift.core.ids import DeviceHandle, Rid, Ticket
from kvlift.core.observation import N_INTS, Observation
from kvlift.core.policy import Switch
from kvlift.effects.pages import PageTable
from kvlift.runtime.config import Config

NOWHERE = -1
"""In place of a block, behind a handle that the host has lent none for. No port takes it."""


class LentPages(PageTable):
    """A page table whose places are told, not drawn. `n_pages` is a bound for the ledger alone."""

    def __init__(self, n_pages: int) -> None:
        super().__init__(0)
        self.n_pages = n_pages
        self._block_by_handle: dict[int, int] = {}

    def take(self, handles: Iterable[int]) -> None:
        """Nothing yet: the host says where."""

    def lend(self, block_by_handle: Mapping[DeviceHandle, int]) -> None:
        for handle, block in block_by_handle.items():
            self._block_by_handle[handle] = block

    def free(self, handles: Iterable[int]) -> None:
        for handle in handles:
            self._block_by_handle.pop(handle, None)

    def resolve(self, handles: Iterable[int]) -> list[int]:
        table = self._block_by_handle
        return [table.get(handle, NOWHERE) for handle in handles]

    def has(self, handles: Iterable[int]) -> bool:
        return all(handle in self._block_by_handle for handle in handles)

    def live(self) -> dict[int, int]:
        return dict(self._block_by_handle)


def device_table(config: Config) -> PageTable:
    """The table of the device's pages: kvlift's own, or what the host lends."""
    if config.device_tier is Switch.OFF:
        return LentPages(config.device_pages)
    return PageTable(config.device_pages)


@define(eq=False)
class Places:
    """The scheduler's side. `held` and `released` are told of every block that is lent and given
    back: as often as handles stand before it, so that the host can count references."""

    pages: LentPages
    held: Callable[[Sequence[int]], None]
    released: Callable[[Sequence[int]], None]
    _kept: list[StartRestore | StartPrefetch | SendWant] = field(factory=list, init=False)
    _void: dict[Ticket, None] = field(factory=dict, init=False)
    _rid_by_hold: dict[Ticket, Rid] = field(factory=dict, init=False)
    _placed: dict[Rid, None] = field(factory=dict, init=False)
    _fresh: dict[DeviceHandle, int] = field(factory=dict, init=False)

    def lend(self, handles: Sequence[DeviceHandle], blocks: Sequence[int]) -> None:
        """The host's blocks behind these handles; they stay as they are until they are released."""
        lent = dict(zip(handles, blocks, strict=True))
        self.pages.lend(lent)
        self._fresh.update(lent)
        self.held(tuple(blocks))

    def place(self, rid: Rid) -> None:
        """The request's blocks are lent: what was kept for it may go."""
        self._placed[rid] = None

    def forget(self, rid: Rid) -> None:
        """The request has ended."""
        self._placed.pop(rid, None)
        self._rid_by_hold = {t: r for t, r in self._rid_by_hold.items() if r != rid}

    def fresh(self) -> dict[DeviceHandle, int]:
        """Lent since the last call, for the workers."""
        fresh, self._fresh = self._fresh, {}
        return fresh

    def passed(self, effects: Iterable[Effect]) -> tuple[Effect, ...]:
        """What may go to the workers now: what was kept and has its blocks, then the new effects.

        A start that is called off while it is kept never goes: its tickets end here."""
        kept, self._kept = self._kept, []
        going: list[Effect] = []
        for effect in (*kept, *effects):
            match effect:
                case StartRestore(device=device) | StartPrefetch(device=device):
                    (going if self.pages.has(device) else self._kept).append(effect)
                case SendWant(ticket=hold):
                    is_placed = self._rid_by_hold.get(hold) in self._placed
                    (going if is_placed else self._kept).append(effect)
                case SendHold(ticket=hold, rid=rid):
                    self._rid_by_hold[hold] = rid
                    going.append(effect)
                case CancelPrefetch(ticket=ticket) | CancelRestore(ticket=ticket):
                    if ticket not in self._void and not self._call_off(ticket):
                        going.append(effect)
                case SendAborted(ticket=hold):
                    self._ask_no_more(hold)
                    going.append(effect)
                case FreeDevice(pages=pages):
                    self._free(pages)
                    going.append(effect)
                case _:
                    going.append(effect)
        return tuple(going)

    def _free(self, handles: Sequence[DeviceHandle]) -> None:
        blocks = [block for block in self.pages.resolve(handles) if block != NOWHERE]
        self.pages.free(handles)
        for handle in handles:
            self._fresh.pop(handle, None)
        if blocks:
            self.released(blocks)

    def _call_off(self, ticket: Ticket) -> bool:
        for effect in self._kept:
            tickets = _tickets_of(effect)
            if ticket in tickets:
                self._kept.remove(effect)
                self._void.update(dict.fromkeys(tickets))
                return True
        return False

    def answered(
        self, least: Sequence[int], tickets: Sequence[Ticket], known: Mapping[Ticket, Open]
    ) -> tuple[int, ...]:
        """The reduced ballot with this side's word on the tickets that no worker has heard of:
        nothing new of what is kept, and the end of what was called off."""
        waiting = {ticket for effect in self._kept for ticket in _tickets_of(effect)}
        if not waiting and not self._void:
            return tuple(least)
        answered = list(least)
        for at, ticket in enumerate(tickets):
            if ticket in self._void:
                seen = Observation(0, 1, 0)
            elif ticket in waiting:
                seen = Observation(known[ticket].progress, 0, known[ticket].ceiling)
            else:
                continue
            begin = N_HEADER + N_INTS * at
            answered[begin : begin + N_INTS] = (seen.progress, seen.ended, seen.ceiling)
        return tuple(answered)

    def closed(self, tickets: Iterable[Ticket]) -> None:
        """These have ended on all workers; a peer may have gone before it was asked."""
        for ticket in tickets:
            self._void.pop(ticket, None)
            self._ask_no_more(ticket)

    def _ask_no_more(self, hold: Ticket) -> None:
        self._rid_by_hold.pop(hold, None)
        self._kept = [e for e in self._kept if not isinstance(e, SendWant) or e.ticket != hold]


def _tickets_of(effect: StartRestore | StartPrefetch | SendWant) -> tuple[Ticket, ...]:
    match effect:
        case StartPrefetch(ticket=read, restore=restore):
            return read, restore
        case StartRestore(ticket=ticket):
            return (ticket,)
        case SendWant():
            return ()
