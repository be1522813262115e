"""Checks of who may read a payload, until when, and what those who wait or ask later are told when that ends."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

from omnikv.core.keys import PayloadId
from omnikv.errors import (
    Aborted,
    AlreadyConsumed,
    Expired,
    LocalProtocolError,
    OmniKVError,
    ProducerFailed,
    PutRejected,
)
from omnikv.testing.transport_pair import (
    TransportPair,
    drained,
    implements,
    lease,
    pattern,
    payload_of,
    put,
    raised_by,
    require,
    take,
)
from omnikv.transports.base import Lease, PutRequest, Transport

TTL_S = 0.1


def _open(pair: TransportPair, stack: ExitStack, *, payload_ttl_s: float = 300.0) -> tuple[Transport, Transport]:
    source = stack.enter_context(pair.open_source(0, (0,), {}, payload_ttl_s=payload_ttl_s))
    return source, stack.enter_context(pair.open_target(0, (0,), {}))


def _wait_long(source: Transport, ttl_s: float = TTL_S) -> int:
    """How many payloads are held after a few times to live; less if all are gone before."""
    return source.drain(deadline=time.monotonic() + 4 * ttl_s)


def _once_met(pair: TransportPair, source: Transport, target: Transport) -> None:
    """Nothing; both ends have heard of each other."""
    hello = payload_of(pair, "hello")
    put(source, hello, b"x")
    take(pair, target, hello)
    require(drained(pair, source) == 0, "a payload must leave its sender after its acknowledgement")


def every_reader_gets_it(pair: TransportPair) -> None:
    """D08: each declared reader reads the payload, its room is freed after the last, a further one is told at once."""
    payload, nbytes = payload_of(pair, "r1"), pair.pool_nbytes * 3 // 5
    with ExitStack() as stack:
        source = stack.enter_context(pair.open_source(0, (0,), {}, num_readers=3))
        readers = [stack.enter_context(pair.open_target(0, (0,), {}, reader=number)) for number in range(4)]
        pool = stack.enter_context(ThreadPoolExecutor(4))
        early = pool.submit(lease, pair, readers[0], payload)
        fourth = pool.submit(lease, pair, readers[3], payload)
        put(source, payload, pattern(payload, nbytes))
        raised_by(AlreadyConsumed, fourth.result, "get of a reader that is not declared")
        held = [early.result(), *(lease(pair, reader, payload) for reader in readers[1:3])]
        for number, one in enumerate(held):
            require(bytes(one.buffer) == pattern(payload, nbytes), f"reader {number} must get the bytes that were put")
        for number in (2, 0):
            held[number].acknowledge()
            error = raised_by(AlreadyConsumed, lambda: lease(pair, readers[number], payload), "a second get")  # noqa: B023
            require(error.consumed, "an error for what was used must say that it is consumed")
        raised_by(PutRejected, lambda: source.reserve(payload_of(pair, "r2"), nbytes), "reserving beside a payload")
        held[1].release()
        require(take(pair, readers[1], payload) == pattern(payload, nbytes), "a reader may come back")
        require(drained(pair, source) == 0, "a payload must leave its sender after its last reader")
        source.reserve(payload_of(pair, "r2"), nbytes).drop()


def a_payload_may_have_fewer_readers(pair: TransportPair) -> None:
    """A payload can be meant for the first of several readers only."""
    payload = payload_of(pair, "r1")
    with ExitStack() as stack:
        source = stack.enter_context(pair.open_source(0, (0,), {}, num_readers=2))
        if not implements(source, "reserve_all"):
            return
        first, second = (stack.enter_context(pair.open_target(0, (0,), {}, reader=number)) for number in range(2))
        (slot,) = source.reserve_all([PutRequest(payload, 1, 1)], deadline=0.0)
        slot.publish()
        raised_by(AlreadyConsumed, lambda: lease(pair, second, payload), "get of a reader that it is not for")
        take(pair, first, payload)
        require(drained(pair, source) == 0, "a payload for one reader must leave after it")


def what_nobody_comes_for_expires(pair: TransportPair) -> None:
    """D09, D22: an idle payload expires, its room comes back, and whoever asks is told at once, with the generation."""
    with ExitStack() as stack:
        source, target = _open(pair, stack, payload_ttl_s=TTL_S)
        if not implements(target, "announce"):
            return
        payload, other, nbytes = payload_of(pair, "r1"), payload_of(pair, "r2"), pair.pool_nbytes * 3 // 5
        put(source, payload, pattern(payload, nbytes))
        require(drained(pair, source) == 0, "a payload that nobody comes for must expire")
        put(source, other, pattern(other, nbytes))
        error = raised_by(Expired, lambda: lease(pair, target, payload), "get of an expired payload")
        require("generation" in str(error), f"the error must name the generation: {error}")
        require(take(pair, target, other) == pattern(other, nbytes), "room of the expired must be usable")
        put(source, payload, b"anew")
        require(take(pair, target, payload) == b"anew", "an expired payload must be sendable again")


def interest_keeps_it(pair: TransportPair) -> None:
    """D09: what is announced, leased or waited for does not expire; after that its time starts anew."""
    with ExitStack() as stack:
        source, target = _open(pair, stack, payload_ttl_s=TTL_S)
        if not implements(target, "announce"):
            return
        _once_met(pair, source, target)
        announced, leased = payload_of(pair, "announced"), payload_of(pair, "leased")
        target.announce([announced, announced])
        target.announce([announced])
        put(source, announced, b"x")
        require(_wait_long(source) == 1, "a payload that a receiver announced must not expire")
        put(source, leased, b"y")
        held = lease(pair, target, leased)
        target.withdraw([announced])
        raised_by(Expired, lambda: _until(Expired, pair, target, announced), "get after the announcement was withdrawn")
        require(_wait_long(source) == 1, "a payload that is leased must not expire")
        require(bytes(held.buffer) == b"y", "a leased payload must stay readable")
        held.release()
        require(drained(pair, source) == 0, "a payload must expire once nobody is interested any more")


def _until(kind: type[Exception], pair: TransportPair, target: Transport, payload: PayloadId) -> None:
    """Asks and gives back at once, rarely enough to let time pass, until the error of `kind` comes."""
    until = time.monotonic() + pair.patience_s
    absent = payload_of(pair, "absent")
    while time.monotonic() < until:
        target.get(absent, deadline=time.monotonic() + 3 * TTL_S)
        with lease(pair, target, payload):
            pass


def announced_before_it_is_there(pair: TransportPair) -> None:
    """D09: an announcement counts although the payload, or its sender, comes later; and ends with the connection."""
    payload = payload_of(pair, "r1")
    target = pair.open_target(0, (0,), {})
    with target:
        if not implements(target, "announce"):
            return
        target.announce([payload])
        with pair.open_source(0, (0,), {}, payload_ttl_s=TTL_S) as source:
            _once_met(pair, source, target)
            put(source, payload, b"x")
            require(_wait_long(source) == 1, "an announcement from before must keep a payload")
            target.close()
            require(drained(pair, source) == 0, "an announcement must end with its connection")


def abort_is_told_and_frees(pair: TransportPair) -> None:
    """D14: an abort frees room at once, and is told to who waits and who asks later; what is leased stays readable."""
    with ExitStack() as stack:
        source, target = _open(pair, stack)
        pool = stack.enter_context(ThreadPoolExecutor(1))
        nbytes = pair.pool_nbytes * 3 // 5
        unread, never, leased = (payload_of(pair, name) for name in ("unread", "never", "leased"))
        waiting = pool.submit(lease, pair, target, never)
        put(source, unread, bytes(nbytes))
        for payload in (unread, never, unread, never):
            source.abort(payload, "the client went away")
        for call in (waiting.result, lambda: lease(pair, target, unread)):
            error = raised_by(Aborted if implements(source, "abort") else ProducerFailed, call, "get after an abort")
            require("the client went away" in str(error), f"the error must carry the cause: {error}")
        put(source, leased, pattern(leased, nbytes))
        with lease(pair, target, leased) as held:
            source.abort(leased, "the client went away")
            raised_by(PutRejected, lambda: source.reserve(never, nbytes), "reserving while an aborted payload is read")
            require(bytes(held.buffer) == pattern(leased, nbytes), "what is read must stay until its reader is done")
        require(drained(pair, source) == 0, "an aborted payload must not be drained for")
        _room_comes_back(pair, source, never, nbytes)


def _room_comes_back(pair: TransportPair, source: Transport, payload: PayloadId, nbytes: int) -> None:
    """Nothing; asks until the source has heard that its reader is done, since it need not wait for that itself."""
    until = time.monotonic() + pair.patience_s
    while True:
        try:
            return source.reserve(payload, nbytes).drop()
        except PutRejected as error:
            require(error.retryable and time.monotonic() < until, f"room must come back from a reader: {error}")
        # No call of a transport that does not wait says when room comes back.
        time.sleep(0.001)


def ends_come_in_any_order(pair: TransportPair) -> None:
    """D23: acknowledging, aborting and failing, twice and in any order, release a payload once and harm nothing."""
    with ExitStack() as stack:
        source, target = _open(pair, stack)
        nbytes = pair.pool_nbytes * 3 // 5
        for number, order in enumerate(itertools.permutations(range(3))):
            payload = payload_of(pair, f"r{number}")
            put(source, payload, bytes(nbytes))
            held = lease(pair, target, payload)
            acts: list[Callable[[], None]] = [
                held.acknowledge,
                lambda payload=payload: source.abort(payload, "gone"),  # type: ignore[misc]
                lambda payload=payload: source.fail(payload, "broken"),  # type: ignore[misc]
            ]
            for act in (*order, *order):
                acts[act]()
            require(drained(pair, source) == 0, "an ended payload must leave its sender")
            _room_comes_back(pair, source, payload_of(pair, "other"), nbytes)


def an_abort_stops_a_writer(pair: TransportPair) -> None:
    """D23: an abort while the payload is written frees its room when the writer is done, and then the identity."""
    with ExitStack() as stack:
        source, target = _open(pair, stack)
        payload = payload_of(pair, "r1")
        with source.reserve(payload, 10) as slot:
            source.abort(payload, "gone")
            slot.buffer[:] = bytes(10)
            raised_by(LocalProtocolError, slot.publish, "publishing what was aborted meanwhile")
        put(source, payload, b"anew")
        require(take(pair, target, payload) == b"anew", "an aborted identity must be usable again")


def withdrawing_ends_a_wait(pair: TransportPair) -> None:
    """D26: a receiver that does not want a payload any more is woken, and nothing of it stays behind."""
    with ExitStack() as stack:
        source, target = _open(pair, stack)
        if not implements(target, "withdraw"):
            return
        pool = stack.enter_context(ThreadPoolExecutor(1))
        payload = payload_of(pair, "r1")
        for _ in range(3):
            waiting: Future[Lease] = pool.submit(lease, pair, target, payload)
            until = time.monotonic() + pair.patience_s
            while not waiting.done() and time.monotonic() < until:
                # Whether it waits yet cannot be seen, so until it was heard.
                target.withdraw([payload])
                source.drain(deadline=time.monotonic() + 0.001)
            raised_by(Aborted, waiting.result, "a get of what was withdrawn here")
        put(source, payload, b"x")
        require(take(pair, target, payload) == b"x", "a withdrawn payload must be received when asked for again")


def what_is_told_ahead_is_no_payload(pair: TransportPair) -> None:
    """How a payload will begin, and where it is likely to come, may be told before, and is never taken for it."""
    first, second = payload_of(pair, "r1"), payload_of(pair, "r2")

    def wait_for(target: Transport, payload: PayloadId) -> Lease:
        deadline = time.monotonic() + pair.patience_s
        [(_, outcome)] = target.get_as_ready([payload], deadline=deadline, preview=lambda *seen: None)
        if isinstance(outcome, OmniKVError):
            raise outcome
        return outcome

    with ExitStack() as stack:
        source, target = _open(pair, stack)
        _once_met(pair, source, target)
        pool = stack.enter_context(ThreadPoolExecutor(1))
        # The second of the same size is likely to come where the first was.
        for payload, content in ((first, b"written"), (second, b"another")):
            waiting = pool.submit(wait_for, target, payload)
            [slot] = source.reserve_all([PutRequest(payload, len(content), head=content[:4])], deadline=0.0)
            with slot:
                absent = target.get(payload, deadline=time.monotonic())
                require(absent is None, "what is only being written must not be there")
                slot.buffer[:] = content
                slot.publish()
            with waiting.result() as held:
                require(bytes(held.buffer) == content, "a payload must be what was written, whatever was told before")
                held.acknowledge()
            require(drained(pair, source) == 0, "a payload must leave its sender after its acknowledgement")


NOTICE_CHECKS = (
    what_is_told_ahead_is_no_payload,
    every_reader_gets_it,
    a_payload_may_have_fewer_readers,
    what_nobody_comes_for_expires,
    interest_keeps_it,
    announced_before_it_is_there,
    abort_is_told_and_frees,
    ends_come_in_any_order,
    an_abort_stops_a_writer,
    withdrawing_ends_a_wait,
)
