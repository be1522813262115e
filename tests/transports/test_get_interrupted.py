"""A get of the in-process transport that Ctrl-C ends, wherever it comes, keeps no lease and waits for nothing."""

import contextlib
import itertools
import time
from pathlib import Path

from interruptions import interrupted_at

from omnikv.testing.conformance import NamedPair
from omnikv.testing.transport_pair import drained, payload_of, put, take
from omnikv.transports import memory_target
from omnikv.transports.memory_target import MemoryTarget

SOON_S = 30.0
PLACE = Path(memory_target.__file__).name


def is_place(frame, event):
    """Calls of the module's own functions, and of others by them, but for what is handed on and when it is taken."""
    if frame.f_code is MemoryTarget.get_as_ready.__code__ and not event.startswith("c_"):
        return False
    callers = [frame] if event.startswith("c_") else [frame, frame.f_back]
    return any(one is not None and Path(one.f_code.co_filename).name == PLACE for one in callers)


def interrupted_gets(act):
    """Calls `act(number, source, target, pair)` with a pair of its own each, until no interruption comes any more."""
    for number in itertools.count(1):
        pair = NamedPair(transport="memory", patience_s=SOON_S)
        with (
            pair.open_source(0, (0,), {}, payload_ttl_s=0.02) as source,
            pair.open_target(0, (0,), {}) as target,
        ):
            if not act(number, source, target, pair):
                assert number > 20
                return
            assert not target._target._waits
            assert source.census()["leased"] == 0
            # What anybody still waited for, or had leased, would not expire.
            assert drained(pair, source) == 0
            lives = [record.life for record in source._source._ledger._records.values()]
            assert not any(life.interest for life in lives)
            later = payload_of(pair, "later")
            put(source, later, b"later")
            assert take(pair, target, later) == b"later"


def test_a_get_that_finds_a_payload_gives_it_back_wherever_it_is_interrupted():
    def get(number, source, target, pair):
        payload = payload_of(pair, "r1")
        put(source, payload, b"payload")
        held = []
        outcomes = target.get_as_ready([payload], deadline=time.monotonic() + SOON_S)
        with interrupted_at(number, is_place) as interruption, contextlib.closing(outcomes):
            held.extend(lease for _, lease in outcomes)
        for lease in held:
            lease.release()
        return interruption.came

    interrupted_gets(get)


def test_a_get_that_gives_up_asks_no_longer_wherever_it_is_interrupted():
    def get(number, source, target, pair):
        absent = [payload_of(pair, f"r{at}") for at in range(2)]
        with interrupted_at(number, is_place) as interruption:
            assert list(target.get_as_ready(absent, deadline=time.monotonic() + 0.001)) == []
        for payload in absent:
            put(source, payload, b"nobody comes for it")
        return interruption.came

    interrupted_gets(get)
