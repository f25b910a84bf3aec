"""What a cluster of worker processes is made of; given to each process as one JSON value."""

import re
from typing import Final, Literal

import msgspec

ADDRESS: Final = re.compile(r"tcp://[^/\s]+:(?P<port>\d{1,5})|ipc://\S+")
PORT_MAX: Final = 65_535

REQUESTS_HELD_MIN: Final = 4_096

Role = Literal["both", "prefill", "decode"]


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything but secrets. Sizes in pages, tokens, bytes or seconds, as the names say.

    `driver` holds fields of `kvlift.runtime.config.Config` by their own names; the sizes above go
    in by themselves. `prefill_bind` empty: a private `ipc://` address in the cluster's folder.
    `peers` empty: the cluster's own prefill process. `link_gbps` slows what prefill sends down to
    a link of that many 10^9 bits a second; 0 leaves it alone. Without `decode_reuses` decode
    forgets everything before each request and shares nothing between those under way, while
    prefill's own cache works as ever: the yardstick of what reuse is worth.
    `output_reserved_percent`: how much of the room for an answer is reserved at submission; below
    100 more requests run side by side and the youngest may be retracted.
    """

    role: Role = "both"
    model: str = "tiny"
    seed: int = 0
    n_ranks: int = 2
    page_tokens: int = 16
    device_pages: int = 512
    host_pages: int = 1024
    storage_folder: str = ""
    storage_bytes_max: int = 4 << 30
    device: Literal["cpu", "cuda"] = "cpu"
    prefill_bind: str = ""
    peers: tuple[str, ...] = ()
    prefill_chunk_tokens: int = 256
    prefill_cached_pages: int = 4096
    link_gbps: float = 0.0
    decode_chunk_tokens: int = 256
    decode_reuses: bool = True
    output_reserved_percent: int = 100
    n_running_max: int = 32
    n_requests_max: int = 256
    start_timeout_s: float = 120.0
    ballot_deadline_s: float = 10.0
    lease_s: float = 30.0
    peer_dead_s: float = 5.0
    driver: dict[str, object] = {}

    @property
    def n_requests_held_max(self) -> int:
        """What either end of the wire holds at a time: no less than the queue takes."""
        return max(REQUESTS_HELD_MIN, self.n_requests_max)

    def faults(self) -> str | None:
        """A sentence about the first value that cannot work, or None."""
        bounds: tuple[tuple[str, float, float, float], ...] = (
            ("n_ranks", self.n_ranks, 1, 64),
            ("page_tokens", self.page_tokens, 1, 4096),
            ("device_pages", self.device_pages, 1, 1 << 24),
            ("host_pages", self.host_pages, 0, 1 << 24),
            ("prefill_chunk_tokens", self.prefill_chunk_tokens, 1, 1 << 20),
            ("decode_chunk_tokens", self.decode_chunk_tokens, 1, 1 << 20),
            ("output_reserved_percent", self.output_reserved_percent, 0, 100),
            ("n_running_max", self.n_running_max, 1, 1 << 16),
            ("n_requests_max", self.n_requests_max, 1, 1 << 16),
            ("link_gbps", self.link_gbps, 0, 1e6),
            ("ballot_deadline_s", self.ballot_deadline_s, 0.1, 3600),
        )
        for name, value, least, most in bounds:
            if not least <= value <= most:
                return f"{name} must be between {least} and {most}, it is {value}"
        if self.role != "decode" and self.peers:
            return "--peer is for --role decode alone: it names that worker's prefill nodes"
        if self.role == "decode" and self.prefill_bind:
            return "--prefill-bind is for a prefill node: a decode worker takes --peer"
        if self.role == "decode" and not self.peers:
            return (
                "a decode worker needs the address of a prefill node: give --peer tcp://HOST:PORT"
            )
        for address in (*self.peers, *filter(None, [self.prefill_bind])):
            fault = _address_fault(address)
            if fault is not None:
                return fault
        if self.role == "prefill" and not self.prefill_bind:
            return "a prefill node needs an address: give --prefill-bind tcp://HOST:PORT"
        return None


def _address_fault(address: str) -> str | None:
    """Somebody must be able to come to it, so it names its port."""
    parsed = ADDRESS.fullmatch(address)
    port = None if parsed is None else parsed["port"]
    if parsed is None or (port is not None and not 0 < int(port) <= PORT_MAX):
        return (
            f"{address[:64]!r} is no address of a prefill node: write tcp://HOST:PORT, "
            f"with a PORT from 1 to {PORT_MAX}"
        )
    return None


class ProcessOrders(msgspec.Struct, frozen=True, kw_only=True):
    """The first line on a child's standard input. `secret` is never part of argv or of a log."""

    settings: WorkerSettings
    rank: int
    run_folder: str
    channel: str
    store_port: int = 0
    group: str = ""
    weights_name: str = ""
    peers: tuple[str, ...] = ()
    secret: str = ""

    def __repr__(self) -> str:
        return f"ProcessOrders(rank={self.rank}, group={self.group!r})"
