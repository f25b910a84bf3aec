"""Names of prefill nodes, looked up away from the sockets.

libzmq would ask the name server on its own thread, the one that moves all bytes: as long as no
answer came, every other node would be silent.
"""

import ipaddress
import socket
import threading
from collections.abc import Callable

from attrs import define, field


def is_named(address: str) -> bool:
    """Whether the host of a `tcp://` address is a name, and no number."""
    if not address.startswith("tcp://") or "[" in address:
        return False
    try:
        ipaddress.ip_address(_host_and_port(address)[0])
    except ValueError:
        return True
    return False


@define(eq=False)
class Lookup:
    """One question to the name service, on a thread that may outlive whoever asked.

    `found` is the address with a number (IPv4) in place of the name; `fault` says why there is
    none. `done` is called from the thread.
    """

    address: str
    _done: Callable[[], None]
    found: str = field(default="", init=False)
    fault: str = field(default="", init=False)

    def __attrs_post_init__(self) -> None:
        thread = threading.Thread(target=self._look, name="kvlift-name", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no thread to be had
            self.fault = str(error)

    def _look(self) -> None:
        host, port = _host_and_port(self.address)
        try:
            infos = socket.getaddrinfo(host, int(port), socket.AF_INET, socket.SOCK_STREAM)
            self.found = f"tcp://{infos[0][4][0]}:{port}"
        except (OSError, ValueError) as error:
            self.fault = f"{host}: {error}"
        self._done()


def _host_and_port(address: str) -> tuple[str, str]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, port
