"""Where the ranks of one machine meet: a store that nobody else can reach."""

import socket

import torch.distributed as dist


def loopback_store() -> dist.TCPStore:
    """The ranks' rendezvous store, for this machine alone.

    torch would listen on every address of the machine, whatever host it is told, and the store
    trusts whoever reaches it.
    """
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
