"""One step of a restless world: a word, and numbers that choose among what is there."""

from typing import TypeVar

from kvlift.core.tier import Tier
from kvlift.testing.sim_operation import Kind
from kvlift.testing.story_lines import Port
from tests.runtime.restless_world import RestlessWorld

Option = TypeVar("Option")

HOST = ["submit"] * 3 + ["go on"] * 4 + ["land all"] * 2
HOST += ["run", "grow", "finish", "retract", "resume", "abort", "abort"]
HOST += ["flush device", "flush host"]
WORLD = ["land"] * 4 + ["peer sends"] * 3 + ["progress", "fail", "again", "peer again", "ack"]
WEATHER = ["kill peer", "silence peer", "revive peer", "revive peer", "reject", "expire"]
WEATHER += ["detach storage", "attach storage", "flush all", "store silent", "store speaks"]
WEATHER += ["put storage", "put storage", "put host", "lose", "corrupt", "truncate", "aside"]
WEATHER += ["hold", "peer fails", "clock", "clock"]
CLOCK_MS = (1, 400, 1001, 31_000, 301_000)


def chosen(options: list[Option], choice: int) -> Option | None:
    return options[choice % len(options)] if options else None


def act(
    world: RestlessWorld, what: str, rank: int, choice: int, n_pages: int, held: set[Port]
) -> None:
    """With nothing there to act upon it does nothing."""
    rank %= len(world.stage.ranks)
    if what in HOST:
        _host(world, what, choice, n_pages)
    elif what in WORLD:
        _answer(world, what, rank, choice, n_pages)
    elif what == "hold":
        world.hold(held)
    else:
        _weather(world, what, rank, choice, n_pages)


def _host(world: RestlessWorld, what: str, choice: int, n_pages: int) -> None:
    match what:
        case "submit":
            name = chosen(world.names_to_submit(), choice)
            if name is not None:
                world.submit(name, int(n_pages == 4))
        case "go on":
            wishes = ("run", "resume", "grow" if choice % 2 else "retract", "finish")
            any(world.schedule(wish, choice, n_pages) for wish in wishes)
        case "land all" | "flush device" | "flush host":
            world.play(what)
        case _:
            world.schedule(what, choice, n_pages)


def _answer(world: RestlessWorld, what: str, rank: int, choice: int, n_pages: int) -> None:
    """Something lands on one rank, in any order."""
    kinds = {Kind.READ} if what == "progress" else set(Kind) - {Kind.LOOKUP}
    operation = chosen(world.operations(rank, kinds), choice)
    talk = chosen(world.talks(rank), choice)
    match what:
        case "land" | "progress" | "fail":
            if operation is not None:
                world.land(rank, operation, what, n_pages)
        case "again":
            ended = chosen(world.ended_operations(rank), choice)
            if ended is not None:
                world.stage.harbour.docks[rank].repeat(ended)
        case _:
            if talk is not None:
                world.peer_says(rank, talk, what, n_pages)


def _weather(world: RestlessWorld, what: str, rank: int, choice: int, n_pages: int) -> None:
    name = chosen(list(world.stage.prompts.by_name), choice)
    talk = chosen(world.talks(rank), choice)
    assert name is not None
    match what:
        case "reject" | "expire" | "peer fails":
            if talk is not None:
                world.peer_says(rank, talk, what, n_pages)
        case "store silent" | "store speaks":
            world.stage.ranks[rank].store.is_silent = what == "store silent"
        case "put storage" | "put host":
            world.put(name, choice % 3, n_pages, Tier(what.removeprefix("put ")))
        case "lose" | "corrupt" | "truncate":
            world.hurt(name, what, n_pages, rank)
        case "aside":
            tier = Tier.DEVICE if choice % 2 else Tier.HOST
            world.stage.drivers[rank].set_aside(tier, n_pages)
        case "clock":
            world.advance(CLOCK_MS[n_pages], rank if choice % 2 else None)
        case _:
            world.is_calm = world.is_calm and "peer" not in what
            world.play(what)
