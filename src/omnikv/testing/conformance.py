"""The conformance suite for transports: what each must do, as checks that need nothing but two ends of it.

Run every check on a fresh pair; one that returns passed, one that raises `AssertionError` says in a sentence which rule
the transport broke. A registered transport that takes `pool_nbytes` needs no code of its own:

    for name, check in transport_scenarios():
        check(NamedPair(transport="mine"))

What a transport may leave out (waiting for room, announcements, a census) is checked where it is there. Any other
implements `TransportPair`. The in-process transport `memory` is the reference that passes all of it.
"""

from __future__ import annotations

from collections.abc import Callable

from omnikv.testing.transport_life import LIFE_CHECKS
from omnikv.testing.transport_limits import LIMIT_CHECKS
from omnikv.testing.transport_notices import NOTICE_CHECKS
from omnikv.testing.transport_pair import NamedPair, TransportPair
from omnikv.testing.transport_peers import PEER_CHECKS

__all__ = ["NamedPair", "TransportCheck", "TransportPair", "transport_scenarios"]

TransportCheck = Callable[[TransportPair], None]


def transport_scenarios() -> list[tuple[str, TransportCheck]]:
    """Every check with its name, in an order that puts the simplest first."""
    return [(check.__name__, check) for check in (*LIFE_CHECKS, *NOTICE_CHECKS, *LIMIT_CHECKS, *PEER_CHECKS)]
