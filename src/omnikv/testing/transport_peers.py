"""Checks of how ends meet and part: in any order, with several peers, unlike facts, closing, many threads."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from threading import Event

from omnikv.errors import ConfigError, ConnectError, ProducerFailed, TransportError
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
from omnikv.transports.base import Lease, Transport

MANY = 200
THREADS = 4


def either_end_opens_first(pair: TransportPair) -> None:
    """The order in which the ends open does not matter, not even to a get that waits already."""
    payload = payload_of(pair, "r1")
    with pair.open_source(0, (0,), {}) as source:
        put(source, payload, b"source first")
        with pair.open_target(0, (0,), {}) as target:
            require(take(pair, target, payload) == b"source first", "a target must find a source that was there")
    with pair.open_target(0, (0,), {}) as target, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(take, pair, target, payload)
        with pair.open_source(0, (0,), {}) as source:
            put(source, payload, b"target first")
            require(waiting.result() == b"target first", "a waiting get must find a source that opens later")


def every_pair_has_its_own(pair: TransportPair) -> None:
    """Two sources and three targets: each pair exchanges its own payload under the same request."""
    sources, targets = (0, 1), (0, 1, 2)
    with ExitStack() as stack:
        opened = {rank: stack.enter_context(pair.open_source(rank, targets, {})) for rank in sources}
        receivers = {rank: stack.enter_context(pair.open_target(rank, sources, {})) for rank in targets}
        payloads = [payload_of(pair, "r", source=source, target=target) for source in sources for target in targets]
        for payload in payloads:
            put(opened[payload.source_rank], payload, pattern(payload, 3000))
        for payload in reversed(payloads):
            arrived = take(pair, receivers[payload.target_rank], payload) == pattern(payload, 3000)
            require(arrived, f"target {payload.target_rank} must get what source {payload.source_rank} put for it")
        for source in opened.values():
            require(drained(pair, source) == 0, "every source must be empty in the end")


def foreign_payloads_are_misuse(pair: TransportPair) -> None:
    """A payload that is not this end's own is refused before anything happens."""
    with pair.open_source(0, (0,), {}) as source, pair.open_target(0, (0,), {}) as target:
        for what, payload in (
            ("of another source", payload_of(pair, "r", source=1)),
            ("for another target", payload_of(pair, "r", target=1)),
        ):
            raised_by(ConfigError, partial(source.reserve, payload, 1), f"reserving a payload {what}")
            raised_by(ConfigError, partial(target.get, payload, deadline=0.0), f"get {what}")
        own = payload_of(pair, "r")
        raised_by(ConfigError, lambda: target.reserve(own, 1), "reserving at a target")
        raised_by(ConfigError, lambda: source.get(own, deadline=0.0), "get at a source")


def one_end_a_rank(pair: TransportPair) -> None:
    """A rank that is served already is not served twice, and is free after a close."""
    with pair.open_source(0, (0,), {}):
        try:
            second = pair.open_source(0, (0,), {})
        except (ConfigError, TransportError) as error:
            require("source rank 0" in str(error), f"the refusal must name side and rank: {error}")
        else:
            second.close()
            raise AssertionError("opening a rank that is served already must be refused")
    pair.open_source(0, (0,), {}).close()


def unlike_facts_are_refused(pair: TransportPair) -> None:
    """Peers that hold different things for true are told both versions, instead of waiting for nothing."""
    payload = payload_of(pair, "r1")
    alike = {"layers": "32"}
    with (
        pair.open_source(0, (0,), {"source_heads": "0 | 1", **alike}) as source,
        pair.open_target(0, (0,), {"source_heads": "0,1", **alike}) as target,
    ):
        put(source, payload, b"x")
        for _ in range(2):
            error = raised_by(ConnectError, lambda: lease(pair, target, payload), "get from a peer with other facts")
            for text in ("source_heads", "0 | 1", "0,1"):
                require(text in str(error), f"the error must name the fact and both values: {error}")
            require("layers" not in str(error), f"the error must not name facts that are alike: {error}")
    with pair.open_target(0, (0,), alike) as target, pair.open_source(0, (0,), alike) as source:
        put(source, payload, b"x")
        require(take(pair, target, payload) == b"x", "peers with like facts must deal, whatever happened before")


