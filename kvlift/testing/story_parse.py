"""From the text of a story to its lines. What the text alone can tell is checked here."""

from collections.abc import Callable
from typing import Final

from attrs import define, field

from kvlift.core.tier import Tier
from kvlift.testing.story_expect import parsed_expect
from kvlift.testing.story_lines import (
    Advance,
    ConfigLine,
    Finish,
    Flush,
    Grow,
    Landing,
    Line,
    Pages,
    PeerSays,
    Place,
    Port,
    PortsLine,
    PromptLine,
    Restart,
    Scheduler,
    Statement,
    Storage,
    Story,
    Submit,
    Tick,
    Weather,
    Wedge,
    World,
)
from kvlift.testing.story_words import StoryError, Words, words_of

RANKS_MAX = 64
RESERVED: Final = frozenset(
    {"tier", "grow", "count", "store", "effects", "peer", "ballots", "ranks"}
    | {"diverged", "within", "idle", "all"}
)


def parse_story(text: str) -> Story:
    """The lines of a story. Raises `StoryError` with the number of the first wrong line."""
    lines: list[Line] = []
    known = _Names()
    for number, line_text in enumerate(text.splitlines(), start=1):
        words = words_of(number, line_text)
        if not words.plain and not words.options:
            continue
        verb = words.next_of("statement", VERBS)
        statement = VERBS[verb](verb, words)
        words.end()
        known.check(number, statement, is_first=not lines)
        lines.append(Line(number, line_text.split("#")[0].strip(), statement))
    if not lines:
        raise StoryError(1, "there is no statement in this story: it would show nothing")
    return Story(_title(text), tuple(lines))


def _title(text: str) -> str:
    block = []
    for line in text.splitlines():
        if line.startswith("#"):
            block.append(line.lstrip("# ").rstrip())
        elif block or line.strip():
            break
    return " ".join(block)


@define
class _Names:
    """The prompts and the size of the world, as far as the story has been read."""

    prompts: set[str] = field(factory=set)
    n_ranks: int = 1

    def check(self, number: int, statement: Statement, *, is_first: bool) -> None:
        match statement:
            case World(n_ranks=n_ranks):
                if not is_first:
                    raise StoryError(number, "the world comes once, before anything else")
                self.n_ranks = n_ranks
            case PromptLine(name=name):
                self._check_prompt(number, statement)
                self.prompts.add(name)
            case _:
                pass
        rank = getattr(statement, "rank", None)
        inner = getattr(statement, "expectation", statement)
        rank = getattr(inner, "rank", rank)
        if rank is not None and rank >= self.n_ranks:
            raise StoryError(number, f"there is no rank {rank}: the world has {self.n_ranks}")
        self._check_use(number, inner)

    def _check_prompt(self, number: int, line: PromptLine) -> None:
        if line.name in RESERVED:
            raise StoryError(number, f"{line.name!r} is a word of the language; name it otherwise")
        if line.name in self.prompts:
            raise StoryError(number, f"prompt {line.name} has been said before")
        for parent in (line.begins.name if line.begins else None, line.like):
            if parent is not None and parent not in self.prompts:
                raise StoryError(number, f"there is no prompt {parent} yet")

    def _check_use(self, number: int, statement: object) -> None:
        pages = getattr(statement, "pages", None)
        name = pages.name if isinstance(pages, Pages) else getattr(statement, "name", None)
        if isinstance(name, str) and name not in self.prompts:
            raise StoryError(number, f"there is no prompt {name}; say `prompt {name} pages=...`")


def _world(_verb: str, words: Words) -> Statement:
    sizes = {name: words.number_option(name) for name in ("ranks", "page", "device", "host")}
    n_storage_pages = words.number_option("storage")
    default = World()
    n_ranks = default.n_ranks if sizes["ranks"] is None else sizes["ranks"]
    page_tokens = default.page_tokens if sizes["page"] is None else sizes["page"]
    if not 1 <= n_ranks <= RANKS_MAX:
        words.fail(f"ranks must be from 1 to {RANKS_MAX}")
    if page_tokens < 1:
        words.fail("page must be at least 1 token")
    device, host = sizes["device"], sizes["host"]
    return World(
        n_ranks=n_ranks,
        page_tokens=page_tokens,
        n_device_pages=default.n_device_pages if device is None else device,
        n_host_pages=default.n_host_pages if host is None else host,
        n_storage_pages=n_storage_pages,
    )


def _config(_verb: str, words: Words) -> Statement:
    if not words.options:
        words.fail("a config line needs at least one name=value")
    names = list(words.options)
    return ConfigLine(tuple((name, words.option(name) or "") for name in names))


def _ports(_verb: str, words: Words) -> Statement:
    mode = words.next_of("mode of the ports", ("held", "auto"))
    ports = []
    while words.plain:
        ports.append(Port(words.next_of("port", [port.value for port in Port])))
    return PortsLine("held" if mode == "held" else "auto", tuple(ports or Port))


def _prompt(_verb: str, words: Words) -> Statement:
    name = words.name()
    begins = words.option("from")
    like = words.option("like")
    if begins is not None and like is not None:
        words.fail("a prompt is either `from` another one or `like` it")
    given = ((field_, words.option(field_)) for field_ in ("tenant", "lora", "salt"))
    line = PromptLine(
        name=name,
        n_pages=words.number_option("pages"),
        n_tokens=words.number_option("tokens"),
        begins=None if begins is None else words.pages(begins),
        like=like,
        namespace=tuple((field_, value) for field_, value in given if value is not None),
    )
    if line.begins is not None and line.begins.start != 0:
        words.fail("a prompt can only begin with the beginning of another: from=A[0:4]")
    if line.n_pages is None and line.n_tokens is None and line.like is None:
        words.fail("how long is the prompt? give pages= or tokens=")
    return line


