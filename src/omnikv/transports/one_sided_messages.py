"""What the ends of a one-sided transport say over their control link, beside what is said over every transport."""

from __future__ import annotations

from typing import Annotated

import msgspec

from omnikv.core.lending import MAX_SPANS
from omnikv.core.messages import Count, ToSource, ToTarget

MAX_WORD_NBYTES = 32768
NOTICE_NBYTES = 16


class Reach(msgspec.Struct, frozen=True, array_like=True, tag="reach"):
    """A source's engine says this to the target's: how it is reached, or how some of its memory is read."""

    word: Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_WORD_NBYTES)]


class Placed(msgspec.Struct, frozen=True, array_like=True, tag="placed"):
    """Answers an ask: the payload is what lies at these places of the source, one after another: (address, bytes).

    It is leased to the asker as `lease`. A `notice` is what the engine of the target says to the source's once the read
    has gone well; it is told to nobody else, and proves that it is this read.
    """

    ask: Count
    lease: Count
    places: Annotated[tuple[tuple[Count, Count], ...], msgspec.Meta(min_length=1, max_length=MAX_SPANS)]
    notice: Annotated[bytes, msgspec.Meta(max_length=NOTICE_NBYTES)] = b""


class Drawn(msgspec.Struct, frozen=True, array_like=True, tag="drawn"):
    """A target reads nothing under `lease` any more, and has read all of it if that went well.

    Said where the engine has no notices, where a read did not go well, and where a notice was not answered in time.
    """

    lease: Count


class Sound(msgspec.Struct, frozen=True, array_like=True, tag="sound"):
    """A source answers a notice or Drawn: the lease held the whole time, so what was read is the payload."""

    lease: Count


ToSourceOneSided = ToSource | Drawn
ToTargetOneSided = ToTarget | Reach | Placed | Sound
