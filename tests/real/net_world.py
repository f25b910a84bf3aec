"""Another host on this machine: a network namespace behind a link that tests may cut."""

import contextlib
import os
import subprocess
from collections.abc import Iterator

import pytest
from attrs import define, field

COMMAND_S = 20.0


def ran(*command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, check=False, text=True, timeout=COMMAND_S)


@define(eq=False)
class Host:
    """`address` is the other host's, `own` this one's on the link between them."""

    name: str
    address: str
    own: str
    _link: str
    _rules: list[tuple[str, ...]] = field(factory=list)

    def command(self, *command: str) -> list[str]:
        """A command that runs over there."""
        return ["ip", "netns", "exec", self.name, *command]

    def cut(self) -> None:
        """From now on every packet vanishes, both ways, and nobody is told."""
        self._switch("down")

    def mend(self) -> None:
        self._switch("up")

    @contextlib.contextmanager
    def is_cut(self) -> Iterator[None]:
        self.cut()
        try:
            yield
        finally:
            self.mend()

    @contextlib.contextmanager
    def resets(self, port: int) -> Iterator[None]:
        """Every connection to that port over there is reset with its next packet, new ones too."""
        rule = ("INPUT", "-p", "tcp", "--dport", str(port), "-j", "REJECT")
        options = ("--reject-with", "tcp-reset")
        made = ran(*self.command("iptables", "-A", *rule, *options))
        if made.returncode:
            pytest.skip(f"no connection can be reset here: {made.stderr.strip()[:200]}")
        try:
            yield
        finally:
            ran(*self.command("iptables", "-D", *rule, *options)).check_returncode()

    def _switch(self, state: str) -> None:
        ran("ip", "-n", self.name, "link", "set", self._link, state).check_returncode()


@contextlib.contextmanager
def another_host() -> Iterator[Host]:
    """Skips the test where this user may not make one."""
    number = os.getpid() % 60_000
    name, mine, theirs = f"kvlift-{number}", f"kva{number}", f"kvb{number}"
    prefix = f"10.{200 + number // 10_000}.{number // 100 % 100}.{number % 50 * 4}".rpartition(".")
    first = int(prefix[2])
    own, address = f"{prefix[0]}.{first + 1}", f"{prefix[0]}.{first + 2}"
    try:
        made = ran("ip", "netns", "add", name)
    except FileNotFoundError:
        pytest.skip("no other host: the command `ip` (iproute2) is missing")
    if made.returncode:
        pytest.skip(f"no other host: {made.stderr.strip()[:200] or 'namespaces are not allowed'}")
    try:
        for command in (
            ("ip", "link", "add", mine, "type", "veth", "peer", "name", theirs, "netns", name),
            ("ip", "addr", "add", f"{own}/30", "dev", mine),
            ("ip", "link", "set", mine, "up"),
            ("ip", "-n", name, "addr", "add", f"{address}/30", "dev", theirs),
            ("ip", "-n", name, "link", "set", theirs, "up"),
            ("ip", "-n", name, "link", "set", "lo", "up"),
        ):
            made = ran(*command)
            if made.returncode:
                pytest.skip(f"no other host: {' '.join(command)}: {made.stderr.strip()[:200]}")
        yield Host(name, address, own, theirs)
    finally:
        ran("ip", "netns", "del", name)
        ran("ip", "link", "del", mine)  # gone already where the namespace was the last to hold it
