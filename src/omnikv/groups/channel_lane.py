"""The short way of a vote that is alone in its channel and on which all ranks agree, as nearly all votes are.

Theory of operation. A call goes *alone* when nothing else is open at this rank, no thread reads, and each of its
ballots is of the first round. If they are kept should all ranks cast the same, its caller then blocks in the sockets
themselves, one after the other, and compares what comes with the bytes that it hopes for: rank 0 with its own ballots,
a follower with `Kept`. That takes fewer system calls and fewer wakings than waiting for events, and the ledger keeps no
books on the call.

A lane makes no rule of its own. Rank 0 answers as its ledger does when every follower cast the very same bytes. In
every other case the ledger *takes up* the call as if it had been cast there, and is then given all that was read, in
the order in which it came. So it is when there is no hope, when other bytes come, when a connection ends, when nothing
comes for `PATIENCE_S`, and as soon as another thread wants in: that thread lets the ledger take the call up at once,
and the thread in the lane finds so when its reads end, in twice `PATIENCE_S` at most. A lane reads without the
channel's lock, so nobody else may read while `is_reading`.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Collection
from typing import Any

from omnikv.groups.channel_call import Call
from omnikv.groups.channel_ledger import Ledger
from omnikv.groups.channel_link import LENGTH_NBYTES, Link

# How long one read blocks at most; the kernel counts in ticks of up to 4 ms and may stop one tick early. The call of
# another thread waits so long at most, and one that has to wait longer loses nothing by going the general way.
PATIENCE_S = 0.008
_PATIENCE = struct.pack("ll", 0, int(PATIENCE_S * 1e6))


class Lane:
    """One rank's lane; all but the reading itself happens with its channel's lock held.

    `call` is the call that goes alone. `read` is what was read for one that does not end here, to be handed over;
    `is_interrupted` says that its thread went away meanwhile.
    """

    def __init__(self, lock: threading.Lock, ledger: Ledger[Any], links: Collection[Link]) -> None:
        self.call: Call | None = None
        self.is_reading = False
        self.is_interrupted = False
        self.read: list[tuple[Link, bytes]] = []
        self._lock = lock
        self._ledger = ledger
        self._links = tuple(links)
        for link in links:
            link.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _PATIENCE)

    def leave(self) -> None:
        """Nothing; if a call goes alone, the ledger takes it up."""
        call, self.call = self.call, None
        if call is not None:
            self._ledger.take_up(call)

    def run(self, call: Call, start: bytes, end: bytes, nbytes: int) -> None:
        """Nothing; `call`, which was cast, goes alone until it is kept, or must be handed over. Nobody else may read.

        The rest is what the ledger hopes to hear from every peer, as it said when the call was cast.
        """
        # One function, however many layers it passes by: each further one costs as much as all that it says.
        start = nbytes.to_bytes(LENGTH_NBYTES, "big") + start
        nbytes += LENGTH_NBYTES
        self.call = call
        self.is_interrupted = True
        # What followers sent is under way meanwhile.
        if not call.foresee():
            self.is_interrupted = False
            return
        self.is_reading = True
        is_hoped = False
        self._lock.release()
        try:
            give_up_at = time.monotonic() + PATIENCE_S
            for link in self._links:
                data = link.connection.recv(nbytes)
                self.read.append((link, data))
                if (
                    len(data) != nbytes
                    or not data.startswith(start)
                    or not data.endswith(end)
                    or link.inbox
                    or time.monotonic() > give_up_at
                ):
                    break
            else:
                is_hoped = True
        except BlockingIOError:
            # Nothing came in time.
            pass
        except OSError as error:
            # Its end is known to the link from now on, and counts when this is handed over.
            link.break_off(error)
            self.read.append((link, b""))
        finally:
            self._lock.acquire()
            self.is_reading = False
        self.is_interrupted = False
        if is_hoped and self.call is call:
            self.call = None
            self.read.clear()
            self._ledger.keep(call)
