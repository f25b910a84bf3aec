"""The state without the accidents of its past: two states that will behave alike are equal.

Tickets, attempts, instants, segments and flush counts are compared by the core, so they are renamed
in their order (1, 2, 3, ...). Handles are opaque to it, so they are renamed in the order in which
they appear. Counters that only grow (tick, digest, `next_*`, stale reports, measured rates where no
cost model asks for them) are dropped. The result is a state like any other: the core runs on it.

The walk over a state follows the annotations of its classes, so a new field is met by itself.
"""

from collections.abc import Callable, Hashable, Mapping
from enum import IntEnum
from functools import cache
from types import UnionType
from typing import Any, Final, NewType, Union, get_args, get_origin

import attrs
from attrs import define, evolve, frozen

from kvlift.core.advance import State
from kvlift.core.agreed import Agreed, Kind, Open, Rates
from kvlift.core.descent import Descent, Mirroring
from kvlift.core.ids import Attempt, DeviceHandle, HostHandle, Ticket
from kvlift.core.index import ROOT, Index, Segment
from kvlift.core.local import Local, Watch, first_deadline_ns
from kvlift.core.plan import Follow, Part
from kvlift.core.policy import Policy, Switch


class Name(IntEnum):
    """What is renamed. `is_ordered`: the core compares these, so their order is kept."""

    TICKET = 0
    ATTEMPT = 1
    INSTANT = 2
    SEGMENT = 3
    EPOCH = 4
    DEVICE = 5
    HOST = 6

    @property
    def is_ordered(self) -> bool:
        return self not in (Name.DEVICE, Name.HOST)


Visit = Callable[[Name, int], int]
"""Called for each name that is met; gives what shall stand there."""

_BY_TYPE: Final[Mapping[object, Name]] = {
    Ticket: Name.TICKET,
    Attempt: Name.ATTEMPT,
    DeviceHandle: Name.DEVICE,
    HostHandle: Name.HOST,
}
_BY_FIELD: Final[Mapping[tuple[type, str], Name]] = {
    (Segment, "id"): Name.SEGMENT,
    (Segment, "parent"): Name.SEGMENT,
    (Segment, "used"): Name.INSTANT,
    (Segment, "born"): Name.INSTANT,
    (Descent, "id"): Name.INSTANT,
    (Follow, "leader"): Name.ATTEMPT,
    (Part, "host_epoch"): Name.EPOCH,
    (Mirroring, "host_epoch"): Name.EPOCH,
}
_OF_DESCENTS: Final = (Kind.MIRROR, Kind.PERSIST)


@define
class Naming:
    """New names by old ones, a map for each `Name`. What nobody has named gets a negative name.

    `is_identity`: every name is what it would become, so there is nothing to do."""

    names: list[dict[int, int]]
    is_identity: bool = False

    def __call__(self, name: Name, value: int) -> int:
        known = self.names[name]
        new = known.get(value)
        if new is None:
            new = known[value] = -1 - sum(1 for other in known.values() if other < 0)
        return new

    def copy(self) -> "Naming":
        return Naming([dict(known) for known in self.names], self.is_identity)


def naming_of(agreed: Agreed) -> Naming:
    """The new names of everything that the agreed state speaks of."""
    met: list[dict[int, None]] = [{} for _ in Name]

    def meet(name: Name, value: int) -> int:
        met[name][value] = None
        return value

    _walk_agreed(agreed, meet)
    met[Name.EPOCH][agreed.host_epoch] = None
    names = [
        dict(zip(sorted(seen) if name.is_ordered else seen, range(1, 1 + len(seen)), strict=True))
        for name, seen in zip(Name, met, strict=True)
    ]
    return Naming(names, all(old == new for known in names for old, new in known.items()))


def renamed_agreed(agreed: Agreed, naming: Naming, policy: Policy) -> Agreed:
    """The same situation under new names, with its counters as low as they can be."""
    names = naming.names
    after = agreed if naming.is_identity else _walk_agreed(agreed, naming)
    return evolve(
        after,
        tick=0,
        digest=bytes(16),
        clock=max(names[Name.INSTANT].values(), default=0),
        next_ticket=1 + max(names[Name.TICKET].values(), default=0),
        next_attempt=1 + max(names[Name.ATTEMPT].values(), default=0),
        host_epoch=names[Name.EPOCH][agreed.host_epoch],
        growths=tuple(evolve(g, deadline=g.deadline - agreed.tick) for g in after.growths),
        rates=after.rates if policy.cost_model is Switch.ON else Rates(),
        ledger=evolve(
            after.ledger,
            next_device=1 + max(names[Name.DEVICE].values(), default=0),
            next_host=1 + max(names[Name.HOST].values(), default=0),
        ),
    )


