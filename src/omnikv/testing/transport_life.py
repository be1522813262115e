"""Checks of one payload's life: put, got, given back, used up, refused, failed, and the room it takes."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from omnikv.errors import AlreadyConsumed, LocalProtocolError, OmniKVError, ProducerFailed, PutRejected
from omnikv.testing.transport_pair import (
    TransportPair,
    drained,
    lease,
    pattern,
    payload_of,
    put,
    raised_by,
    require,
    take,
)
from omnikv.transports.base import Transport

STRANGE_IDS = ("a/b", "a_b_0_1", "with space", "Grüße-日本-🙂", "x" * 300, "%2F", "..", "a\nb", "'; --", "é")
CYCLES = 1000


def _open(pair: TransportPair, stack: ExitStack) -> tuple[Transport, Transport]:
    source = stack.enter_context(pair.open_source(0, (0,), {}))
    return source, stack.enter_context(pair.open_target(0, (0,), {}))


def put_then_get(pair: TransportPair) -> None:
    """What was put is what is got."""
    with ExitStack() as stack:
        source, target = _open(pair, stack)
        payload = payload_of(pair, "r1")
        data = pattern(payload, 10_000)
        put(source, payload, data)
        require(take(pair, target, payload) == data, "get must give exactly the bytes that were put")


def get_then_put(pair: TransportPair) -> None:
    """A get that waits is woken by the publication, round after round, whichever of the two is first."""
    with ExitStack() as stack:
        source, target = _open(pair, stack)
        pool = stack.enter_context(ThreadPoolExecutor(1))
        for number in range(50):
            payload = payload_of(pair, f"r{number}")
            waiting = pool.submit(take, pair, target, payload)
            put(source, payload, pattern(payload, 100))
            require(waiting.result() == pattern(payload, 100), "a waiting get must be woken with the payload")


def absent_at_the_deadline(pair: TransportPair) -> None:
    """What is not there is waited for until the deadline and no longer, and is None."""
    with ExitStack() as stack:
        source, target = _open(pair, stack)
        payload = payload_of(pair, "r1")
        deadline = time.monotonic() + 0.05
        require(target.get(payload, deadline=deadline) is None, "get of an absent payload must return None")
        require(time.monotonic() >= deadline, "get must not give up before its deadline")
        require(target.get(payload, deadline=0.0) is None, "get must return None when its deadline is over")
        put(source, payload, b"x")
        found = target.get(payload, deadline=0.0)
        if found is None:
            raise AssertionError("get must find what is there, even when its deadline is over")
        found.release()


def reserved_is_not_readable(pair: TransportPair) -> None:
    """Nobody reads a payload before it is published."""
    with ExitStack() as stack:
        source, target = _open(pair, stack)
        payload = payload_of(pair, "r1")
        with source.reserve(payload, 10) as slot:
            require(target.get(payload, deadline=0.0) is None, "a payload must not be readable before publish")
            slot.publish()
        lease(pair, target, payload).release()


def released_is_found_again(pair: TransportPair) -> None:
    """X16: reading does not consume; a payload that is given back is found by the same get."""
    with ExitStack() as stack:
        source, target = _open(pair, stack)
        payload = payload_of(pair, "r1")
        put(source, payload, b"payload")
        for _ in range(3):
            with lease(pair, target, payload) as found:
                require(bytes(found.buffer) == b"payload", "a payload that was given back must be unchanged")
            found.acknowledge()  # After the release this must do nothing.
        require(source.drain(deadline=0.0) == 1, "a payload that was given back must still be held by its sender")
        require(take(pair, target, payload) == b"payload", "a payload that was given back must be found again")


def acknowledged_is_gone(pair: TransportPair) -> None:
    """D28: an acknowledgement ends the payload's life and frees its identity, which may live again; twice is once."""
    with ExitStack() as stack:
        source, target = _open(pair, stack)
        payload = payload_of(pair, "r1")
        for number in range(2):
            data = b"life %d" % number
            put(source, payload, data)
            with lease(pair, target, payload) as found:
                require(bytes(found.buffer) == data, "a second life of an identity must have its own bytes")
                found.acknowledge()
                found.acknowledge()
            found.release()
            require(drained(pair, source) == 0, "an acknowledged payload must leave its sender")
            raised_by(AlreadyConsumed, lambda: lease(pair, target, payload), "get of a payload that was used")


