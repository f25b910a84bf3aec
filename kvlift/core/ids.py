"""The identities that travel between core and effects, each with a type of its own."""

from typing import NewType

Rid = NewType("Rid", str)
"""A request, named by the host scheduler."""

Attempt = NewType("Attempt", int)
"""One submission of a request. Every submission gets a new number, in agreed order."""

Ticket = NewType("Ticket", int)
"""One attempt of one effect. The answers of the effect carry it; a ticket is never used twice."""

NO_TICKET = Ticket(0)
"""In place of a conversation, where a request has no peer."""

DeviceHandle = NewType("DeviceHandle", int)
"""A page of the device tier as the agreed state knows it: equal on all ranks, never used twice.

Each rank maps it to a physical page of its own (`effects.pages`)."""

HostHandle = NewType("HostHandle", int)
"""The same for a page of the host tier."""
