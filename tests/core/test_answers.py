"""Effects and reports: each has its place in `ANSWERS`, and no other."""

from typing import get_args

from kvlift.core.effect import ANSWERS, Effect
from kvlift.core.landed import Landed
from kvlift.core.local import Parkable


def test_every_effect_says_how_it_may_be_answered() -> None:
    assert set(ANSWERS) == set(get_args(Effect))


def test_every_report_answers_something_and_is_a_report() -> None:
    said = {report for reports in ANSWERS.values() for report in reports}
    assert said == set(get_args(Landed))


def test_what_can_be_parked_ends_with_a_report_of_its_own() -> None:
    """Otherwise its place among those in flight would never come back."""
    for effect in get_args(Parkable):
        enders = [r for r in ANSWERS[effect] if r.__name__.endswith("Ended")]
        assert len(enders) == 1, effect
    for report in get_args(Landed):
        if report.__name__.endswith("Ended"):
            assert sum(report in ANSWERS[effect] for effect in get_args(Effect)) == 1, report