def leased_is_not_leased_twice(pair: TransportPair) -> None:
    """A payload has one holder at a time; the next get waits for it to come back."""
    with ExitStack() as stack:
        source, target = _open(pair, stack)
        payload = payload_of(pair, "r1")
        put(source, payload, b"payload")
        pool = stack.enter_context(ThreadPoolExecutor(1))
        with lease(pair, target, payload):
            require(target.get(payload, deadline=0.0) is None, "a payload that is leased must not be leased again")
            waiting = pool.submit(take, pair, target, payload)
        require(waiting.result() == b"payload", "a get must be woken when the payload is given back")


def live_identity_is_refused(pair: TransportPair) -> None:
    """X07: a second put of a live identity is refused, whatever state the first is in, and changes nothing."""
    with ExitStack() as stack:
        source, target = _open(pair, stack)
        payload = payload_of(pair, "r1")

        def again(state: str) -> None:
            error = raised_by(PutRejected, lambda: source.reserve(payload, 5), f"reserving a {state} payload again")
            require("already live" in str(error), f"the refusal must say that the payload is already live: {error}")

        with source.reserve(payload, 5) as slot:
            again("reserved")
            slot.buffer[:] = b"first"
            slot.publish()
        again("published")
        with lease(pair, target, payload) as found:
            again("leased")
            require(bytes(found.buffer) == b"first", "a refused put must not touch the live payload")
            found.acknowledge()
        require(drained(pair, source) == 0, "the payload must be gone after its acknowledgement")
        put(source, payload, b"later")
        require(take(pair, target, payload) == b"later", "an identity must be free again after its acknowledgement")


def publish_is_once(pair: TransportPair) -> None:
    """Publishing twice, or after dropping, is our own mistake and says so."""
    with ExitStack() as stack:
        source, target = _open(pair, stack)
        payload = payload_of(pair, "r1")
        slot = source.reserve(payload, 1)
        slot.publish()
        raised_by(LocalProtocolError, slot.publish, "publishing twice")
        slot.drop()
        lease(pair, target, payload).acknowledge()
        dropped = source.reserve(payload_of(pair, "r2"), 1)
        dropped.drop()
        dropped.drop()
        raised_by(LocalProtocolError, dropped.publish, "publishing after a drop")


def dropped_room_comes_back(pair: TransportPair) -> None:
    """A slot that is left without publishing gives its room and its identity back."""
    with ExitStack() as stack:
        source, target = _open(pair, stack)
        payload = payload_of(pair, "r1")
        nbytes = pair.pool_nbytes * 3 // 5
        for _ in range(4):
            with source.reserve(payload, nbytes):
                pass
        require(source.drain(deadline=0.0) == 0, "a payload that was never published must not be drained for")
        require(target.get(payload, deadline=0.0) is None, "a payload that was dropped must be absent")


def failure_is_told(pair: TransportPair) -> None:
    """A failure reaches who waits and who asks later, with its cause; sending the payload again takes it back."""
    with ExitStack() as stack:
        source, target = _open(pair, stack)
        payload = payload_of(pair, "r1")
        pool = stack.enter_context(ThreadPoolExecutor(1))
        waiting = pool.submit(lease, pair, target, payload)
        source.fail(payload, "the GPU caught fire")
        source.fail(payload, "the GPU caught fire")
        for call in (waiting.result, lambda: lease(pair, target, payload)):
            error = raised_by(ProducerFailed, call, "get of a failed payload")
            require("the GPU caught fire" in str(error), f"the error must carry the sender's cause: {error}")
        put(source, payload, b"after all")
        require(take(pair, target, payload) == b"after all", "a failed payload must be sendable again")


def failed_room_comes_back(pair: TransportPair) -> None:
    """Failing a published payload withdraws it; failing one that is being written stops its publication."""
    with ExitStack() as stack:
        source, target = _open(pair, stack)
        nbytes = pair.pool_nbytes * 3 // 5
        published, written = payload_of(pair, "published"), payload_of(pair, "written")
        put(source, published, bytes(nbytes))
        source.fail(published, "withdrawn")
        require(source.drain(deadline=0.0) == 0, "a failed payload must not be drained for")
        raised_by(ProducerFailed, lambda: lease(pair, target, published), "get of a withdrawn payload")
        with source.reserve(written, nbytes) as slot:
            source.fail(written, "withdrawn")
            slot.buffer[:] = bytes(nbytes)
            raised_by(LocalProtocolError, slot.publish, "publishing a payload that was failed meanwhile")
        source.reserve(written, nbytes).drop()


