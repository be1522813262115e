"""The lane of a channel's ledger where messages come as events instead of out of sockets."""

from __future__ import annotations


class LedgerLane:
    """Takes a ledger's calls and messages; calls that are alone go past the ledger, as in `omnikv.groups.channel_lane`.

    `kept` counts the calls that ended here, `handed_over` those that the ledger took up.
    """

    def __init__(self, ledger, peers, *, is_open=True):
        self.ledger = ledger
        self.peers = frozenset(peers)
        self.is_open = is_open and bool(peers)
        self.call = None
        self.heard = []
        self.kept = self.handed_over = 0

    def cast(self, call):
        hoped = None
        if self.is_open and self.call is None and call.is_first:
            hoped = self.ledger.cast_alone(call)
        if hoped is not None:
            self.hoped, self.call = hoped, call
            if not call.foresee():
                self.leave()
        else:
            self.leave()
            self.ledger.cast(call)

    def hear(self, rank, payload):
        if self.call is None:
            self.ledger.hear(rank, payload)
            return
        is_first = rank not in dict(self.heard)
        self.heard.append((rank, payload))
        if not is_first or not self.is_hoped(payload):
            self.leave()
        elif len(self.heard) == len(self.peers):
            call, self.call, self.heard = self.call, None, []
            self.kept += 1
            self.ledger.keep(call)

    def is_hoped(self, payload):
        start, end, nbytes = self.hoped
        return len(payload) == nbytes and payload.startswith(start) and payload.endswith(end)

    def lose(self, rank, cause):
        self.leave()
        self.is_open = False
        self.ledger.lose(rank, cause)

    def expire(self, call, now):
        self.leave()
        self.ledger.expire(call, now)

    def leave(self):
        call, self.call = self.call, None
        heard, self.heard = self.heard, []
        if call is not None:
            self.handed_over += 1
            self.ledger.take_up(call)
        for rank, payload in heard:
            self.ledger.hear(rank, payload)
