"""One end of a tcp transport in a process of its own: obeys one JSON command a line, and answers each with one."""

import hashlib
import json
import os
import random
import sys
import time

from omnikv.core.keys import Edge, PayloadId
from omnikv.errors import OmniKVError
from omnikv.transports.base import Endpoint
from omnikv.transports.proved_stream import Stream
from omnikv.transports.tcp import TcpTransport
from omnikv.transports.tcp_messages import PIECE

BLOCK_NBYTES = 1 << 20
READ_INTO = Stream.read_into


def content_of(name, nbytes):
    """Bytes of which each block says whose it is and where it belongs."""
    block = random.Random(name).randbytes(BLOCK_NBYTES)
    turned = b"".join(block[at % 997 :] + block[: at % 997] for at in range(-(-nbytes // BLOCK_NBYTES)))
    return turned[:nbytes]


def digest(data):
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class Rank:
    def __init__(self, namespace, side, options):
        self.edge = Edge(from_stage="prefill", to_stage="decode", namespace=namespace)
        endpoint = Endpoint(edge=self.edge, side=side, rank=0, peer_ranks=(0,))
        if "peers" in options:
            options["peers"] = {int(rank): address for rank, address in options["peers"].items()}
        self.transport = TcpTransport(endpoint, **options)

    def payload(self, name):
        return PayloadId(edge=self.edge, transfer_id=name, source_rank=0, target_rank=0)

    def put(self, name, nbytes):
        with self.transport.reserve(self.payload(name), nbytes) as slot:
            slot.buffer[:] = content_of(name, nbytes)
            slot.publish()

    def get(self, name, nbytes, timeout_s):
        """ "right", "absent", or the name of the error; wrong bytes end the process."""
        began = time.monotonic()
        try:
            lease = self.transport.get(self.payload(name), deadline=began + timeout_s)
        except OmniKVError as error:
            return [type(error).__name__, time.monotonic() - began]
        if lease is None:
            return ["absent", time.monotonic() - began]
        with lease:
            assert digest(lease.buffer) == digest(content_of(name, nbytes)), "wrong bytes"
            lease.acknowledge()
        return ["right", time.monotonic() - began]

    def read_slowly(self, pause_s):
        """From now on each read of a payload takes its time, so that a transfer can be met in its middle."""

        def read_into(stream, view):
            if len(view) > PIECE.size:
                time.sleep(pause_s)
            return READ_INTO(stream, view[: 1 << 18])

        Stream.read_into = read_into

    def counters(self):
        return self.transport.counters

    def drain(self, timeout_s):
        return self.transport.drain(deadline=time.monotonic() + timeout_s)

    def pid(self):
        return os.getpid()

    def address(self):
        return self.transport.address


def main():
    rank = Rank(*json.loads(sys.argv[1]))
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = {"value": getattr(rank, name)(*arguments)}
        except OmniKVError as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps(answer), flush=True)  # noqa: T201
    rank.transport.close()


if __name__ == "__main__":
    main()
