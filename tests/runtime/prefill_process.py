"""A prefill node as a process of its own: python prefill_process.py BIND. Computes slowly."""

import sys
import time

from tests.effects.wire_world import Node


def main() -> None:
    node = Node(sys.argv[1])
    print(node.address, flush=True)
    n_ready: dict[tuple[str, int], int] = {}
    while True:
        known = len(node.asked)
        node.hear()
        for asked in node.asked[known:]:
            n_ready[asked.rid, asked.attempt] = 0
        for asked in node.asked:
            key = (asked.rid, asked.attempt)
            if n_ready[key] < asked.prompt.n_pages:
                n_ready[key] += 1
                node.node.page_ready(asked.rid, asked.attempt, n_ready[key])
        time.sleep(0.03)


if __name__ == "__main__":
    main()
