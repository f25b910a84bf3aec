"""What a host can do wrong, each a sentence. Nothing has happened when one of these is raised."""


class RequestError(ValueError):
    """A call about a request that can't be taken."""


class DuplicateRequest(RequestError):
    def __init__(self, rid: str) -> None:
        super().__init__(f"request {rid!r} is still alive: abort it, or choose another id")


class UnknownRequest(RequestError):
    def __init__(self, rid: str, call: str) -> None:
        super().__init__(f"{call}: there is no live request {rid!r}")


class RequestLeaving(RequestError):
    def __init__(self, rid: str) -> None:
        super().__init__(f"request {rid!r} can't grow: its end or its retraction is under way")


class PromptTooLong(RequestError):
    def __init__(self, rid: str, n_pages: int, n_pages_max: int) -> None:
        super().__init__(
            f"request {rid!r} needs {n_pages} pages with its output, the device has {n_pages_max}: "
            "shorten it, or raise device_pages"
        )


class TooManyRequests(RequestError):
    def __init__(self, n_max: int) -> None:
        super().__init__(f"{n_max} requests are alive: wait, or raise requests_max")


class DriverClosed(RuntimeError):
    def __init__(self) -> None:
        super().__init__("the driver is closed")
