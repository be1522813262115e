"""A link whose end Ctrl-C interrupts in a caller's thread, wherever it comes, is ended whole by who is next."""

import itertools
import time
from pathlib import Path

import pytest
from interruptions import interrupted_at
from tcp_ends import TcpPair

from omnikv import transports
from omnikv.errors import OmniKVError
from omnikv.testing.conformance import NamedPair
from omnikv.testing.transport_pair import lease, payload_of, put, take
from omnikv.transports.link_loop import LinkLoop

SOON_S = 5.0
FORGET, ADOPT, KNOCK = (call.__code__ for call in (LinkLoop.forget, LinkLoop._adopt, LinkLoop.knock))
PLACE = str(Path(transports.__file__).parent)


def is_place(frame, event):
    """Calls in the transports once the link's end has begun; of knocking anew, once there is a link."""
    if (event == "call" and frame.f_code in (FORGET, ADOPT)) or not frame.f_code.co_filename.startswith(PLACE):
        return False
    while frame is not None and frame.f_code not in (ADOPT, KNOCK) and frame.f_code.co_name != "open_link":
        frame = frame.f_back
    return frame is None or frame.f_code is ADOPT


@pytest.fixture(params=["shm", pytest.param("tcp", marks=pytest.mark.slow)])
def new_pair(request):
    return TcpPair if request.param == "tcp" else lambda: NamedPair(transport="shm")


def until(is_so):
    deadline = time.monotonic() + SOON_S
    while not is_so():
        assert time.monotonic() < deadline


def ended_whole(loop, link):
    tables = (loop._ready, loop._unready, loop._ending)
    return link.connection.fileno() < 0 and not any(link in table for table in tables) and loop._selector.get_map()


@pytest.mark.parametrize("who", ["the caller", "the thread"])
def test_a_link_is_ended_whole_after_an_interruption_anywhere(new_pair, in_thread, who):
    for number in itertools.count(1):
        pair = new_pair()
        with pair.open_source(0, (0,), {}) as source, pair.open_target(0, (0,), {}) as target:
            put(source, payload_of(pair, "hello"), b"x")
            take(pair, target, payload_of(pair, "hello"))
            waiting = in_thread(lease, pair, target, payload_of(pair, "waits"))
            until(lambda: target._target._asks)
            loop = target._loop
            (link,) = loop._ready
            with target._lock:
                with interrupted_at(number, is_place) as interruption:
                    loop.forget(link)
                if who == "the caller":
                    loop.forget(link)
                    assert ended_whole(loop, link)
            until(lambda: ended_whole(loop, link))  # noqa: B023
            with target._lock:
                assert all(key.data is not link for key in loop._selector.get_map().values())
            with pytest.raises(OmniKVError, match="source rank 0"):
                waiting.result(timeout=SOON_S)
            # And the source is found again.
            put(source, payload_of(pair, "later"), b"later")
            assert take(pair, target, payload_of(pair, "later")) == b"later"
        if not interruption.came:
            assert number > 10
            return
