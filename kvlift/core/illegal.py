"""The one exception of the core: a bug of the caller, never weather."""


class IllegalEvent(Exception):
    """The phase can't take this event. The old value is intact."""

    def __init__(self, phase: object, event: object) -> None:
        super().__init__(f"{type(phase).__name__} can't take {event!r}")
        self.phase = phase
        self.event = event