def unlisted_peers_are_refused(pair: TransportPair) -> None:
    """A target that the source does not know of is told, not left to wait."""
    with pair.open_source(0, (0,), {}), pair.open_target(1, (0,), {}) as stranger:
        payload = payload_of(pair, "r1", target=1)
        raised_by(ConnectError, lambda: lease(pair, stranger, payload), "get from a source that does not know us")


def closed_ends_say_so(pair: TransportPair) -> None:
    """A closed end raises, naming itself; closing twice is closing once; a waiting get ends."""
    payload = payload_of(pair, "r1")
    source, target = pair.open_source(0, (0,), {}), pair.open_target(0, (0,), {})
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(target.get, payload, deadline=time.monotonic() + pair.patience_s)
        target.close()
        ended = raised_by(TransportError, waiting.result, "a get that waits while its own end closes")
    source.close()
    source.close()
    target.close()
    errors = [
        raised_by(TransportError, lambda: source.reserve(payload, 1), "reserving at a closed end"),
        raised_by(TransportError, lambda: source.fail(payload, "no"), "failing at a closed end"),
        raised_by(TransportError, lambda: target.get(payload, deadline=0.0), "get at a closed end"),
    ]
    for error in [*errors, ended]:
        require("closed" in str(error) and "rank 0" in str(error), f"the error must say what is closed: {error}")


def late_calls_after_close_do_nothing(pair: TransportPair) -> None:
    """Slots and leases that outlive their end can be ended without harm, and bytes under a lease stay readable."""
    payload, unused = payload_of(pair, "r1"), payload_of(pair, "r2")
    source, target = pair.open_source(0, (0,), {}), pair.open_target(0, (0,), {})
    put(source, payload, b"payload")
    slot, found = source.reserve(unused, 1), lease(pair, target, payload)
    source.close()
    require(bytes(found.buffer) == b"payload", "a leased payload must stay readable after its sender closed")
    target.close()
    require(bytes(found.buffer) == b"payload", "a leased payload must stay readable after its receiver closed")
    raised_by(TransportError, slot.publish, "publishing at a closed end")
    slot.drop()
    found.acknowledge()
    found.release()
    require(source.drain(deadline=0.0) == 0, "a closed source must hold nothing")


def closing_source_wakes(pair: TransportPair) -> None:
    """A get that waits for a source that closes is told at once; whether it waits yet cannot be seen, so try thrice."""
    payload = payload_of(pair, "never")
    with pair.open_target(0, (0,), {}) as target, ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            begun = Event()

            def wait(begun: Event = begun) -> Lease | None:
                begun.set()
                return target.get(payload, deadline=time.monotonic() + pair.patience_s / 10)

            with pair.open_source(0, (0,), {}) as source:
                waiting = pool.submit(wait)
                begun.wait()
                for number in range(20):
                    other = payload_of(pair, f"other-{number}")
                    put(source, other, b"x")
                    take(pair, target, other)
            if isinstance(waiting.exception(), ProducerFailed):
                return
        raise AssertionError("a get that waits for a source that closes must raise ProducerFailed at once")


def closing_target_gives_back(pair: TransportPair) -> None:
    """What a receiver held when it went is found by the next receiver of its rank."""
    payload = payload_of(pair, "r1")
    with pair.open_source(0, (0,), {}) as source:
        put(source, payload, b"payload")
        target = pair.open_target(0, (0,), {})
        lost = lease(pair, target, payload)
        target.close()
        with pair.open_target(0, (0,), {}) as successor:
            found = lease(pair, successor, payload)
            lost.acknowledge()
            require(source.drain(deadline=0.0) == 1, "an acknowledgement of a receiver that went must do nothing")
            found.acknowledge()
            require(drained(pair, source) == 0, "the successor's acknowledgement must count")


