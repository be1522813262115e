"""Checks of a sender's memory limit: whole requests or nothing, in turn, within a deadline; and of dead senders."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

from omnikv.core.keys import PayloadId
from omnikv.errors import ProducerFailed, PutRejected, TransportError
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
from omnikv.transports.base import PutRequest, Slot, Transport


def _wanted(pair: TransportPair, name: str, nbytes: int, parts: int = 1) -> list[PutRequest]:
    return [PutRequest(payload_of(pair, name, role=f"part-{part}"), nbytes // parts) for part in range(parts)]


def _soon(pair: TransportPair) -> float:
    return time.monotonic() + pair.patience_s


def a_request_is_let_in_whole_or_not_at_all(pair: TransportPair) -> None:
    """D31: a request whose payloads do not all fit takes no room; one that never can is refused for good, at once."""
    with pair.open_source(0, (0,), {}) as source, pair.open_target(0, (0,), {}) as target:
        nbytes = pair.pool_nbytes * 9 // 10
        never = [PutRequest(payload_of(pair, f"r{number}"), nbytes) for number in range(3)]
        if implements(source, "reserve_all"):
            error = raised_by(
                PutRejected, lambda: source.reserve_all(never, deadline=_soon(pair)), "a request too large"
            )
            require(not error.retryable, "a request that can never fit must not be retryable")
        kept = payload_of(pair, "kept")
        put(source, kept, bytes(nbytes // 2))
        now = raised_by(PutRejected, lambda: source.reserve_all(_wanted(pair, "r", nbytes, 2), deadline=0.0), "no room")
        require(now.retryable, "a request that does not fit now must be retryable")
        take(pair, target, kept)
        require(drained(pair, source) == 0, "the pool must be empty after the acknowledgement")
        for _ in range(3):
            slots = source.reserve_all(_wanted(pair, "r", nbytes, 5), deadline=_soon(pair))
            require([len(slot.buffer) for slot in slots] == [nbytes // 5] * 5, "every payload must get its room")
            _drop_all(slots)
        require(source.reserve_all([], deadline=0.0) == [], "a request of nothing gets nothing")


def room_is_waited_for_in_turn(pair: TransportPair) -> None:
    """D31: requests wait for room within their deadline, first come first served; none overtakes, none polls."""
    with ExitStack() as stack:
        source = stack.enter_context(pair.open_source(0, (0,), {}))
        if not implements(source, "reserve_all"):
            return
        target = stack.enter_context(pair.open_target(0, (0,), {}))
        pool = stack.enter_context(ThreadPoolExecutor(2))
        nbytes = pair.pool_nbytes * 3 // 5
        first = payload_of(pair, "first")
        put(source, first, bytes(nbytes))
        late = raised_by(
            PutRejected,
            lambda: source.reserve_all(_wanted(pair, "late", nbytes), deadline=time.monotonic() + 0.02),
            "waiting for room that does not come",
        )
        require(late.retryable, "a refusal by the deadline must be retryable")
        large = pool.submit(source.reserve_all, _wanted(pair, "large", nbytes, 3), deadline=_soon(pair))
        _until_in_turn(pair, source, large)
        take(pair, target, first)
        slots = large.result()
        for slot in slots:
            slot.publish()
        for part in range(3):
            take(pair, target, payload_of(pair, "large", role=f"part-{part}"))
        require(drained(pair, source) == 0, "the pool must be empty in the end")
        put(source, payload_of(pair, "small"), b"x")


def _until_in_turn(pair: TransportPair, source: Transport, large: Future[list[Slot]]) -> None:
    """Nothing, once a small request is refused because a large one waits."""
    until = _soon(pair)
    while time.monotonic() < until:
        require(not large.done(), "a request must wait while there is no room for it")
        try:
            source.reserve(payload_of(pair, "small"), 1).drop()
        except PutRejected as error:
            require(error.retryable, "a refusal for those that wait must be retryable")
            return
    raise AssertionError("a small request must not overtake one that waits for room")


def closing_ends_waiting_for_room(pair: TransportPair) -> None:
    """Whoever waits for room is told when the sender closes."""
    with ThreadPoolExecutor(1) as pool, pair.open_source(0, (0,), {}) as source:
        if not implements(source, "reserve_all"):
            return
        nbytes = pair.pool_nbytes * 3 // 5
        put(source, payload_of(pair, "first"), bytes(nbytes))
        waiting = pool.submit(source.reserve_all, _wanted(pair, "second", nbytes), deadline=_soon(pair))
        _until_in_turn(pair, source, waiting)
        source.close()
        error = raised_by(TransportError, waiting.result, "waiting for room at a sender that closes")
        require("closed" in str(error) or isinstance(error, PutRejected), f"the error must say what is closed: {error}")


def expiry_makes_room(pair: TransportPair) -> None:
    """What expires makes room for who waits, although nobody calls."""
    with pair.open_source(0, (0,), {}, payload_ttl_s=0.05) as source, pair.open_target(0, (0,), {}) as target:
        if not implements(target, "announce"):
            return
        nbytes = pair.pool_nbytes * 3 // 5
        put(source, payload_of(pair, "first"), bytes(nbytes))
        _drop_all(source.reserve_all(_wanted(pair, "second", nbytes), deadline=_soon(pair)))


def a_dead_source_is_not_waited_for(pair: TransportPair) -> None:
    """D10: a source that was met and has gone is given up soon by who asks later, until it is back, and then found."""
    payload = payload_of(pair, "r1")
    with pair.open_target(0, (0,), {}) as target:
        for number in range(2):
            with pair.open_source(0, (0,), {}) as source:
                data = pattern(payload, 100 + number)
                put(source, payload, data)
                require(take(pair, target, payload) == data, "a source that is back must be found at once")
            if not target.capabilities.notices_peer_death:
                return
            error = raised_by(ProducerFailed, lambda: lease(pair, target, payload), "get from a source that has gone")
            require("source rank 0" in str(error), f"the error must name the source: {error}")
            again = raised_by(ProducerFailed, lambda: lease(pair, target, payload), "a second get from it")
            require("has not come back" in str(again), f"the error must say that it has not come back: {again}")


def the_census_counts(pair: TransportPair) -> None:
    """D14: a source says how many payloads stand where, and how lives ended."""
    with pair.open_source(0, (0,), {}) as source, pair.open_target(0, (0,), {}) as target:
        if not implements(source, "census"):
            return
        names = ("released", "aborted", "failed", "ready", "leased")
        payloads = {name: payload_of(pair, name) for name in names}
        for payload in payloads.values():
            put(source, payload, b"x")
        take(pair, target, payloads["released"])
        source.abort(payloads["aborted"], "gone")
        source.fail(payloads["failed"], "broken")
        with source.reserve(payload_of(pair, "announced"), 1), lease(pair, target, payloads["leased"]):
            expected = {"announced": 1, "ready": 2, "leased": 1, "released": 1, "expired": 0, "failed": 1, "aborted": 1}
            until = _soon(pair)
            while source.census() != expected and time.monotonic() < until:
                source.drain(deadline=time.monotonic() + 0.001)
            require(source.census() == expected, f"the census must be {expected}, got {source.census()}")


def free_once_nobody_writes_or_reads(pair: TransportPair) -> None:
    """What a payload was made of may be reused once it has ended and nobody writes or reads it, and never sooner."""
    payload, failed, aborted = (payload_of(pair, name) for name in ("r1", "failed", "aborted"))
    with ExitStack() as stack:
        source = stack.enter_context(pair.open_source(0, (0,), {}, num_readers=2))
        readers = [stack.enter_context(pair.open_target(0, (0,), {}, reader=number)) for number in range(2)]

        def is_free(*payloads: PayloadId, patience_s: float = 0.0) -> bool:
            return source.wait_until_free(payloads, deadline=time.monotonic() + patience_s)

        require(is_free(payload), "a payload that was never sent must be free")
        with source.reserve(payload, 7) as slot:
            # A transport that waits for all payloads alike knows of published ones only.
            if implements(source, "wait_until_free"):
                require(not is_free(payload), "a payload that is being written must not be free")
            slot.buffer[:] = b"payload"
            slot.publish()
        for number, reader in enumerate(readers):
            require(not is_free(payload), f"a payload must not be free before reader {number} has it")
            with lease(pair, reader, payload) as found:
                require(not is_free(payload), f"a payload that reader {number} reads must not be free")
                found.acknowledge()
        require(is_free(payload, patience_s=pair.patience_s), "a payload must be free after its last reader")
        put(source, failed, b"x")
        put(source, aborted, b"x")
        source.fail(failed, "withdrawn")
        require(not is_free(failed, aborted), "payloads must not be free while one of them lives")
        source.abort(aborted, "gone")
        ended = is_free(failed, aborted, patience_s=pair.patience_s)
        require(ended, "payloads that failed or were aborted, and that nobody reads, must be free")


def what_expired_is_free(pair: TransportPair) -> None:
    """Whoever waits until a payload is free is woken when it expires, although nobody calls."""
    with pair.open_source(0, (0,), {}, payload_ttl_s=0.05) as source, pair.open_target(0, (0,), {}) as target:
        if not implements(target, "announce"):
            return
        payload = payload_of(pair, "r1")
        put(source, payload, b"x")
        require(source.wait_until_free([payload], deadline=_soon(pair)), "an expired payload must be free")


def _drop_all(slots: list[Slot]) -> None:
    for slot in slots:
        slot.drop()


LIMIT_CHECKS = (
    a_request_is_let_in_whole_or_not_at_all,
    room_is_waited_for_in_turn,
    closing_ends_waiting_for_room,
    expiry_makes_room,
    a_dead_source_is_not_waited_for,
    the_census_counts,
    free_once_nobody_writes_or_reads,
    what_expired_is_free,
)
