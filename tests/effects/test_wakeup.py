"""A ring is never lost, whenever it comes."""

import threading

from kvlift.effects.wakeup import Wakeup


class RungTooLate(threading.Event):
    """The first wait ends in vain, and then somebody rings before its thread goes on."""

    def wait(self, timeout: float | None = None) -> bool:
        was_set = self.is_set()
        self.set()
        return was_set


def test_a_ring_between_the_end_of_a_wait_and_its_answer_wakes_the_next_one() -> None:
    wakeup = Wakeup()
    wakeup._event = RungTooLate()
    assert not wakeup.wait(0.0)
    assert wakeup.wait(0.0)


def test_a_ring_wakes_one_wait_and_no_more() -> None:
    wakeup = Wakeup()
    wakeup.ring()
    wakeup.ring()
    assert wakeup.wait(0.0)
    assert not wakeup.wait(0.0)
