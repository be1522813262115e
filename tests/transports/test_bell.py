"""Waiting under a lock: nothing is missed, a deadline is kept, and an interruption leaves the lock as it was."""

import signal
import threading
import time

import pytest

from omnikv.transports.bell import Bell


def test_what_is_there_already_is_found_without_a_ring():
    assert Bell(threading.Lock()).wait_for(lambda: "here", deadline=0) == "here"


def test_a_deadline_that_has_passed_looks_once():
    looks = []
    assert Bell(threading.Lock()).wait_for(lambda: looks.append(1), deadline=time.monotonic()) is None
    assert len(looks) == 1


def test_a_ring_wakes_every_thread_that_waits():
    lock = threading.Lock()
    bell, found, looked = Bell(lock), [], threading.Semaphore(0)
    here = False

    def look():
        looked.release()
        return here or None

    threads = [threading.Thread(target=lambda: found.append(bell.wait_for(look, float("inf")))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in threads:
        looked.acquire()
    with lock:
        here = True
        bell.ring()
    for thread in threads:
        thread.join()
    assert found == [True, True, True]
    assert not bell._sleepers


def test_an_interruption_leaves_the_lock_free():
    lock = threading.Lock()
    bell = Bell(lock)

    def interrupt(number, frame):
        raise KeyboardInterrupt

    def wait_until_interrupted(after_s):
        # An interruption that happens to arrive where Python can only report it, as in a finalizer, is repeated.
        signal.setitimer(signal.ITIMER_REAL, after_s, 1.0)
        try:
            while True:
                bell.wait_for(lambda: None, time.monotonic() + 1e-5)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for microseconds in range(20, 220):
            with pytest.raises(KeyboardInterrupt):
                wait_until_interrupted(microseconds / 1e6)
            assert not lock.locked()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert bell.wait_for(lambda: "here", deadline=0) == "here"
