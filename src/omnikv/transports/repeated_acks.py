"""What a target says again when a connection broke: its latest acknowledgements, to the same life of a source.

Theory of operation. A connection that breaks may take an Ack with it: the source then takes the payload for one that
was given back, offers it again, keeps its room and waits for it in `drain`. So a target remembers the latest
`MAX_REPEATED` leases that it acknowledged to each source, and says all of them again, before anything else, when the
same life of the source is back; what is acknowledged while there is no connection is said then too. The source has
given each lease a number that it never gives again, and does nothing about those that it has heard of; the others count
as long as nobody leased the payload anew (`core.lease`). Another life of a source hears nothing, nor is anything said
by another life of a target.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from omnikv.core.messages import Ack
from omnikv.transports.base import Seat
from omnikv.transports.links import Link

# Far more than are ever on their way to a source that reads.
MAX_REPEATED = 1024


@dataclass(slots=True)
class _Said:
    """The latest link to one life of a source, the latest leases that were acknowledged to that life, and whether one
    of them was so over that link.
    """

    link: Link
    leases: deque[int]
    is_used: bool = False


class RepeatedAcks:
    """The acknowledgements of one target. Called with the transport's lock."""

    def __init__(self) -> None:
        self._said: dict[Seat, _Said] = {}

    def link_ready(self, link: Link) -> None:
        """Nothing; a source is there, and hears again what it may have missed."""
        assert link.seat is not None
        said = self._said.get(link.seat)
        if said is None or said.link.life != link.life:
            said = self._said[link.seat] = _Said(link, deque(maxlen=MAX_REPEATED))
        said.link, said.is_used = link, False
        for lease in said.leases:
            link.send(Ack(lease))

    def say(self, link: Link, ack: Ack) -> None:
        """Nothing; a lease that came over `link` is acknowledged, over a later one to the same source if there is."""
        assert link.seat is not None
        said = self._said.get(link.seat)
        if said is not None and said.link.life == link.life:
            said.leases.append(ack.lease)
            said.is_used = True
            link = said.link
        link.send(ack)

    def are_owed(self, link: Link) -> bool:
        """Whether something was acknowledged that its source may not have heard, should `link` to it have ended."""
        assert link.seat is not None
        said = self._said.get(link.seat)
        return said is not None and said.link.life == link.life and said.is_used
