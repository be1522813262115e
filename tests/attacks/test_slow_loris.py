"""Attack: connections that send a byte now and then, and never finish: ended in time, and nobody waits for them."""

import contextlib
import time

from omnikv.core.authentication import call


def test_a_greeting_that_never_ends_is_ended(hurried, ended, warnings_of):
    callers = [hurried.caller(hurried.address) for _ in range(20)]
    _, opening = call(callers[0].claim, bytes(32), callers[0].secret)
    for at in range(len(opening) - 1):
        for caller in callers:
            with contextlib.suppress(ConnectionError):
                caller.connection.sendall(opening[at : at + 1])
        hurried.works()
        time.sleep(0.01)
    assert all(ended(caller.connection) for caller in callers)
    hurried.until_counted("slow_greetings", 20)
    assert len(warnings_of("did not prove itself")) == 1
    hurried.works()


def test_a_caller_that_says_nothing_at_all_is_ended(hurried, ended):
    silent = hurried.connect()
    assert ended(silent)
    hurried.until_counted("slow_greetings")
    hurried.works()


def test_one_that_proves_itself_and_then_says_nothing_is_ended(hurried, ended):
    peer = hurried.caller(hurried.address, rank=1)
    peer.greet()
    assert ended(peer.connection)
    hurried.until_counted("slow_greetings")
    hurried.works()
