"""What the ends of a tcp transport say to each other beside what is said over every transport.

Over the control link a source says where to pull a payload from; over a lane a target pulls, and takes pulls back. The
answers on a lane are pieces of payloads, each behind a head of fixed size (`PIECE`).
"""

from __future__ import annotations

import struct

import msgspec

from omnikv.core.messages import Count, ToTarget

# Which pull a piece belongs to, where it goes in the payload, and how long it is; 0 says that the payload is gone.
# It fills a cache line, so that what follows lies as well in the system's buffers as in the payload: copies between
# places that lie differently made a transfer take an eighth more time.
PIECE = struct.Struct(">QQI44x")
# How long pieces are where pulls take turns, and how long where a pull is alone: each costs its head and a few calls.
PIECE_NBYTES = 1 << 20
LONGEST_PIECE_NBYTES = 4 << 20
# The longest message of a target on a lane.
MAX_PULL_NBYTES = 256


class Coming(msgspec.Struct, frozen=True, array_like=True, tag="coming"):
    """A payload that `ask` waits for is being written: what is written of it may be pulled, and means nothing yet."""

    ask: Count
    token: Count
    nbytes: Count


class Leased(msgspec.Struct, frozen=True, array_like=True, tag="leased"):
    """Answers an ask: the payload is leased to the asker as `lease`, to be pulled under `token`."""

    ask: Count
    lease: Count
    token: Count
    nbytes: Count


class Pull(msgspec.Struct, frozen=True, array_like=True, tag="pull"):
    """A target wants the payload's pieces, but for the first `skip_nbytes` of what is sent of it."""

    pull: Count
    token: Count
    skip_nbytes: Count


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """A target wants no more pieces of a pull; those under way are thrown away."""

    pull: Count


ToTargetStreamed = ToTarget | Coming | Leased
FromPuller = Pull | Stop
