"""A run with a violation as a story that shows it, where that is possible.

The run is recorded and acted again on a story's stage; what was played there, line by line, is the
story. It counts only if it shows a violation of the same checker when it is played on its own. Then
lines that it does not need are taken out.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from attrs import evolve, frozen

from kvlift.runtime.config import Config
from kvlift.runtime.journal import fields_of
from kvlift.testing.sim.cast import CannotBeTold, Cast
from kvlift.testing.sim.plan import Options, Plan
from kvlift.testing.sim.retell import Found, Retelling, carried_out, checker_of
from kvlift.testing.sim.run import Run, Violation
from kvlift.testing.sim.scribe import Scribe
from kvlift.testing.sim.shorten import Shortener
from kvlift.testing.story_check import words_of as states_of
from kvlift.testing.story_land import NothingThereError
from kvlift.testing.story_lines import World
from kvlift.testing.story_parse import parse_story
from kvlift.testing.story_run import run_text
from kvlift.testing.story_stage import DEFAULTS, Stage
from kvlift.testing.story_words import StoryError

TICKS_MAX: Final = 1000
"""Longer runs are not told: nobody reads such a story."""

TICKS_MORE: Final = 10
"""Ticks behind the recorded ones: a story may be a little later than its run."""

AT_THE_END: Final = ("liveness", "leak")
ENDING_TICKS: Final = 60
RANKS_MOST: Final = 16
RID: Final = re.compile(r"\b[rt]\d+\b")
SECONDS_MAX: Final = 10.0
NEXT: Final = {"ready": "run", "running": "finish", "retracted": "resume"}


@frozen
class Told:
    """`text`: the whole story; `message`: what its verdict says here and now."""

    text: str
    message: str


def story_of(seed: int, options: Options, *, seconds_max: float = SECONDS_MAX) -> Told:
    """Raises `CannotBeTold` with the reason."""
    why = []
    for change in (_unchanged, _plain):
        try:
            return _told(seed, options, change, seconds_max)
        except CannotBeTold as reason:
            why.append(str(reason))
    raise CannotBeTold("; ".join(dict.fromkeys(why)))


def _unchanged(plan: Plan) -> Plan:
    return plan


def _plain(plan: Plan) -> Plan:
    """Nearer to what stories can say: one prefill node, look-ups at once, equal clocks."""
    return evolve(
        plan,
        n_nodes=1,
        skews=tuple((0, 0) for _ in plan.skews),
        delays=evolve(plan.delays, lookup_ns=1),
    )


def _told(seed: int, options: Options, change: Callable[[Plan], Plan], seconds_max: float) -> Told:
    scribes = [Scribe() for _ in range(RANKS_MOST)]
    run = Run(seed, options, scribes, change)
    result = run.play()
    plan = run.world.plan
    if not result.violations:
        raise CannotBeTold("with one prefill node and quick look-ups the violation is gone")
    cast = Cast.of(scribes[0])
    head = [*_world_lines(plan), *cast.lines]
    retelling = Retelling(_stage_of(head), scribes[: plan.n_ranks], cast)
    _act(retelling, result.violations, options.n_ticks + TICKS_MORE)
    lines = _short([*head, *retelling.told], seconds_max)
    claim = result.violations[0].claim.splitlines()[0][:300]
    text = "\n".join([f"# {claim}", f"# Told from kvlift simulate --seed {seed}.", *lines, ""])
    verdict = run_text(text, "")
    if verdict.exit_code != 1:
        raise CannotBeTold(f"played on its own the story says {verdict.message!r}")
    return Told(text, verdict.message)


def _world_lines(plan: Plan) -> list[str]:
    """The world of the run, its config as far as it is not that of every story, all ports held."""
    config = plan.config
    sizes = {
        "page_tokens": config.page_tokens,
        "device_pages": config.device_pages,
        "host_pages": config.host_pages,
    }
    usual = fields_of(Config.parse({**DEFAULTS, **sizes}))
    other = [f"{k}={v}" for k, v in fields_of(config).items() if usual[k] != v]
    world = (
        f"world ranks={plan.n_ranks} page={config.page_tokens}"
        f" device={config.device_pages} host={config.host_pages}"
    )
    return [world, *([f"config {' '.join(other)}"] if other else []), "ports held"]


def _stage_of(lines: Sequence[str]) -> Stage:
    """A new stage on which these first lines have been played."""
    world = parse_story(lines[0]).lines[0].statement
    assert isinstance(world, World)
    stage = Stage(world)
    for line in lines[1:]:
        carried_out(stage, line)
    return stage


def _act(retelling: Retelling, violations: Sequence[Violation], n_ticks_harmed: int) -> None:
    """Up to the line that fails. Raises `CannotBeTold` where none does, or another claim breaks.

    `n_ticks_harmed`: what is stuck at the end of a run was so when its second phase began."""
    n_ticks = retelling.n_ticks_recorded + TICKS_MORE
    is_about_the_end = violations[0].claim.startswith(AT_THE_END)
    if is_about_the_end:
        n_ticks = min(n_ticks, n_ticks_harmed)
    if n_ticks > TICKS_MAX:
        raise CannotBeTold(f"the run has {n_ticks} ticks, a story at most {TICKS_MAX}")
    claims = [one.claim for one in violations if one.tick == violations[0].tick]
    checkers = {claim.partition(":")[0] for claim in claims}
    try:
        for _ in range(n_ticks):
            retelling.tick()
            for line in _must_hold_now(claims):
                retelling.expect(line)
        if is_about_the_end:
            _end(retelling)
    except Found as found:
        shown = checker_of(str(found))
        if shown is not None and shown not in checkers:
            raise CannotBeTold(f"on a story's stage something else is found: {found}") from found
        return
    raise CannotBeTold(f"on a story's stage this does not show: {claims[0][:200]}")


def _must_hold_now(claims: Sequence[str]) -> Iterator[str]:
    for claim in claims:
        checker, _colon, said = claim.partition(":")
        rids = RID.findall(said)[:1]
        if checker == "failed_by_cache":
            yield from (f"expect {rid} not failed" for rid in rids)
        if checker == "outcome":
            word = "done" if " is done and was not" in said else "aborted"
            yield from (f"expect {rid} not {word}" for rid in rids)


def _end(retelling: Retelling) -> None:
    """Everything lands, everybody goes on to the end, and nothing may be left."""
    stage = retelling.stage
    for line in ("ports auto", "unwedge device", "unwedge host", "attach storage"):
        retelling.tell(line)
    live: list[str] = []
    for _ in range(ENDING_TICKS):
        live = [rid for rid, one in stage.requests.by_name.items() if one.outcome is None]
        for rid in live:
            for state in states_of(stage, rid, 0) & set(NEXT):
                retelling.tell(f"{NEXT[state]} {rid}")
        retelling.tell("tick")
    for rid in live:
        retelling.expect(f"expect within {ENDING_TICKS} ticks {rid} ready|done|aborted|failed")
    retelling.expect(f"expect within {ENDING_TICKS} ticks idle")


# Short.


def _short(lines: Sequence[str], seconds_max: float) -> list[str]:
    first = _played(lines)
    if first is None:
        raise CannotBeTold("played on its own the story shows nothing")

    def shows(candidate: Sequence[str]) -> bool:
        found = _played(candidate)
        return found is not None and found[0] == first[0] and found[1] <= first[1]

    return Shortener(list(lines), shows, seconds_max).shorten()


def _played(lines: Sequence[str]) -> tuple[str, int] | None:
    """What the last line finds, without its numbers, and how many calls of the host were refused;
    None where it finds nothing, another line does, or a line can't be played."""
    try:
        stage = _stage_of(lines[:-1])
    except (NothingThereError, StoryError, Found):
        return None
    try:
        carried_out(stage, lines[-1])
    except (NothingThereError, StoryError):
        return None
    except Found as found:
        refusals = [text for one in stage.requests.by_name.values() for text in one.refusals]
        return re.sub(r"\d+", "N", str(found)), len(refusals)
    return None
