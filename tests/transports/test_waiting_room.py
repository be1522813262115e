"""Threads that wait for a sender's memory: room that comes back wakes one of them, and closing wakes all."""

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from omnikv.errors import PutRejected, TransportError
from omnikv.transports.waiting_room import WaitingRoom

WAITING = 20


class Cloakroom:
    """A place with so many hooks, and how often each of those who wait looked up."""

    def __init__(self, hooks):
        self.lock = threading.Lock()
        self.row = WaitingRoom("test", self.lock)
        self.is_closed = False
        self.looks = [0] * WAITING
        self._hooks = hooks

    def come(self, number):
        def take():
            with self.lock:
                if not self._hooks:
                    raise PutRejected("full", retryable=True)
                self._hooks -= 1
                return number

        def look():
            self.looks[number] += 1
            if self.is_closed:
                raise TransportError("closed")
            return math.inf

        return self.row.admit(take, time.monotonic() + 60, look)

    def give(self):
        with self.lock:
            self._hooks += 1
            self.row.freed()

    def close(self):
        with self.lock:
            self.is_closed = True
            self.row.look_again()


@pytest.fixture
def crowd():
    with ThreadPoolExecutor(WAITING) as threads:

        def gather(room):
            coming = []
            for number in range(WAITING):
                coming.append(threads.submit(room.come, number))
                while len(room.row._row.waiting) <= number or not room.looks[number]:
                    time.sleep(0)
            return coming

        yield gather


def test_d31_room_that_comes_back_wakes_the_first_and_leaves_the_others_asleep(crowd):
    room = Cloakroom(hooks=0)
    coming = crowd(room)
    looked = list(room.looks)
    for number in range(WAITING):
        room.give()
        assert coming[number].result(timeout=60) == number
        assert room.looks[number + 2 :] == looked[number + 2 :], "one that is not next was woken"


def test_closing_wakes_all_that_wait(crowd):
    room = Cloakroom(hooks=0)
    coming = crowd(room)
    room.close()
    for waiting in coming:
        with pytest.raises(TransportError, match="closed"):
            waiting.result(timeout=60)
    room.give()
    assert room.row._row.waiting == ()
