"""Putting pages in place, losing and damaging them, and keeping pages from everybody."""

from kvlift.core.tier import Tier
from kvlift.testing.sim_store import Damage
from kvlift.testing.story_inside import put_page
from kvlift.testing.story_land import NothingThereError
from kvlift.testing.story_lines import Place, Wedge
from kvlift.testing.story_stage import Stage


def place(stage: Stage, line: Place) -> None:
    """Raises `NothingThereError` where a page that is to be damaged is on no rank."""
    if line.tier is Tier.STORAGE:
        _place_in_storage(stage, line)
    else:
        _put_in_pool(stage, line)


def _place_in_storage(stage: Stage, line: Place) -> None:
    prompt = stage.prompts.by_name[line.pages.name]
    ranks = stage.ranks if line.rank is None else [stage.ranks[line.rank]]
    for position in prompt.places(line.pages):
        value = prompt.value(position)
        if line.verb == "put":
            for rank in ranks:
                rank.store.put(value)
            continue
        had = [value in rank.store.pages for rank in ranks]
        if not any(had):
            raise NothingThereError(f"page {position} of {prompt.name} is not in storage")
        for rank in ranks:
            match line.verb:
                case "lose":
                    rank.store.lose(value)
                case "corrupt":
                    rank.store.damage(value, Damage.CORRUPT)
                case "truncate":
                    rank.store.damage(value, Damage.TRUNCATED)


def _put_in_pool(stage: Stage, line: Place) -> None:
    """A page that only some ranks hold is no hit: it joins the index when the last rank has it."""
    prompt = stage.prompts.by_name[line.pages.name]
    ranks = range(len(stage.ranks)) if line.rank is None else [line.rank]
    for position in prompt.places(line.pages):
        key = (line.tier, prompt.value(position))
        here = stage.put_on.setdefault(key, set())
        here.update(ranks)
    ready = [
        position
        for position in prompt.places(line.pages)
        if len(stage.put_on[line.tier, prompt.value(position)]) == len(stage.ranks)
    ]
    drivers = stage.started()
    for position in ready:
        whole = prompt.cut(position + 1)
        for driver, rank in zip(drivers, stage.ranks, strict=True):
            try:
                page = put_page(driver, line.tier, whole)
            except LookupError as full:
                raise NothingThereError(str(full)) from full
            pool = rank.memory.device if line.tier is Tier.DEVICE else rank.memory.host
            if page is not None:
                pool[page] = prompt.value(position)
        del stage.put_on[line.tier, prompt.value(position)]
    stage.look()


def wedge(stage: Stage, line: Wedge) -> None:
    """Pages of a tier cannot be taken; 0 gives back all that were wedged before."""
    for number, rank in enumerate(stage.ranks):
        if line.rank is not None and line.rank != number:
            continue
        if line.tier is Tier.STORAGE:
            rank.store.n_wedged = line.n_pages
        else:
            stage.started()[number].set_aside(line.tier, line.n_pages)
    if stage.drivers:
        stage.look()
