"""One frozen `Config`, parsed and validated once. Unknown keys and impossible combinations are
refused with a sentence that says what to change."""

import difflib
from collections.abc import Mapping
from enum import Enum
from typing import Any

import attrs
from attrs import field, frozen

from kvlift.core.local import Limits
from kvlift.core.policy import (
    EvictionPolicy,
    Policy,
    PrefetchPolicy,
    Switch,
    WritePolicy,
)


class ConfigError(ValueError):
    """A sentence about one field, or about two that contradict each other."""


class JournalMode(Enum):
    OFF = "off"
    RING = "ring"
    FILE = "file"


def _count(least: int, most: int = 2**31) -> Any:
    def check(_self: object, attribute: "attrs.Attribute[int]", value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{attribute.name} must be a whole number, not {value!r}")
        if not least <= value <= most:
            raise ConfigError(f"{attribute.name} must be from {least} to {most}, not {value}")

    return check


def _positive(default: int) -> Any:
    return field(default=default, validator=_count(1))


def _at_least_zero(default: int) -> Any:
    return field(default=default, validator=_count(0))


@frozen(kw_only=True)
class Config:
    """Everything that can be set. Pages are of `page_tokens` tokens; times in milliseconds.

    `decode_reserve_pages`: pages kept for the growth of each running request.
    `ballot_deadline_ms`: how long a tick waits for a late rank before it reports which one is late.
    `idle_ballots`: for hosts that promise the order of submissions but not the tick.
    `device_tier`: off for hosts whose own cache owns the device's pages (decision 0015).
    `journal_bytes_max`: of one file; with `journal_files_max` of them, the bound on the disk.
    """

    page_tokens: int = _positive(64)
    device_pages: int = _positive(64)
    host_pages: int = _at_least_zero(64)
    prefetch: PrefetchPolicy = field(default=PrefetchPolicy.WAIT_COMPLETE, converter=PrefetchPolicy)
    prefetch_deadline_ms: int = _positive(1000)
    prefetch_stall_ms: int = _positive(30_000)
    prefetch_min_pages: int = _positive(4)
    transfer_deadline_ms: int = _positive(60_000)
    quarantine_max_ms: int = _positive(300_000)
    prefetches_in_flight_max: int = _positive(16)
    restores_in_flight_max: int = _positive(16)
    mirrors_in_flight_max: int = _positive(16)
    persists_in_flight_max: int = _positive(16)
    write: WritePolicy = field(default=WritePolicy.THROUGH, converter=WritePolicy)
    persist: Switch = field(default=Switch.ON, converter=Switch)
    eviction: EvictionPolicy = field(default=EvictionPolicy.LRU, converter=EvictionPolicy)
    decode_reserve_pages: int = _at_least_zero(1)
    bypass_max: int = _at_least_zero(16)
    write_back_low_water_pages: int = _at_least_zero(0)
    first_token: Switch = field(default=Switch.ON, converter=Switch)
    cost_model: Switch = field(default=Switch.ON, converter=Switch)
    cost_threshold_percent: int = field(default=100, validator=_count(1, 10_000))
    lookups_again_max: int = _positive(3)
    ballot_slots: int = field(default=256, validator=_count(8, 65_536))
    ballot_deadline_ms: int = _positive(10_000)
    idle_ballots: Switch = field(default=Switch.OFF, converter=Switch)
    device_tier: Switch = field(default=Switch.ON, converter=Switch)
    requests_max: int = _positive(65_536)
    journal: JournalMode = field(default=JournalMode.OFF, converter=JournalMode)
    journal_path: str = field(default="", validator=attrs.validators.instance_of(str))
    journal_ring_ticks: int = _positive(10_000)
    journal_bytes_max: int = field(default=1 << 30, validator=_count(1 << 16, 1 << 40))
    journal_files_max: int = field(default=4, validator=_count(1, 1000))
    close_deadline_ms: int = _positive(10_000)

    def __attrs_post_init__(self) -> None:
        if self.journal is JournalMode.FILE and not self.journal_path:
            raise ConfigError("journal=file needs a journal_path: name the file to write")
        if self.write is WritePolicy.BACK and self.host_pages == 0:
            raise ConfigError("write=back needs host_pages above 0, or nothing can be written back")
        if self.write_back_low_water_pages and self.write is not WritePolicy.BACK:
            raise ConfigError(
                "write_back_low_water_pages needs write=back; set it to 0 or change write"
            )
        if self.write_back_low_water_pages > self.device_pages:
            raise ConfigError("write_back_low_water_pages is above device_pages: lower it")
        if self.decode_reserve_pages >= self.device_pages:
            raise ConfigError(
                "decode_reserve_pages must be below device_pages, or no second request ever fits"
            )

    @classmethod
    def parse(cls, fields: Mapping[str, object]) -> "Config":
        """A config from plain values (TOML, JSON, a command line). Raises `ConfigError`."""
        known = {a.name: a for a in attrs.fields(cls)}
        for name in fields:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"there is no field {name!r}{hint}")
        values: dict[str, Any] = {}
        for name, value in fields.items():
            values[name] = _parsed(value, known[name])
        return cls(**values)

    def policy(self) -> Policy:
        """What the core decides by."""
        return Policy(
            n_device_pages=self.device_pages,
            n_host_pages=self.host_pages,
            prefetch=self.prefetch,
            prefetch_min_pages=self.prefetch_min_pages,
            write=self.write,
            persist=self.persist,
            eviction=self.eviction,
            decode_reserve_pages=self.decode_reserve_pages,
            bypass_max=self.bypass_max,
            write_back_low_water_pages=self.write_back_low_water_pages,
            first_token=self.first_token,
            cost_model=self.cost_model,
            cost_threshold_percent=self.cost_threshold_percent,
            lookups_again_max=self.lookups_again_max,
            ballot_slots=self.ballot_slots,
            device_tier=self.device_tier,
        )

    def limits(self) -> Limits:
        """What a rank watches its tickets by."""
        return Limits(
            prefetch=self.prefetch,
            prefetch_deadline_ms=self.prefetch_deadline_ms,
            prefetch_stall_ms=self.prefetch_stall_ms,
            transfer_deadline_ms=self.transfer_deadline_ms,
            quarantine_max_ms=self.quarantine_max_ms,
            prefetches_in_flight_max=self.prefetches_in_flight_max,
            restores_in_flight_max=self.restores_in_flight_max,
            mirrors_in_flight_max=self.mirrors_in_flight_max,
            persists_in_flight_max=self.persists_in_flight_max,
            cost_threshold_percent=self.cost_threshold_percent,
        )


def _parsed(value: object, attribute: "attrs.Attribute[Any]") -> object:
    """A plain value as the field's type. Whole numbers may come as text."""
    kind = attribute.type
    if isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(value)
        except ValueError:
            known = ", ".join(str(member.value) for member in kind)
            raise ConfigError(f"{attribute.name}={value!r} is not one of: {known}") from None
    if kind is int and isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            raise ConfigError(f"{attribute.name} must be a whole number, not {value!r}") from None
    return value