def renamed_local(local: Local, naming: Naming, policy: Policy, now_ns: int) -> Local:
    """This rank's half under the same names, without what is over and the age of what waits."""
    watches = {ticket: _timeless(watch, now_ns) for ticket, watch in local.watches.items()}
    tokens = {hold: token for hold, token in local.tokens.items() if hold in watches}
    awaited = {hold: token for hold, token in local.token_by_hold.items() if token in watches}
    bare = evolve(
        local,
        watches=watches,
        token_by_hold=awaited,
        tokens=tokens,
        reasons={},
        leaving=(),
        n_stale=0,
    )
    after: Local = bare if naming.is_identity else renamed(bare, naming)
    return evolve(
        after,
        deadline_ns=first_deadline_ns(after.watches.values()),
        rates=after.rates if policy.cost_model is Switch.ON else Rates(),
    )


def _timeless(watch: Watch, now_ns: int) -> Watch:
    if watch.since_ns == watch.begun_ns == now_ns:
        return watch
    return evolve(watch, since_ns=now_ns, begun_ns=now_ns)


def canonical(state: State, policy: Policy) -> Hashable:
    """Equal for states that differ only in names and counters: what will happen is the same."""
    naming = naming_of(state.agreed)
    agreed = renamed_agreed(state.agreed, naming, policy)
    local = renamed_local(state.local, naming, policy, 0)
    return agreed_key(agreed), local_key(local)


def agreed_key(agreed: Agreed) -> Hashable:
    """A hashable value that is equal for equal agreed states."""
    return (
        agreed.storage,
        agreed.host_epoch,
        agreed.clock,
        tuple(agreed.requests.values()),
        tuple(agreed.attempt_by_rid.items()),
        tuple(agreed.tickets.items()),
        agreed.drains,
        agreed.descents,
        agreed.growths,
        tuple(sorted(agreed.index.segments.values(), key=lambda segment: segment.id)),
        agreed.ledger,
        agreed.rates,
    )


def local_key(local: Local) -> Hashable:
    """A hashable value that is equal for equal local states."""
    return (
        tuple(sorted(local.watches.items())),
        tuple(local.chains.items()),
        local.parked,
        tuple(sorted((kind.value, n) for kind, n in local.n_in_flight.items())),
        tuple(sorted(local.token_by_hold.items())),
        tuple(sorted(local.tokens.items())),
        tuple(sorted(local.dismissed)),
        local.rates,
    )


# The walk.


def _walk_agreed(agreed: Agreed, visit: Visit) -> Agreed:
    """As `renamed`, for the parts of an agreed state that hold names."""
    return evolve(
        agreed,
        requests=_map(agreed.requests, Attempt, visit),
        attempt_by_rid={
            rid: Attempt(visit(Name.ATTEMPT, attempt))
            for rid, attempt in agreed.attempt_by_rid.items()
        },
        tickets={
            Ticket(visit(Name.TICKET, ticket)): _open(known, visit)
            for ticket, known in agreed.tickets.items()
        },
        drains=renamed_all(agreed.drains, visit),
        descents=renamed_all(agreed.descents, visit),
        growths=renamed_all(agreed.growths, visit),
        index=_index(agreed.index, visit),
    )


def _map(mapping: Mapping[Any, Any], key: object, visit: Visit) -> dict[Any, Any]:
    name = _BY_TYPE[key]
    return {visit(name, old): renamed(value, visit) for old, value in mapping.items()}


def _open(known: Open, visit: Visit) -> Open:
    name = Name.INSTANT if known.kind in _OF_DESCENTS else Name.ATTEMPT
    owner = visit(name, known.owner)
    return known if owner == known.owner else evolve(known, owner=owner)


