"""Run by Python at its start, in every process of a server: a wait that yields sleeps instead.

vLLM's processes wait for each other by `sched_yield` in a loop. With more of them than cores, on
Linux 6.18, all threads of one server were measured to be ready to run for 31 to 40 s without a turn
(`/proc/PID/task/TID/schedstat`). Only where KVLIFT_YIELD_US is set.
"""

import os
import time

_SLEEP_S = int(os.environ.get("KVLIFT_YIELD_US", "0")) / 1e6


def _sleep_a_little() -> None:
    time.sleep(_SLEEP_S)


if _SLEEP_S:
    os.sched_yield = _sleep_a_little
