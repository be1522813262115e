"""One end of a shm transport in a process of its own: obeys one JSON command a line, answers each with one JSON line.

The process is a program and no fork of the test's, as real stages are.
"""

import json
import os
import signal
import sys
import time
import warnings

from omnikv.core.keys import Edge, PayloadId
from omnikv.errors import OmniKVError
from omnikv.transports.base import Endpoint
from omnikv.transports.shm import ShmTransport


class Rank:
    def __init__(self, namespace, side, rank, peers):
        self.edge = Edge(from_stage="prefill", to_stage="decode", namespace=namespace)
        self.transport = ShmTransport(Endpoint(edge=self.edge, side=side, rank=rank, peer_ranks=tuple(peers)))
        self.side, self.rank = side, rank
        self.leases = {}

    def payload(self, transfer_id, peer=0):
        source, target = (self.rank, peer) if self.side == "source" else (peer, self.rank)
        return PayloadId(edge=self.edge, transfer_id=transfer_id, source_rank=source, target_rank=target)

    def put(self, transfer_id, text, repeat=1):
        data = text.encode() * repeat
        with self.transport.reserve(self.payload(transfer_id), len(data)) as slot:
            slot.buffer[:] = data
            slot.publish()
        return len(data)

    def lease(self, transfer_id):
        lease = self.transport.get(self.payload(transfer_id), deadline=time.monotonic() + 60)
        self.leases[transfer_id] = lease
        return bytes(lease.buffer).decode()

    def acknowledge(self, transfer_id):
        self.leases.pop(transfer_id).acknowledge()

    def drain(self):
        return self.transport.drain(deadline=time.monotonic() + 60)

    def until_waited_for(self, transfer_id):
        while self.payload(transfer_id) not in self.transport._source._waiting:
            os.sched_yield()

    def fork_a_child_that_stays(self):
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of forks beside threads: that is the point.
        child = os.fork()
        if child == 0:
            os.close(0)
            os.close(1)
            signal.pause()
        return child

    def close(self):
        self.transport.close()

    def pid(self):
        return os.getpid()


def main():
    rank = Rank(*json.loads(sys.argv[1]))
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = {"value": getattr(rank, name)(*arguments)}
        except OmniKVError as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps(answer), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
