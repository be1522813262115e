"""A source over an engine in a process of its own: puts as JSON lines tell it, and lives until its input ends."""

import json
import os
import sys
import time

from omnikv.core.keys import Edge, PayloadId
from omnikv.transports.base import Endpoint, PutRequest
from omnikv.transports.registry import open_transport


def main():
    name, namespace, listen, pool_nbytes = json.loads(sys.argv[1])
    out = os.fdopen(os.dup(1), "w")
    # Whatever an engine prints must not come between the answers.
    os.dup2(2, 1)
    edge = Edge(from_stage="prefill", to_stage="decode", namespace=namespace)
    endpoint = Endpoint(edge=edge, side="source", rank=0, peer_ranks=(0,))
    with open_transport(name, endpoint, {"listen": listen, "pool_nbytes": pool_nbytes}) as source:
        print("open", file=out, flush=True)
        for line in sys.stdin:
            transfer_id, byte, nbytes = json.loads(line)
            payload = PayloadId(edge=edge, transfer_id=transfer_id, source_rank=0, target_rank=0)
            # The last acknowledgement may be on its way.
            (reserved,) = source.reserve_all([PutRequest(payload, nbytes)], deadline=time.monotonic() + 60)
            with reserved as slot:
                piece = bytes([byte]) * min(nbytes, 1 << 20)
                for begin in range(0, nbytes, len(piece)):
                    part = slot.buffer[begin : begin + len(piece)]
                    part[:] = piece[: len(part)]
                # The very last byte tells a payload that came whole from one that came short.
                slot.buffer[-1] = (byte + 1) % 256
                slot.publish()
            print("put", file=out, flush=True)


if __name__ == "__main__":
    main()
