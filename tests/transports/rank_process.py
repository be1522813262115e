"""One end of a shm transport in a process of its own: obeys one JSON command a line, answers each with one JSON line.

The process is a program and no fork of the test's, as real stages are.
"""

import gc
import hashlib
import json
import os
import signal
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from omnikv.core.keys import Edge, PayloadId
from omnikv.errors import OmniKVError, PutRejected
from omnikv.transports.base import Endpoint, PutRequest
from omnikv.transports.shm import ShmTransport

POOL = {"pool_nbytes": 8 << 20, "segment_nbytes": 1 << 20}


def bytes_of(payload):
    """The bytes of a payload, as many and such as no other has, alike in every process."""
    seed = hashlib.blake2b(payload.encode().encode()).digest()
    return seed * (1 + int.from_bytes(seed[:2], "big") % 8000)


class Rank:
    def __init__(self, namespace, side, rank, peers, terms):
        self.edge = Edge(from_stage="prefill", to_stage="decode", namespace=namespace)
        endpoint = Endpoint(edge=self.edge, side=side, rank=rank, peer_ranks=tuple(peers), **terms)
        self.transport = ShmTransport(endpoint, **(POOL if side == "source" else {}))
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

    def fail(self, transfer_id, cause):
        self.transport.fail(self.payload(transfer_id), cause)

    def abort(self, transfer_id):
        self.transport.abort(self.payload(transfer_id), "not needed")

    def held(self):
        """What this process holds: descriptors, bytes of the pool in use and mapped, payloads and leases tracked."""
        gc.collect()
        pool = self.transport.pool
        census = self.transport.census()
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "used": pool.used_nbytes,
            "mapped": pool.mapped_nbytes,
            "live": [census[where] for where in ("announced", "ready", "leased")],
            "leases": len(self.transport._source._ledger._leases),
        }

    def resident_nbytes(self):
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    def put_and_abort(self, first, number, nbytes):
        """Puts; every second one is aborted at once, the others are left to be got."""
        for at in range(first, first + number):
            self.put(f"r{at}", "x", nbytes)
            if at % 2:
                self.abort(f"r{at}")

    def stream(self, name):
        """Puts payloads of its own sizes and bytes, one after the other, until it is stopped or killed."""
        self.begin(self.keep_putting, name)

    def drink(self, name):
        """Gets the same payloads and looks at every byte, until it is stopped or killed, or its source is."""
        self.begin(self.keep_getting, name)

    def stop(self):
        self.stopped.set()
        self.thread.join()
        return self.result

    def begin(self, work, name):
        self.stopped = threading.Event()
        self.result = {"done": 0, "torn": 0, "ended_by": ""}
        self.thread = threading.Thread(target=work, args=(name,))
        self.thread.start()

    def keep_putting(self, name):
        number = 0
        while not self.stopped.is_set():
            payload = self.payload(f"{name}-{number}")
            data = bytes_of(payload)
            try:
                (slot,) = self.transport.reserve_all([PutRequest(payload, len(data))], deadline=time.monotonic() + 0.01)
            except PutRejected:
                continue
            slot.buffer[:] = data
            slot.publish()
            number += 1
        for at in range(number):
            self.transport.abort(self.payload(f"{name}-{at}"), "the round is over")
        self.result["done"] = number

    def keep_getting(self, name):
        while not self.stopped.is_set():
            payload = self.payload(f"{name}-{self.result['done']}")
            try:
                lease = self.transport.get(payload, deadline=time.monotonic() + 0.05)
            except OmniKVError as error:
                self.result["ended_by"] = type(error).__name__
                return
            if lease is not None:
                self.result["torn"] += bytes(lease.buffer) != bytes_of(payload)
                lease.acknowledge()
                self.result["done"] += 1

    def wait_with_many(self, number, seconds):
        """The seconds of processor time that so many waiting receivers take in so many seconds."""
        others = [Endpoint(edge=self.edge, side="target", rank=rank, peer_ranks=(0,)) for rank in range(1, number)]
        ends = [self.transport, *map(ShmTransport, others)]
        until = time.monotonic() + seconds + 1.0
        payloads = [
            PayloadId(edge=self.edge, transfer_id="never", source_rank=0, target_rank=at) for at in range(number)
        ]
        with ThreadPoolExecutor(number) as pool:
            gets = [pool.submit(end.get, payload, deadline=until) for end, payload in zip(ends, payloads, strict=True)]
            time.sleep(0.5)  # Not to wait for anything: until here they begin, which takes its time.
            before = time.process_time()
            time.sleep(seconds)
            used_s = time.process_time() - before
            assert [get.result() for get in gets] == [None] * number
        for end in ends[1:]:
            end.close()
        return used_s

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
