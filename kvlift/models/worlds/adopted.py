"""Pages that are put into a tier at any moment, and tiers that have holes to begin with."""

from collections.abc import Iterator, Sequence
from typing import Final

from attrs import define, evolve, field

from kvlift.core.adopt import Adopted, adopt_agreed, stow_agreed
from kvlift.core.advance import Decision
from kvlift.core.agreed import Agreed
from kvlift.core.effect import TakeDevice, TakeHost
from kvlift.core.hear import order
from kvlift.core.index import match
from kvlift.core.local import Limits
from kvlift.core.phase import Filling
from kvlift.core.policy import Policy, Switch, WritePolicy
from kvlift.core.tier import Tier
from kvlift.models.claim import Broken, Claim, Move, SometimesStep
from kvlift.models.worlds import goals
from kvlift.models.worlds.cast import NOW_NS
from kvlift.models.worlds.ghost import LYING_INDEX, Bench, tag_of
from kvlift.models.worlds.host import Life, prompt_of
from kvlift.models.worlds.opening import Placed, Put
from kvlift.models.worlds.situation import Goal, Situation
from kvlift.models.worlds.stage import Now
from kvlift.models.worlds.truth import is_true
from kvlift.models.worlds.weather import Climate

HAS_BALLOT: Final = "who waits for a verdict has a ballot out"

A = prompt_of(1, 1, 2, 2, 3, 3, 4)
B = prompt_of(1, 1, 2, 2, 5, 5)
SHORT = prompt_of(1, 1, 3)
LONG = prompt_of(1, 1, 2, 2, 5)


@define(eq=False)
class Adopting(Situation):
    """A situation in which the host may put pages in place between two ticks, each for a fault."""

    adoptions: tuple[Put, ...] = ()
    _full: set[int] = field(factory=set, init=False)

    def claims(self) -> Sequence[Claim[Now]]:
        if not self._claims:
            super().claims()
            self._claims += [
                SometimesStep("pages are put in place", lambda a, move, b: (
                    move.label.startswith("put") and a.agreed != b.agreed)),
                SometimesStep("there is no room to put pages in", lambda a, move, b: (
                    move.label.startswith("put") and b.agreed in self._full)),
            ]  # fmt: skip
        return self._claims

    def _host(self, state: Now) -> Iterator[Move[Now]]:
        yield from super()._host(state)
        if state.faults:
            for put in self.adoptions:
                label = f"put {_name(put)}[{put.start}:{put.stop}] in {put.place.value}"
                yield Move(label, self._placed(state, put, label))

    def decided(self, agreed: Agreed, put: Put) -> tuple[Agreed, Decision, Adopted]:
        """What the core makes of it."""
        tier = Tier.DEVICE if put.place is Placed.DEVICE else Tier.HOST
        return adopt_agreed(agreed, tier, put.prompt, put.start, put.stop, self.policy)

    def _placed(self, state: Now, put: Put, label: str) -> Now:
        """The host fills the new pages before anything that was decided with them starts."""
        stage = self.stage
        before = stage.agreed[state.agreed]
        after = state._replace(faults=state.faults - 1)
        try:
            agreed, decision, adopted = self.decided(before, put)
        except LookupError:
            self._full.add(state.agreed)
            return after
        except Exception as error:
            raise Broken(label) from error
        tags = [tag_of(put.prompt, at) for at in adopted.positions]
        key = (state.agreed, "put", put.prompt, put.start, put.stop, put.place)
        turn = stage.turns[stage.turn_between(key, before, agreed, decision)]
        ranks = []
        for number in state.ranks:
            rank = stage.ranks[number]
            effects, closed = decision.effects, decision.closed
            local, starts = order(rank.local, self.limits, effects, closed, NOW_NS)
            n_pages = (self.policy.n_device_pages, self.policy.n_host_pages)
            bench = Bench(evolve(rank, local=local), *n_pages)
            for effect in starts:
                bench.start((effect,))
                if isinstance(effect, TakeDevice | TakeHost):
                    bench.device.update(zip(adopted.device, tags, strict=False))
                    bench.host.update(zip(adopted.host, tags, strict=False))
            if not is_true(agreed, bench):
                bench.blame(LYING_INDEX)
            ranks.append(stage.ranks.number_of(stage.cast.renamed(bench.done(), turn.naming)))
        return after._replace(agreed=turn.number_after, ranks=tuple(ranks))


def _name(put: Put) -> str:
    return "A" if put.prompt in (A, SHORT) else "B"


