"""The choices and limits that the core decides by. All counts are pages."""

from enum import Enum

from attrs import frozen


class PrefetchPolicy(Enum):
    """When a read from storage is given up."""

    WAIT_COMPLETE = "wait_complete"
    DEADLINE = "deadline"
    BEST_EFFORT = "best_effort"


class WritePolicy(Enum):
    """When finished device pages are copied to the host."""

    THROUGH = "through"
    BACK = "back"
    NONE = "none"


class Switch(Enum):
    ON = "on"
    OFF = "off"


class EvictionPolicy(Enum):
    LRU = "lru"
    LFU = "lfu"
    FIFO = "fifo"
    PRIORITY = "priority"


@frozen(kw_only=True)
class Policy:
    """Everything that `advance` needs to know beside the state; equal on all ranks.

    `bypass_max`: how often a head of line that does not fit may be overtaken.
    `write_back_low_water_pages`: free device pages below which dirty pages start down.
    `cost_threshold_percent`: with the cost model on, a prefetch is declined when its measured time
    is above this share of the transfer time of the same pages.
    `device_tier`: OFF where the host's own cache owns the device's pages. Then they are here only
    while they go down, none is shared, and a prompt's hit there is what its submission says.
    """

    n_device_pages: int = 64
    n_host_pages: int = 64
    prefetch: PrefetchPolicy = PrefetchPolicy.WAIT_COMPLETE
    prefetch_min_pages: int = 1
    write: WritePolicy = WritePolicy.THROUGH
    persist: Switch = Switch.ON
    eviction: EvictionPolicy = EvictionPolicy.LRU
    decode_reserve_pages: int = 0
    bypass_max: int = 16
    write_back_low_water_pages: int = 0
    first_token: Switch = Switch.ON
    cost_model: Switch = Switch.OFF
    cost_threshold_percent: int = 100
    lookups_again_max: int = 3
    ballot_slots: int = 256
    device_tier: Switch = Switch.ON
