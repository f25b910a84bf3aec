"""One scheduler and many workers: ballots that the host carries, forgets, or brings once more."""

from collections.abc import Iterator, Sequence

from attrs import define

from kvlift.core.ballot import RanksDiverged, from_wire
from kvlift.core.hear import hear
from kvlift.core.local import Limits
from kvlift.core.policy import Policy, Switch, WritePolicy
from kvlift.models.claim import AlwaysOf, Claim, Move, SometimesStep
from kvlift.models.worlds import goals
from kvlift.models.worlds.cast import NOW_NS
from kvlift.models.worlds.host import Life, prompt_of
from kvlift.models.worlds.opening import Placed, Put
from kvlift.models.worlds.situation import Situation
from kvlift.models.worlds.stage import Now
from kvlift.models.worlds.weather import Climate

A = prompt_of(1, 1, 2)

WITHOUT = "# the workers' ballots are not back in time\ntick"


@define(eq=False)
class Hosted(Situation):
    """A situation without a collective: the scheduler decides, the workers obey and look again."""

    def claims(self) -> Sequence[Claim[Now]]:
        if not self._claims:
            super().claims()
            self._claims += [
                AlwaysOf("a ballot counts once", _rounds, self._is_refused_again),
                AlwaysOf("who hears nothing sees nothing", self.stage.parts_in_local,
                         lambda part: self._is_still(part[1])),
                SometimesStep("a tick comes before its ballots", lambda a, move, b: (
                    move.label == WITHOUT and a.agreed != b.agreed)),
                SometimesStep("a later look tells more", lambda a, move, b: (
                    move.label.startswith("# worker") and a.ballot != b.ballot)),
            ]  # fmt: skip
        return self._claims

    def _is_refused_again(self, part: tuple[int, int]) -> bool:
        """The answers to earlier orders are not taken for answers to these."""
        agreed, ballot = part
        least, _ = self.stage.ballots[ballot]
        after = self.stage.turns[self.stage.decide(agreed, ballot, ())].after
        try:
            from_wire(least, after, self.policy)
        except RanksDiverged as error:
            return error.field == "tick"
        return False

    def _is_still(self, number: int) -> bool:
        local = self.stage.ranks.locals[number]
        return hear(local, self.limits, (), NOW_NS) == (local, ())

    def moves(self, state: Now) -> Iterator[Move[Now]]:
        yield from super().moves(state)
        if self.stage.ranks.wrong.isdisjoint(state.ranks) and state.ballot >= 0:
            yield from self._rounds(state)

    def _rounds(self, state: Now) -> Iterator[Move[Now]]:
        yield self._tick(state._replace(ballot=-1))._replace(label=WITHOUT, fair=None)
        for place, rank in enumerate(state.ranks):
            heard = self.stage.cast.hear(rank)
            if heard != rank:
                ranks = (*state.ranks[:place], heard, *state.ranks[place + 1 :])
                ballot = self.stage.vote(state.agreed, ranks)
                label = f"# worker {place} looks again"
                yield Move(label, state._replace(ranks=ranks, ballot=ballot))


def _rounds(now: Now) -> tuple[tuple[int, int], ...]:
    return ((now.agreed, now.ballot),) if now.ballot >= 0 else ()


def hosted(*, deep: bool) -> Hosted:
    """Two workers: landings between ballots, ticks without ballots, failures of one worker."""
    return Hosted(
        name="hosted",
        n_together=2,
        lives=(Life(rid="A", prompt=A, story="pages=1 tokens=3", may_abort=True),),
        policy=Policy(
            n_device_pages=2, n_host_pages=2, write=WritePolicy.THROUGH, persist=Switch.OFF
        ),
        limits=Limits(),
        climate=Climate(has_pieces=False, has_silence=deep, has_prompt_peer=True),
        preamble="world ranks=2 page=2 device=2 host=2\nconfig persist=off",
        putting="\nput A[0:1] in storage",
        puts=(Put(prompt=A, start=0, stop=1, place=Placed.STORAGE),),
        n_ranks=2,
        n_faults=2 if deep else 1,
        goals=(goals.READY, goals.DRAINS, goals.WIDENS, goals.APART, goals.COPY_SHORT),
    )