def _index(index: Index, visit: Visit) -> Index:
    segments = {}
    for segment in sorted(index.segments.values(), key=lambda one: one.id):
        after = renamed(segment, visit)
        segments[after.id] = after
    return evolve(
        index,
        segments=segments,
        child_by_key={
            (visit(Name.SEGMENT, parent) if parent != ROOT else ROOT, first): visit(
                Name.SEGMENT, child
            )
            for (parent, first), child in index.child_by_key.items()
        },
        next_id=1 + max(segments, default=0),
    )


def renamed_all(values: tuple[Any, ...], visit: Visit) -> tuple[Any, ...]:
    return tuple([renamed(value, visit) for value in values])


def renamed(value: Any, visit: Visit) -> Any:
    """An instance of an attrs class with every name in it visited."""
    plan = _plan(type(value))
    if not plan:
        return value
    changes = {}
    for slot in plan:
        before = getattr(value, slot.name)
        after = slot.change(before, visit)
        if after is not before:
            changes[slot.key] = after
    return _with(value, changes) if changes else value


def _with(value: Any, changes: dict[str, Any]) -> Any:
    """As `attrs.evolve`, with the fields of a class looked up once: this is half of the walk."""
    kind = type(value)
    fields = _FIELDS.get(kind)
    if fields is None:
        fields = _FIELDS[kind] = [(f.name, f.alias or f.name) for f in attrs.fields(kind) if f.init]
    for name, key in fields:
        if key not in changes:
            changes[key] = getattr(value, name)
    return kind(**changes)


_FIELDS: Final[dict[type, list[tuple[str, str]]]] = {}


@frozen
class _Slot:
    """A field that may hold names, and how it is walked. `key`: as `evolve` calls it."""

    name: str
    key: str
    change: Callable[[Any, Visit], Any]


_PLANS: Final[dict[type, tuple["_Slot", ...]]] = {}


def _plan(kind: type) -> tuple["_Slot", ...]:
    """The fields of a class to walk, worked out once."""
    known = _PLANS.get(kind)
    if known is None:
        known = _PLANS[kind] = _slots(kind)
    return known


def _slots(kind: Any) -> tuple[_Slot, ...]:
    attrs.resolve_types(kind)
    slots = []
    for attribute in attrs.fields(kind):
        name = _BY_FIELD.get((kind, attribute.name))
        change = _walk_name(name) if name is not None else _walk_of(attribute.type)
        if change is not None:
            slots.append(_Slot(attribute.name, attribute.alias or attribute.name, change))
    return tuple(slots)


def _walk_name(name: Name) -> Callable[[Any, Visit], Any]:
    def walk(value: Any, visit: Visit) -> Any:
        if value is None or (name is Name.SEGMENT and value == ROOT):
            return value
        return visit(name, value)

    return walk


@cache
def _walk_of(annotation: Any) -> Callable[[Any, Visit], Any] | None:
    """How a value of this annotation is walked; None: it holds no names."""
    if isinstance(annotation, NewType):
        name = _BY_TYPE.get(annotation)
        return None if name is None else _walk_name(name)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is tuple:
        return _walk_tuple(arguments)
    if origin in (Union, UnionType):
        return _walk_union(arguments)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _walk_mapping(*arguments)
    if isinstance(annotation, type) and attrs.has(annotation):
        return renamed
    return None


def _walk_tuple(arguments: tuple[Any, ...]) -> Callable[[Any, Visit], Any] | None:
    inner = _walk_of(arguments[0])
    if inner is None or len(arguments) != 2 or arguments[1] is not Ellipsis:
        return None
    walk = inner
    return lambda value, visit: tuple([walk(one, visit) for one in value]) if value else value


def _walk_union(arguments: tuple[Any, ...]) -> Callable[[Any, Visit], Any] | None:
    inner = [walk for walk in map(_walk_of, arguments) if walk is not None]
    if not inner:
        return None
    walk = inner[0]
    return lambda value, visit: value if value is None else walk(value, visit)


def _walk_mapping(key: Any, content: Any) -> Callable[[Any, Visit], Any] | None:
    name = _BY_TYPE.get(key)
    of_key = None if name is None else _walk_name(name)
    of_value = _walk_of(content)
    if of_key is None and of_value is None:
        return None

    def walk(value: Mapping[Any, Any], visit: Visit) -> dict[Any, Any]:
        return {
            (of_key(k, visit) if of_key else k): (of_value(v, visit) if of_value else v)
            for k, v in value.items()
        }

    return walk
