"""The story language as values: one class for each kind of line."""

from enum import Enum
from typing import Literal, TypeAlias

from attrs import frozen

from kvlift.core.tier import Tier


class Port(Enum):
    """What can be held, landed, failed and repeated, by the word that stories use."""

    STORE = "store"
    COPIES = "copies"
    PEER = "peer"
    WRITES = "writes"


@frozen
class Pages:
    """`name[start:stop]`; `stop` None means up to the last full page."""

    name: str
    start: int = 0
    stop: int | None = None

    def __str__(self) -> str:
        if self.stop is None:
            return self.name
        if self.stop == self.start + 1:
            return f"{self.name}[{self.start}]"
        return f"{self.name}[{self.start}:{self.stop}]"


@frozen
class Bound:
    """`name=n`, `name>=n` or `name<=n`."""

    name: str
    relation: Literal["=", ">=", "<="]
    n: int

    def holds(self, found: int) -> bool:
        match self.relation:
            case "=":
                return found == self.n
            case ">=":
                return found >= self.n
            case "<=":
                return found <= self.n

    def __str__(self) -> str:
        return f"{self.name}{self.relation}{self.n}"


@frozen(kw_only=True)
class World:
    n_ranks: int = 1
    page_tokens: int = 4
    n_device_pages: int = 64
    n_host_pages: int = 64
    n_storage_pages: int | None = None


@frozen
class ConfigLine:
    fields: tuple[tuple[str, str], ...]


@frozen
class PortsLine:
    mode: Literal["held", "auto"]
    ports: tuple[Port, ...]


@frozen(kw_only=True)
class PromptLine:
    name: str
    n_pages: int | None = None
    n_tokens: int | None = None
    begins: Pages | None = None
    like: str | None = None
    namespace: tuple[tuple[str, str], ...] = ()


@frozen
class Place:
    """`put PAGES in TIER`, `lose`, `corrupt`, `truncate`; `rank` None means every rank."""

    verb: Literal["put", "lose", "corrupt", "truncate"]
    pages: Pages
    tier: Tier
    rank: int | None


@frozen
class Wedge:
    """Pages of a tier that nobody can take; 0 gives them back."""

    tier: Tier
    n_pages: int
    rank: int | None


@frozen
class Submit:
    name: str
    priority: int
    n_output_pages: int


@frozen
class Scheduler:
    """What the host scheduler does with one request."""

    verb: Literal["abort", "run", "retract", "resume"]
    name: str


@frozen
class Grow:
    name: str
    n_pages: int


@frozen
class Finish:
    name: str
    n_output_pages: int


@frozen
class Flush:
    tiers: tuple[Tier, ...]


@frozen
class Storage:
    verb: Literal["detach", "attach"]


@frozen
class Restart:
    pass


@frozen
class Tick:
    n_ticks: int
    rank: int | None


@frozen
class Advance:
    by_ns: int
    rank: int | None


@frozen(kw_only=True)
class Landing:
    """`land`, `fail`, `again`, `late`; `port` None is `land all`, `name` None is any request."""

    verb: Literal["land", "fail", "again", "late"]
    port: Port | None
    name: str | None = None
    n_pages: int | None = None
    rank: int | None = None


@frozen
class Weather:
    """`silence peer | store`, `kill peer`, `revive peer`."""

    verb: Literal["silence", "kill", "revive"]
    port: Port


@frozen
class PeerSays:
    """The prefill node refuses a request, lets its lease end, or confirms that it stopped."""

    verb: Literal["reject", "expire", "ack"]
    name: str
    reason: str
    rank: int | None


@frozen
class ExpectState:
    name: str
    words: tuple[str, ...]
    is_negated: bool


@frozen
class ExpectSources:
    name: str
    bounds: tuple[Bound, ...]


@frozen
class ExpectHit:
    name: str
    bounds: tuple[Bound, ...]


@frozen
class ExpectPromise:
    name: str
    n_pages: int


@frozen
class ExpectWants:
    name: str
    pages: frozenset[int]


@frozen
class ExpectError:
    name: str
    text: str


@frozen
class ExpectBytes:
    name: str


@frozen
class ExpectTier:
    tier: Tier
    bounds: tuple[Bound, ...]
    rank: int | None


@frozen
class ExpectGrow:
    name: str
    outcome: Literal["granted", "refused"]


@frozen
class ExpectCount:
    name: str
    bound: Bound


@frozen
class ExpectStore:
    verb: Literal["has", "lacks"]
    pages: Pages
    rank: int | None


@frozen
class ExpectEffects:
    """Calls of the ports in the last tick; without bounds, none at all."""

    bounds: tuple[Bound, ...]


@frozen
class ExpectTold:
    word: Literal["abort", "committed"]
    name: str


@frozen
class ExpectBallots:
    bound: Bound


@frozen
class ExpectThat:
    """`ranks agree`, `diverged`, `idle`."""

    word: Literal["agree", "diverged", "idle"]


Expectation: TypeAlias = (
    ExpectState
    | ExpectSources
    | ExpectHit
    | ExpectPromise
    | ExpectWants
    | ExpectError
    | ExpectBytes
    | ExpectTier
    | ExpectGrow
    | ExpectCount
    | ExpectStore
    | ExpectEffects
    | ExpectTold
    | ExpectBallots
    | ExpectThat
)


@frozen
class Expect:
    """`expect ...`; with `within_ticks` None it must hold now."""

    expectation: Expectation
    within_ticks: int | None


Statement: TypeAlias = (
    World
    | ConfigLine
    | PortsLine
    | PromptLine
    | Place
    | Wedge
    | Submit
    | Scheduler
    | Grow
    | Finish
    | Flush
    | Storage
    | Restart
    | Tick
    | Advance
    | Landing
    | Weather
    | PeerSays
    | Expect
)


@frozen
class Line:
    """A statement, where it stands (from 1), and how it is written."""

    number: int
    text: str
    statement: Statement


@frozen
class Story:
    """`title` is the first comment block."""

    title: str
    lines: tuple[Line, ...]
