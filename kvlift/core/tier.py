"""The three places where a finished page can live."""

from enum import Enum


class Tier(Enum):
    """DEVICE is above HOST is above STORAGE: restores go up, write-through and persist go down."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


class Source(Enum):
    """Where the pages of a request come from. A plan is a partition of its pages by source."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"
    PEER = "peer"
    RECOMPUTE = "recompute"
