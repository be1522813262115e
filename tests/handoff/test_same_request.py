"""Two threads that receive one request: the first to ask gets all of it, the other is told that it was used."""

import threading
from concurrent.futures import ThreadPoolExecutor, wait

from stages import assert_same, full_cache, send_everywhere, stages

from omnikv import Route
from omnikv.errors import AlreadyConsumed


def test_two_threads_never_hold_a_part_each_while_both_wait_for_the_rest(transport, namespace):
    layers = full_cache(num_heads=2)
    route = Route.tp("a", "b", num_kv_heads=2, from_tp=2, to_tp=1, namespace=namespace)

    def receive(request_id, started):
        started.wait()
        try:
            with receiver.receive(request_id, timeout_s=60) as kv:
                assert_same(kv.layers, layers)
        except AlreadyConsumed:
            return "used"
        return "whole"

    with stages(route, transport) as (senders, [receiver]), ThreadPoolExecutor(2) as threads:
        for number in range(30):
            started = threading.Barrier(3)
            both = [threads.submit(receive, f"r{number}", started) for _ in range(2)]
            started.wait()
            for sender in senders:
                send_everywhere([sender], layers, request_id=f"r{number}")
            done, _ = wait(both, timeout=20)
            assert len(done) == 2, "each holds a part that the other waits for"
            assert sorted(one.result() for one in both) == ["used", "whole"]
        assert [sender.drain(timeout_s=60) for sender in senders] == [0, 0]
