"""The other process of `bench transfer`: a prefill node, and a plain socket that sends the same."""

import socket
import time

import click
import numpy as np
from attrs import define

from kvlift.cli.benches.transfer import ANSWER_S, FINGERPRINT, GO, Sizes, truth
from kvlift.core.ids import Rid
from kvlift.runtime.prefill import PrefillNode


@define(eq=False)
class Pages:
    """Implements `prefill_ports.PageSource` by this round's pages."""

    pages: np.ndarray

    def page_bytes_for(self, rid: Rid, position: int, rank: int, n_ranks: int) -> memoryview:
        page: memoryview = self.pages[position].data
        return page


@click.command()
@click.argument("port", type=int)
@click.argument("seed", type=int)
@click.argument("page_bytes", type=int)
@click.argument("n_pages", type=int)
@click.argument("n_rounds", type=int)
def send(port: int, seed: int, page_bytes: int, n_pages: int, n_rounds: int) -> None:
    sizes = Sizes(page_bytes=page_bytes, n_pages=n_pages, n_rounds=n_rounds)
    plain = socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S)
    pages = Pages(truth(sizes, seed))
    with PrefillNode("tcp://127.0.0.1:*", FINGERPRINT, pages) as node:
        click.echo(node.address)
        for number in range(n_rounds + 1):
            pages.pages = truth(sizes, seed + number)
            plain.sendall(GO)
            if not plain.recv(1) or not plain.recv(1):
                return
            plain.sendall(pages.pages.reshape(-1).data)
            _serve_one(node)


def _serve_one(node: PrefillNode) -> None:
    """Until the request that is asked for has ended: its pages are all there at once."""
    until_s = time.monotonic() + ANSWER_S
    while time.monotonic() < until_s:
        for asked in node.poll():
            node.page_ready(asked.rid, asked.attempt, asked.prompt.n_pages)
        if node.ended():
            return
        time.sleep(0.0002)
    raise TimeoutError("no request has come")


if __name__ == "__main__":
    send()
