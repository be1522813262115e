"""A forked child has nothing of its parent's in-process transport, and can open its own."""

import subprocess
import sys

PROGRAM = """
import os
from omnikv.core.keys import Edge
from omnikv.transports import memory, memory_exchange
from omnikv.transports.base import Endpoint

endpoint = Endpoint(edge=Edge(from_stage="a", to_stage="b"), side="source", rank=0, peer_ranks=(0,))
parents = memory.MemoryTransport(endpoint)
# As when another thread opens a transport while this one forks.
memory_exchange._exchanges_lock.acquire()
pid = os.fork()
if pid == 0:
    with memory.MemoryTransport(endpoint):
        parents.close()
        assert list(memory_exchange._exchanges) == [endpoint.edge]
    assert not memory_exchange._exchanges
    os._exit(7)
memory_exchange._exchanges_lock.release()
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
assert list(memory_exchange._exchanges) == [endpoint.edge]
parents.close()
"""


def test_a_forked_child_opens_its_own_although_the_lock_was_held():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
