"""How ports tell a sleeping host that something has landed.

Give `ring` to the ports as `on_landed`, and the wakeup to `Ports`: `Driver.wait` sleeps on it."""

import threading


class Wakeup:
    """Rung from any thread; one sleeper, the scheduler's thread."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def ring(self) -> None:
        self._event.set()

    def wait(self, timeout_s: float) -> bool:
        """True as soon as it was rung since the last wait; False after `timeout_s`."""
        rung = self._event.wait(timeout_s)
        if rung:  # else it may have rung just now: that is for the next wait, not for nobody
            self._event.clear()
        return rung