def no_room_is_said(pair: TransportPair) -> None:
    """A full pool refuses and says that waiting helps; a payload that can never fit is told so."""
    with ExitStack() as stack:
        source, target = _open(pair, stack)
        first, second = payload_of(pair, "first"), payload_of(pair, "second")
        nbytes = pair.pool_nbytes * 3 // 5
        put(source, first, bytes(nbytes))
        full = raised_by(PutRejected, lambda: source.reserve(second, nbytes), "reserving in a full pool")
        require(full.retryable, "a refusal for want of room now must be retryable")
        never = raised_by(PutRejected, lambda: source.reserve(second, pair.pool_nbytes * 2), "reserving twice the pool")
        require(not never.retryable, "a refusal of what can never fit must not be retryable")
        take(pair, target, first)
        require(drained(pair, source) == 0, "the pool must be empty after the acknowledgement")
        put(source, second, pattern(second, nbytes))
        require(take(pair, target, second) == pattern(second, nbytes), "room must be usable after it came back")


def room_is_never_lost(pair: TransportPair) -> None:
    """A thousand payloads of a tenth of the pool pass through it, in mixed sizes, and leave it as it was."""
    with ExitStack() as stack:
        source, target = _open(pair, stack)
        for number in range(CYCLES):
            payload = payload_of(pair, f"r{number}")
            nbytes = pair.pool_nbytes // 10 - number % 7 * 1000
            with source.reserve(payload, nbytes) as slot:
                slot.publish()
            with lease(pair, target, payload) as found:
                require(len(found.buffer) == nbytes, f"payload {number} must have {nbytes} bytes")
                found.acknowledge()
            require(drained(pair, source) == 0, f"payload {number} must be gone after its acknowledgement")
        with source.reserve(payload_of(pair, "whole"), pair.pool_nbytes * 9 // 10) as slot:
            require(len(slot.buffer) > 0, "the pool must be whole again")


def live_payloads_do_not_overlap(pair: TransportPair) -> None:
    """Payloads that live at the same time never share a byte, while others come and go."""
    with ExitStack() as stack:
        source, target = _open(pair, stack)
        kept = [payload_of(pair, f"kept-{number}") for number in range(8)]
        nbytes = pair.pool_nbytes // 32
        for number, payload in enumerate(kept):
            put(source, payload, pattern(payload, nbytes - number))
            passing = payload_of(pair, f"passing-{number}")
            put(source, passing, b"\xff" * (nbytes // 2))
            take(pair, target, passing)
        leases = [stack.enter_context(lease(pair, target, payload)) for payload in kept]
        for number in range(8):
            put(source, payload_of(pair, f"more-{number}"), b"\xff" * nbytes)
        for number, (payload, found) in enumerate(zip(kept, leases, strict=True)):
            same = bytes(found.buffer) == pattern(payload, nbytes - number)
            require(same, "a leased payload must not change while others are written")


def strange_ids_work(pair: TransportPair) -> None:
    """X08: identities with any character and length are different payloads, all of which arrive."""
    with ExitStack() as stack:
        source, target = _open(pair, stack)
        payloads = [payload_of(pair, text, role=role) for text in STRANGE_IDS for role in ("primary", "cfg/text_1 ü")]
        for payload in payloads:
            put(source, payload, pattern(payload, 500))
        for payload in reversed(payloads):
            arrived = take(pair, target, payload) == pattern(payload, 500)
            require(arrived, f"the payload of {payload.transfer_id!r} must arrive")


def any_size_works(pair: TransportPair) -> None:
    """No byte, one byte, and nearly the whole pool."""
    with ExitStack() as stack:
        source, target = _open(pair, stack)
        for nbytes in (0, 1, 4095, 4097, pair.pool_nbytes * 9 // 10):
            payload = payload_of(pair, f"r{nbytes}")
            put(source, payload, pattern(payload, nbytes))
            whole = take(pair, target, payload) == pattern(payload, nbytes)
            require(whole, f"a payload of {nbytes} bytes must arrive whole")
            require(drained(pair, source) == 0, f"a payload of {nbytes} bytes must leave its sender")
        raised_by(OmniKVError, lambda: source.reserve(payload_of(pair, "r"), -1), "reserving -1 bytes")


LIFE_CHECKS = (
    put_then_get,
    get_then_put,
    absent_at_the_deadline,
    reserved_is_not_readable,
    released_is_found_again,
    acknowledged_is_gone,
    leased_is_not_leased_twice,
    live_identity_is_refused,
    publish_is_once,
    dropped_room_comes_back,
    failure_is_told,
    failed_room_comes_back,
    no_room_is_said,
    room_is_never_lost,
    live_payloads_do_not_overlap,
    strange_ids_work,
    any_size_works,
)
