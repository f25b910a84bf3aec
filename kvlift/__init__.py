"""Decode-side tiered KV cache for prefill/decode disaggregated LLM serving.

    from kvlift import Config, Driver, Ports, Prompt

What is listed here is the interface. Names are loaded when they are first asked for, so that
`import kvlift` is quick, and torch is imported only by who needs it.
"""

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvlift.core.ballot import RankFailed, RanksDiverged, ballot_length
    from kvlift.core.keys import Namespace
    from kvlift.core.phase import Outcome
    from kvlift.core.policy import EvictionPolicy, PrefetchPolicy, Switch, WritePolicy
    from kvlift.core.prompt import Prompt, token_bytes
    from kvlift.core.tier import Source, Tier
    from kvlift.effects.clock import MonotonicClock
    from kvlift.effects.copies_cpu import CpuCopies
    from kvlift.effects.copies_cuda import CudaCopies
    from kvlift.effects.device_memory import BlockMemory, LayeredMemory
    from kvlift.effects.host_pool import HostPool
    from kvlift.effects.layout import PageLayout
    from kvlift.effects.lone_rank import LoneRank
    from kvlift.effects.peers import ZmqPeers
    from kvlift.effects.ports import RankLate, RankLost
    from kvlift.effects.ranks_gloo import GlooRanks, join_store, open_store
    from kvlift.effects.stores.files import FileStore
    from kvlift.effects.wakeup import Wakeup
    from kvlift.effects.wire_security import CurveClient, CurveServer, SharedSecret
    from kvlift.runtime.config import Config, ConfigError
    from kvlift.runtime.driver import Driver
    from kvlift.runtime.errors import (
        DriverClosed,
        DuplicateRequest,
        PromptTooLong,
        RequestError,
        RequestLeaving,
        TooManyRequests,
        UnknownRequest,
    )
    from kvlift.runtime.interpret import Ports
    from kvlift.runtime.observer import Observer
    from kvlift.runtime.observers import Observers, observers_for
    from kvlift.runtime.prefill import PrefillNode
    from kvlift.runtime.snapshot import Snapshot
    from kvlift.runtime.tick import (
        Ended,
        Granted,
        Grew,
        NoRoom,
        Pending,
        Ready,
        Refused,
        Shrunk,
        Tick,
    )

_NAMES_BY_MODULE: Final = {
    "kvlift.core.ballot": ("RankFailed", "RanksDiverged", "ballot_length"),
    "kvlift.core.keys": ("Namespace",),
    "kvlift.core.phase": ("Outcome",),
    "kvlift.core.policy": ("EvictionPolicy", "PrefetchPolicy", "Switch", "WritePolicy"),
    "kvlift.core.prompt": ("Prompt", "token_bytes"),
    "kvlift.core.tier": ("Source", "Tier"),
    "kvlift.effects.clock": ("MonotonicClock",),
    "kvlift.effects.copies_cpu": ("CpuCopies",),
    "kvlift.effects.copies_cuda": ("CudaCopies",),
    "kvlift.effects.device_memory": ("BlockMemory", "LayeredMemory"),
    "kvlift.effects.host_pool": ("HostPool",),
    "kvlift.effects.layout": ("PageLayout",),
    "kvlift.effects.lone_rank": ("LoneRank",),
    "kvlift.effects.peers": ("ZmqPeers",),
    "kvlift.effects.ports": ("RankLate", "RankLost"),
    "kvlift.effects.ranks_gloo": ("GlooRanks", "join_store", "open_store"),
    "kvlift.effects.stores.files": ("FileStore",),
    "kvlift.effects.wakeup": ("Wakeup",),
    "kvlift.effects.wire_security": ("CurveClient", "CurveServer", "SharedSecret"),
    "kvlift.runtime.config": ("Config", "ConfigError"),
    "kvlift.runtime.driver": ("Driver",),
    "kvlift.runtime.errors": (
        "DriverClosed",
        "DuplicateRequest",
        "PromptTooLong",
        "RequestError",
        "RequestLeaving",
        "TooManyRequests",
        "UnknownRequest",
    ),
    "kvlift.runtime.interpret": ("Ports",),
    "kvlift.runtime.observer": ("Observer",),
    "kvlift.runtime.observers": ("Observers", "observers_for"),
    "kvlift.runtime.prefill": ("PrefillNode",),
    "kvlift.runtime.snapshot": ("Snapshot",),
    "kvlift.runtime.tick": (
        "Ended",
        "Granted",
        "Grew",
        "NoRoom",
        "Pending",
        "Ready",
        "Refused",
        "Shrunk",
        "Tick",
    ),
}

_MODULE_BY_NAME: Final = {
    name: module for module, names in _NAMES_BY_MODULE.items() for name in names
}

__all__ = [
    "BlockMemory",
    "Config",
    "ConfigError",
    "CpuCopies",
    "CudaCopies",
    "CurveClient",
    "CurveServer",
    "Driver",
    "DriverClosed",
    "DuplicateRequest",
    "Ended",
    "EvictionPolicy",
    "FileStore",
    "GlooRanks",
    "Granted",
    "Grew",
    "HostPool",
    "LayeredMemory",
    "LoneRank",
    "MonotonicClock",
    "Namespace",
    "NoRoom",
    "Observer",
    "Observers",
    "Outcome",
    "PageLayout",
    "Pending",
    "Ports",
    "PrefetchPolicy",
    "PrefillNode",
    "Prompt",
    "PromptTooLong",
    "RankFailed",
    "RankLate",
    "RankLost",
    "RanksDiverged",
    "Ready",
    "Refused",
    "RequestError",
    "RequestLeaving",
    "SharedSecret",
    "Shrunk",
    "Snapshot",
    "Source",
    "Switch",
    "Tick",
    "Tier",
    "TooManyRequests",
    "UnknownRequest",
    "Wakeup",
    "WritePolicy",
    "ZmqPeers",
    "ballot_length",
    "join_store",
    "observers_for",
    "open_store",
    "token_bytes",
]


def __getattr__(name: str) -> object:
    module = _MODULE_BY_NAME.get(name)
    if module is None:
        raise AttributeError(f"kvlift has no {name!r}")
    value: object = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
