"""The thread of a tcp transport's lanes: when it takes one for dead, and when it only comes slowly."""

import socket
import threading

from omnikv.transports.proved_stream import Stream
from omnikv.transports.tcp_lanes import Lane, LaneThread

SOON_S = 20.0
WAKES_AT_NBYTES = 1 << 16


class OwedLane(Lane):
    """A lane whose peer always owes it something, and which wakes late."""

    def __init__(self, connection):
        super().__init__(Stream(connection, None), "a slow peer")
        self.stream.wake_at(WAKES_AT_NBYTES)
        self.seen = []
        self.has_begun, self.has_ended = threading.Event(), threading.Event()

    wants_write = False
    is_owed = True

    def read(self):
        data = self.stream.read(WAKES_AT_NBYTES)
        if data:
            self.seen.append(data)
        self.has_begun.set()
        return False

    def write(self):
        raise AssertionError("it has nothing to say")

    def gone(self):
        self.has_ended.set()


def test_what_comes_too_slowly_to_wake_a_lane_is_read_before_the_lane_is_given_up():
    lock, counted = threading.Lock(), []

    def count(kind, text):
        counted.append(kind)

    thread = LaneThread("test-lanes", lock, stall_s=0.3, count=count, fault=counted.append)
    here, there = socket.create_server(("127.0.0.1", 0)), socket.socket()
    with here, there:
        there.connect(here.getsockname())
        lane = OwedLane(here.accept()[0])
        thread.start()
        try:
            with lock:
                thread.add(lane)
            assert lane.has_begun.wait(SOON_S)
            there.sendall(b"less than wakes it")
            assert lane.has_ended.wait(SOON_S)
        finally:
            thread.close()
    assert lane.seen == [b"less than wakes it"]
    assert counted == ["stalled_lanes"]
