"""Everything about a run that is drawn from its seed before it begins: sizes, limits, delays."""

from random import Random
from typing import Final

from attrs import frozen

from kvlift.runtime.config import Config

NS_PER_MS: Final = 1_000_000
N_TICKS: Final = 300
PROMPT_PAGES_MOST: Final = 24


@frozen(kw_only=True)
class Options:
    """What a caller may fix. `faults` None: drawn from the seed. `trace`: a Mooncake-format file
    whose requests are played instead of drawn ones. `n_requests_max`: arrivals at most."""

    n_ticks: int = N_TICKS
    n_ranks: int | None = None
    faults: tuple[str, ...] | None = None
    n_requests_max: int | None = None
    trace: str | None = None


@frozen(kw_only=True)
class Delays:
    """How long things take without a fault, at most; each is drawn between a fifth of it and it."""

    lookup_ns: int
    read_ns: int
    persist_ns: int
    copy_ns: int
    piece_ns: int
    token_ns: int
    ack_ns: int
    loss_ns: int


@frozen(kw_only=True)
class Plan:
    """Sizes in pages, per rank. `skews`: by rank, (nanoseconds ahead, parts per million faster).

    `n_warm`: conversations that storage has from before. `gap_ns`: mean time between arrivals;
    `n_alive_max`: the host submits no more than this.
    `stays_silent`: a silent prefill node is not healed, its requests must end all the same."""

    seed: int
    n_ranks: int
    config: Config
    n_storage_pages: int | None
    n_nodes: int
    skews: tuple[tuple[int, int], ...]
    step_ns: int
    gap_ns: int
    n_alive_max: int
    n_batch_max: int
    n_tokens_a_tick: int
    n_output_pages_max: int
    n_prompt_pages_max: int
    n_tenants: int
    n_warm: int
    declares_output: bool
    stays_silent: bool
    delays: Delays


def drawn_plan(seed: int, options: Options, *, least_device_pages: int = 4) -> Plan:
    """The plan of a seed; `least_device_pages`: what the longest request of a trace needs."""
    draw = Random(f"{seed}/plan")
    n_ranks_drawn = draw.choice((1, 2, 2, 3, 4))
    n_ranks = n_ranks_drawn if options.n_ranks is None else options.n_ranks
    page_tokens = draw.choice((1, 2, 4, 8))
    n_device = max(least_device_pages, draw.choice((6, 10, 16, 24, 32, 48)))
    n_host = draw.choice((0, 4, 8, 16, 32, 96))
    config = _config(draw, page_tokens, n_device, n_host)
    n_output = draw.choice((0, 1, 2, min(6, n_device // 4)))
    n_prompt = min(PROMPT_PAGES_MOST, draw.choice((n_device, n_device // 2, n_device // 4)))
    step_ns = draw.choice((2, 5, 20)) * NS_PER_MS
    return Plan(
        seed=seed,
        n_ranks=n_ranks,
        config=config,
        n_storage_pages=draw.choice((None, None, 4, 64, 256)),
        n_nodes=draw.choice((1, 2, 2, 3)),
        skews=tuple((draw.randrange(10**12), draw.randint(-500, 500)) for _ in range(n_ranks)),
        step_ns=step_ns,
        gap_ns=int(step_ns * draw.choice((0.5, 1, 3, 10))),
        n_alive_max=draw.choice((2, 4, 8, 16)),
        n_batch_max=draw.choice((1, 2, 4, 8)),
        n_tokens_a_tick=draw.choice((max(1, page_tokens // 4), page_tokens, 2 * page_tokens)),
        n_output_pages_max=n_output,
        n_prompt_pages_max=max(1, n_prompt - n_output - 1),
        n_tenants=draw.choice((1, 1, 2, 3)),
        n_warm=draw.choice((0, 0, 4, 12)),
        declares_output=draw.random() < 0.5,
        stays_silent=draw.random() < 0.3,
        delays=_delays(draw, config),
    )


def _config(draw: Random, page_tokens: int, n_device: int, n_host: int) -> Config:
    write = draw.choice(("through", "through", "back", "none")) if n_host else "none"
    fields: dict[str, object] = {
        "page_tokens": page_tokens,
        "device_pages": n_device,
        "host_pages": n_host,
        "write": write,
        "persist": draw.choice(("on", "on", "on", "off")),
        "prefetch": draw.choice(("wait_complete", "deadline", "best_effort")),
        "prefetch_deadline_ms": draw.choice((20, 200, 1000)),
        "prefetch_stall_ms": draw.choice((100, 1000, 30_000)),
        "prefetch_min_pages": draw.choice((1, 1, 1, 3)),
        "transfer_deadline_ms": draw.choice((400, 2000, 60_000)),
        "quarantine_max_ms": draw.choice((2000, 30_000, 300_000)),
        "eviction": draw.choice(("lru", "lfu", "fifo", "priority")),
        "decode_reserve_pages": draw.choice((0, 0, 1, 2)),
        "bypass_max": draw.choice((0, 2, 16)),
        "cost_model": draw.choice(("off", "off", "on")),
        "first_token": draw.choice(("on", "on", "on", "off")),
        "ballot_slots": draw.choice((8, 8, 16, 32)),
        "idle_ballots": draw.choice(("off", "off", "on")),
    }
    for kind in ("prefetches", "restores", "mirrors", "persists"):
        fields[f"{kind}_in_flight_max"] = draw.choice((1, 2, 16))
    if write == "back":
        fields["write_back_low_water_pages"] = draw.choice((0, 0, 1, n_device // 4))
    return Config.parse(fields)


def _delays(draw: Random, config: Config) -> Delays:
    piece_most = config.transfer_deadline_ms * NS_PER_MS * 3 // 10
    ack_most = config.quarantine_max_ms * NS_PER_MS * 3 // 10

    def at_most(*choices_ms: float) -> int:
        return int(draw.choice(choices_ms) * NS_PER_MS)

    return Delays(
        lookup_ns=at_most(0.2, 3, 15),
        read_ns=at_most(1, 10, 50),
        persist_ns=at_most(1, 10, 100),
        copy_ns=at_most(0.3, 2, 20),
        piece_ns=min(piece_most, at_most(2, 20, 100)),
        token_ns=min(piece_most, at_most(2, 20, 100)),
        ack_ns=min(ack_most, at_most(1, 10, 50)),
        loss_ns=at_most(0.1, 20, 60),
    )
