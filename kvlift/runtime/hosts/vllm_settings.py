"""`kv_connector_extra_config`, parsed and checked once."""

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs
from attrs import field, frozen
from attrs.validators import ge, gt, instance_of, le

from kvlift.effects.wire_security import SharedSecret
from kvlift.runtime.config import Config, ConfigError

DEVICE_PAGES: Final = 1 << 24
"""kvlift's own count of device pages bounds nothing: vLLM decides what fits."""

_GIB: Final = 1 << 30


def _whole(default: int, least: int, most: int) -> Any:
    return field(default=default, validator=[instance_of(int), ge(least), le(most)])


def _seconds(default: float) -> Any:
    return field(
        default=default, converter=float, validator=[instance_of(float), gt(0), le(86_400.0)]
    )


def _text() -> Any:
    return field(default="", validator=instance_of(str))


@frozen(kw_only=True)
class VllmSettings:
    """What a user may set. Sizes are of one rank.

    - `host_bytes`: the host tier; 0: none.
    - `storage`: the folder of the storage tier; empty: none. `storage_bytes_max`: 0: no bound.
    - `bind`: where rank 0 of a prefill instance listens, rank r on the port r further on; `*` as
      the port: any free one. Only `kv_producer` listens unless it is given.
    - `secret_file`: a file with the secret that both instances know.
    - `lease_s`, `peer_dead_s`: as of `PrefillNode` and `ZmqPeers`. `kept_s`: how long a prefill
      instance keeps a finished prompt that no decode instance has asked about.
    - `model`, `weights`: what the keys of pages say about the model; `model` empty: as vLLM names
      it. New weights under an old name need a new word here.
    - `unplaced_steps_max`: engine steps after which a lease is dropped that got no blocks.
    - `driver`: fields of `Config`, without its sizes.
    """

    host_bytes: int = _whole(_GIB, 0, 1 << 46)
    storage: str = _text()
    storage_bytes_max: int = _whole(0, 0, 1 << 60)
    bind: str = _text()
    secret_file: str = _text()
    lease_s: float = _seconds(30.0)
    kept_s: float = _seconds(120.0)
    peer_dead_s: float = _seconds(5.0)
    model: str = _text()
    weights: str = _text()
    unplaced_steps_max: int = _whole(1_000, 1, 1 << 30)
    driver: Mapping[str, object] = field(factory=dict, validator=instance_of(dict))

    @classmethod
    def parse(cls, given: Mapping[str, object], *, is_producer: bool = False) -> "VllmSettings":
        """A producer has no host tier unless it is given one. Raises `ConfigError`."""
        known = [a.name for a in attrs.fields(cls)]
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
                raise ConfigError(f"kv_connector_extra_config has no {name!r}{hint}")
        if is_producer:
            given = {"host_bytes": 0, "bind": "tcp://127.0.0.1:*", **given}
        try:
            return cls(**given)  # type: ignore[arg-type]  # the validators look at each
        except (TypeError, ValueError) as error:
            raise ConfigError(f"kv_connector_extra_config: {error.args[0]}") from None

    def secret(self) -> SharedSecret | None:
        """Raises `ConfigError` where the file can't be read or others may read it."""
        if not self.secret_file:
            return None
        try:
            return SharedSecret.from_file(Path(self.secret_file))
        except OSError as error:
            why = os.strerror(error.errno or 0)
            raise ConfigError(f"secret_file can't be read: {why}") from None
        except ValueError as error:
            raise ConfigError(f"secret_file: {error}") from None

    def config(self, page_tokens: int, page_bytes: int) -> Config:
        """kvlift's own config, for pages of `page_tokens` tokens and `page_bytes` bytes a rank.

        Raises `ConfigError`."""
        sizes = ("page_tokens", "device_pages", "host_pages", "device_tier", "first_token")
        for name in sizes:
            if name in self.driver:
                raise ConfigError(
                    f"{name} follows from vLLM and host_bytes: leave it out of driver"
                )
        n_host = self.host_bytes // page_bytes
        own: dict[str, object] = {
            "page_tokens": page_tokens,
            "device_pages": DEVICE_PAGES,
            "host_pages": n_host,
            "device_tier": "off",
            "first_token": "off",
            "decode_reserve_pages": 0,
            "prefetch_min_pages": 1,
            "close_deadline_ms": 3_000,
            # vLLM waits for its blocks; our own thread writes them, so closing a socket is proof.
            "quarantine_max_ms": 1_000,
        }
        if not n_host:
            own["write"] = "none"
        if not self.storage:
            own["persist"] = "off"
        return Config.parse({**own, **self.driver})