def restarted_source_is_found(pair: TransportPair) -> None:
    """A source that opens again is found by a receiver that knew its earlier self, whose payloads are lost."""
    first, second = payload_of(pair, "first"), payload_of(pair, "second")
    with pair.open_target(0, (0,), {}) as target:
        with pair.open_source(0, (0,), {}) as source:
            put(source, first, b"first")
            put(source, second, b"lost")
            require(take(pair, target, first) == b"first", "the first life must be reachable")
        with pair.open_source(0, (0,), {}) as source:
            put(source, second, b"second")
            require(take(pair, target, second) == b"second", "the second life must be reachable, with its own bytes")


def drain_counts(pair: TransportPair) -> None:
    """Drain counts what is published and not acknowledged, and waits for it."""
    with pair.open_source(0, (0,), {}) as source, pair.open_target(0, (0,), {}) as target:
        payloads = [payload_of(pair, f"r{number}") for number in range(3)]
        require(source.drain(deadline=0.0) == 0, "an idle source has nothing to drain")
        for payload in payloads:
            put(source, payload, b"x")
        require(source.drain(deadline=0.0) == 3, "drain must count what is not acknowledged")
        held = lease(pair, target, payloads[0])
        require(source.drain(deadline=time.monotonic() + 0.01) == 3, "a lease must not count as an acknowledgement")
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(drained, pair, source)
            held.acknowledge()
            for payload in payloads[1:]:
                take(pair, target, payload)
            require(waiting.result() == 0, "drain must end when everything is acknowledged")


def threads_share_an_end(pair: TransportPair) -> None:
    """Several threads put and get through the same two ends; every payload arrives once, whole."""
    with ExitStack() as stack:
        source: Transport = stack.enter_context(pair.open_source(0, (0,), {}))
        target: Transport = stack.enter_context(pair.open_target(0, (0,), {}))
        payloads = [payload_of(pair, f"r{number}") for number in range(MANY)]
        putters = stack.enter_context(ThreadPoolExecutor(THREADS))
        getters = stack.enter_context(ThreadPoolExecutor(THREADS))
        got = [getters.submit(take, pair, target, payload) for payload in payloads]
        sent = [putters.submit(put, source, payload, pattern(payload, 4000)) for payload in reversed(payloads)]
        for sending in sent:
            sending.result()
        for payload, getting in zip(payloads, got, strict=True):
            require(getting.result() == pattern(payload, 4000), f"{payload.transfer_id} must arrive whole")
        require(drained(pair, source) == 0, "nothing must be left when all threads are done")


def several_are_given_as_known(pair: TransportPair) -> None:
    """A wait for several gives those that are there, an error for the failed, and nothing for the absent."""
    with (
        pair.open_source(0, (0,), {}) as first,
        pair.open_source(1, (0,), {}) as second,
        pair.open_target(0, (0, 1), {}) as target,
    ):
        ready, failed, absent = (payload_of(pair, name, source=at) for name, at in (("r", 0), ("f", 1), ("a", 1)))
        put(first, ready, b"here")
        second.fail(failed, "lost on the way")
        lease(pair, target, ready).release()
        raised_by(ProducerFailed, lambda: target.get(failed, deadline=time.monotonic() + pair.patience_s), "a get")
        given = dict(target.get_as_ready([absent, failed, ready], deadline=time.monotonic()))
        require(set(given) == {ready, failed}, "what is known of several payloads must be given, and nothing else")
        outcome, error = given[ready], given[failed]
        require(isinstance(error, ProducerFailed), f"a failed payload must come with its error, got {error!r}")
        require(isinstance(outcome, Lease), f"a ready payload must come with its lease, got {outcome!r}")
        assert isinstance(outcome, Lease)
        require(bytes(outcome.buffer) == b"here", "the lease must show the payload's bytes")
        outcome.acknowledge()
        require(drained(pair, first) == 0, "the acknowledged payload must be gone")


PEER_CHECKS = (
    either_end_opens_first,
    every_pair_has_its_own,
    foreign_payloads_are_misuse,
    one_end_a_rank,
    unlike_facts_are_refused,
    unlisted_peers_are_refused,
    closed_ends_say_so,
    late_calls_after_close_do_nothing,
    closing_source_wakes,
    closing_target_gives_back,
    restarted_source_is_found,
    drain_counts,
    threads_share_an_end,
    several_are_given_as_known,
)