def _place(verb: str, words: Words) -> Statement:
    pages = words.pages()
    rank = words.rank()
    match verb:
        case "put":
            words.literal("in")
            return Place("put", pages, words.tier(), rank)
        case "lose":
            words.literal("from")
            return Place("lose", pages, words.tier(["storage"]), rank)
        case "corrupt":
            words.literal("in")
            return Place("corrupt", pages, words.tier(["storage"]), rank)
        case _:
            words.literal("in")
            return Place("truncate", pages, words.tier(["storage"]), rank)


def _wedge(verb: str, words: Words) -> Statement:
    tier = words.tier()
    n_pages = words.number_word("the number of pages") if verb == "wedge" else 0
    return Wedge(tier, n_pages, words.rank())


def _submit(_verb: str, words: Words) -> Statement:
    name = words.name()
    priority = words.option("priority") or "0"
    sign = -1 if priority.startswith("-") else 1
    n_priority = sign * words.parsed_number(priority.removeprefix("-"), "priority")
    return Submit(name, n_priority, words.number_option("output") or 0)


def _scheduler(verb: str, words: Words) -> Statement:
    name = words.name()
    match verb:
        case "abort":
            return Scheduler("abort", name)
        case "run":
            return Scheduler("run", name)
        case "retract":
            return Scheduler("retract", name)
        case _:
            return Scheduler("resume", name)


def _grow(_verb: str, words: Words) -> Statement:
    return Grow(words.name(), words.number_word("the number of pages"))


def _finish(_verb: str, words: Words) -> Statement:
    return Finish(words.name(), words.number_option("output") or 0)


def _flush(_verb: str, words: Words) -> Statement:
    match words.next_of("thing to flush", ("device", "host", "all")):
        case "device":
            return Flush((Tier.DEVICE,))
        case "host":
            return Flush((Tier.HOST,))
        case _:
            return Flush((Tier.DEVICE, Tier.HOST, Tier.STORAGE))


def _storage(verb: str, words: Words) -> Statement:
    words.literal("storage")
    return Storage("detach" if verb == "detach" else "attach")


def _restart(_verb: str, _words: Words) -> Statement:
    return Restart()


def _tick(_verb: str, words: Words) -> Statement:
    n_ticks = words.number_word("the number of ticks") if words.plain else 1
    rank = words.rank()
    if rank is not None and n_ticks != 1:
        words.fail("one rank alone can only enter one tick: it waits there for the others")
    return Tick(n_ticks, rank)


def _advance(_verb: str, words: Words) -> Statement:
    return Advance(words.span_ns(), words.rank())


def _landing(verb: str, words: Words) -> Statement:
    rank = words.rank()
    match verb:
        case "land":
            if words.next_is("all"):
                return Landing(verb="land", port=None, rank=rank)
            port = Port(words.next_of("port", [port.value for port in Port]))
            n_pages = words.number_option("pages") if port in (Port.STORE, Port.PEER) else None
            name = _name_for(port, words)
            return Landing(verb="land", port=port, name=name, n_pages=n_pages, rank=rank)
        case "fail":
            port = Port(words.next_of("port", [port.value for port in Port]))
            return Landing(verb="fail", port=port, name=_name_for(port, words), rank=rank)
        case "again":
            port = Port(words.next_of("port", [port.value for port in Port]))
            return Landing(verb="again", port=port, name=_name_for(port, words), rank=rank)
        case _:
            words.literal("store")
            return Landing(verb="late", port=Port.STORE, name=words.name(), rank=rank)


def _name_for(port: Port, words: Words) -> str | None:
    return None if port is Port.WRITES and not words.plain else words.name()


def _weather(verb: str, words: Words) -> Statement:
    match verb:
        case "silence":
            return Weather("silence", Port(words.next_of("port", ("peer", "store"))))
        case "kill":
            return Weather("kill", Port(words.next_of("port", ("peer",))))
        case _:
            return Weather("revive", Port(words.next_of("port", ("peer",))))


def _peer_says(verb: str, words: Words) -> Statement:
    words.literal("peer")
    name = words.name()
    match verb:
        case "reject":
            reason = words.option("reason")
            if not reason:
                words.fail('why does it refuse? give reason="..."')
            return PeerSays("reject", name, reason, None)
        case "expire":
            return PeerSays("expire", name, "", None)
        case _:
            return PeerSays("ack", name, "", words.rank())


VERBS: Final[dict[str, Callable[[str, Words], Statement]]] = {
    "world": _world,
    "config": _config,
    "ports": _ports,
    "prompt": _prompt,
    **dict.fromkeys(("put", "lose", "corrupt", "truncate"), _place),
    **dict.fromkeys(("wedge", "unwedge"), _wedge),
    "submit": _submit,
    **dict.fromkeys(("abort", "run", "retract", "resume"), _scheduler),
    "grow": _grow,
    "finish": _finish,
    "flush": _flush,
    **dict.fromkeys(("detach", "attach"), _storage),
    "restart": _restart,
    "tick": _tick,
    "advance": _advance,
    **dict.fromkeys(("land", "fail", "again", "late"), _landing),
    **dict.fromkeys(("silence", "kill", "revive"), _weather),
    **dict.fromkeys(("reject", "expire", "ack"), _peer_says),
    "expect": parsed_expect,
}