def adopted(*, deep: bool) -> Adopting:
    """A host copy behind a hole, a stored page between two that are here, and a warm start."""
    return Adopting(
        name="adopted",
        lives=(
            Life(rid="A", prompt=A, story="pages=3 tokens=7", is_first=True, may_abort=deep),
            Life(rid="B", prompt=B, story="from=A[0:2] pages=3"),
        ),
        policy=Policy(n_device_pages=6, n_host_pages=3, persist=Switch.OFF),
        limits=Limits(),
        climate=Climate(has_pieces=False, has_failures=deep, has_prompt_peer=True),
        preamble="world page=2 device=6 host=3\nconfig persist=off",
        putting="\nput A[1:2] in storage",
        puts=(Put(prompt=A, start=1, stop=2, place=Placed.STORAGE),),
        openings=(
            (_at(Placed.DEVICE, 1, 2),),
            (_at(Placed.HOST, 0, 1), _at(Placed.DEVICE, 2, 3)),
            (_at(Placed.HOST, 0, 2), _at(Placed.DEVICE, 1, 2)),
            (_at(Placed.DEVICE, 0, 1), _at(Placed.HOST, 1, 2), _at(Placed.DEVICE, 2, 3)),
        ),
        n_faults=2 if deep else 1,
        others=("flush device",),
        adoptions=(_at(Placed.HOST, 0, 1), _at(Placed.HOST, 1, 3), _at(Placed.DEVICE, 0, 3)),
        goals=(goals.READY,),
    )


def beyond(*, deep: bool) -> Adopting:
    """B follows A for one page and is sent the next one, when both are put on the device."""
    return Adopting(
        name="beyond",
        lives=(
            Life(rid="A", prompt=SHORT, story="pages=1 tokens=3", is_first=True, may_abort=deep),
            Life(rid="B", prompt=LONG, story="from=A[0:1] pages=2 tokens=5"),
        ),
        policy=Policy(n_device_pages=7, n_host_pages=0, write=WritePolicy.NONE, persist=Switch.OFF),
        limits=Limits(),
        climate=Climate(has_failures=deep),
        preamble="world page=2 device=7 host=0\nconfig write=none persist=off",
        n_faults=2 if deep else 1,
        storage=Switch.OFF,
        adoptions=(
            Put(prompt=LONG, start=0, stop=2, place=Placed.DEVICE),
            Put(prompt=B, start=0, stop=3, place=Placed.DEVICE),
        ),
        goals=(goals.READY, goals.FOLLOWS, goals.SHARED, FOUND_MORE),
    )


FOUND_MORE: Final = Goal(
    name="a follower's next page is on the device before its own has come",
    is_reached=lambda a: any(
        isinstance(r.phase, Filling)
        and r.phase.n_arrived < len(r.phase.wanted)
        and match(a.index, r.prompt).device > r.phase.lease.n_shared
        for r in a.requests.values()
    ),
)


def _at(place: Placed, start: int, stop: int) -> Put:
    return Put(prompt=A, start=start, stop=stop, place=place)


class Lending(Adopting):
    """As `Adopting`, with a host whose own cache owns the device: it has its pages taken down."""

    def claims(self) -> Sequence[Claim[Now]]:
        """What is put in place opens tickets between two ticks, so their ballot is not out yet."""
        if not self._claims:
            super().claims()
            self._claims[:] = [claim for claim in self._claims if claim.name != HAS_BALLOT]
        return self._claims

    def decided(self, agreed: Agreed, put: Put) -> tuple[Agreed, Decision, Adopted]:
        return stow_agreed(agreed, put.prompt, put.start, put.stop, self.policy)


def lent(*, deep: bool) -> Lending:
    """The host owns the device: it lends places, says what it has, and needs no peer."""
    return Lending(
        name="lent",
        lives=(
            Life(rid="A", prompt=A, story="pages=3 tokens=7", peer="", may_abort=deep),
            Life(rid="B", prompt=B, story="from=A[0:2] pages=3", n_pages_given=1),
        ),
        policy=Policy(
            n_device_pages=8,
            n_host_pages=1,
            device_tier=Switch.OFF,
            write=WritePolicy.THROUGH if deep else WritePolicy.NONE,
        ),
        limits=Limits(),
        climate=Climate(has_pieces=False, has_failures=deep, has_prompt_peer=True),
        preamble="world page=2 device=8 host=1\nconfig device_tier=off write=none",
        putting="\nput A[0:1] in storage",
        puts=(Put(prompt=A, start=0, stop=1, place=Placed.STORAGE),),
        n_faults=2,
        others=("detach storage",),
        openings=((), (_at(Placed.HOST, 0, 1),)),
        adoptions=(_at(Placed.DEVICE, 0, 1), _at(Placed.DEVICE, 0, 2)),
        goals=(goals.READY,),
    )
