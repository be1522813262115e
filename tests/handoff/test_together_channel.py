"""Receives in lockstep over a channel: requests in any order at once, and one that is slow holds up no other."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
from stages import assert_same, full_cache, part, send_everywhere, stages

from omnikv import Route
from omnikv.config import HandoffConfig
from omnikv.errors import ConfigError, VerdictInDoubt
from omnikv.groups.channel import Channel
from omnikv.groups.threads import ThreadGroup

QUICK = HandoffConfig(slice_s=0.05, vote_timeout_s=5.0)


@contextmanager
def channels(size):
    """The channels of a group whose ranks are threads."""
    with ExitStack() as stack, ThreadPoolExecutor(size) as pool:
        deadline = time.monotonic() + 30
        formed = pool.map(lambda group: Channel.form(group, deadline=deadline), ThreadGroup.create(size))
        yield [stack.enter_context(channel) for channel in formed]


def test_ranks_may_receive_many_requests_at_once_and_each_in_its_own_order(transport, namespace):
    route = Route.tp("a", "b", num_kv_heads=2, from_tp=2, to_tp=2, namespace=namespace)
    caches = {f"r{number}": full_cache(num_tokens=number + 1, num_heads=2) for number in range(12)}
    with channels(2) as seats, stages(route, transport, groups=seats, config=QUICK) as (senders, receivers):

        def receive(job):
            receiver, request_id = job
            outcome = receiver.receive_together(request_id, timeout_s=60)
            assert_same(outcome.require().layers, part(caches[request_id], [receiver.rank]))
            outcome.close()
            return outcome.verdict

        jobs = [(receiver, request_id) for receiver in receivers for request_id in caches]
        random.Random(0).shuffle(jobs)
        # Every rank's receives must all be under way, or ranks could wait for each other's turn in the pool.
        with ThreadPoolExecutor(len(jobs)) as pool:
            verdicts = pool.map(receive, jobs)
            for request_id, layers in reversed(caches.items()):
                send_everywhere(senders, layers, request_id)
            assert set(verdicts) == {"keep"}
        assert [sender.drain(timeout_s=10) for sender in senders] == [0, 0]


def test_d37_a_request_that_waits_holds_up_no_other(transport, namespace):
    route = Route.tp("a", "b", num_kv_heads=2, from_tp=2, to_tp=2, namespace=namespace)
    with (
        channels(2) as seats,
        stages(route, transport, groups=seats, config=QUICK) as (senders, receivers),
        ThreadPoolExecutor(2) as waiting,
        ThreadPoolExecutor(2) as pool,
    ):
        send_everywhere(senders[:1], full_cache(num_heads=2), "slow")
        slow = [waiting.submit(receiver.receive_together, "slow", timeout_s=300) for receiver in receivers]
        for number in range(5):
            send_everywhere(senders, full_cache(num_heads=2), f"r{number}")
            for outcome in pool.map(lambda rank, n=number: rank.receive_together(f"r{n}", timeout_s=60), receivers):
                assert outcome.verdict == "keep"
                outcome.close()
        assert not any(job.done() for job in slow)
        send_everywhere(senders[1:], full_cache(num_heads=2), "slow")
        for job in slow:
            job.result(timeout=60).close()


def test_a_leader_that_is_gone_leaves_its_followers_in_doubt_and_nothing_consumed(transport, namespace):
    route = Route.tp("a", "b", num_kv_heads=2, from_tp=1, to_tp=2, namespace=namespace)
    with channels(2) as seats, stages(route, transport, groups=seats, config=QUICK) as ([sender], receivers):
        sender.send("req", full_cache(num_heads=2))
        seats[0].close()
        with pytest.raises(VerdictInDoubt):
            receivers[1].receive_together("req", timeout_s=300)
        receivers[1].receive("req", timeout_s=10).close()


def test_d01_a_follower_that_is_gone_drops_the_request_at_once(transport, namespace):
    route = Route.tp("a", "b", num_kv_heads=2, from_tp=1, to_tp=2, namespace=namespace)
    with channels(2) as seats, stages(route, transport, groups=seats, config=QUICK) as ([sender], receivers):
        sender.send("req", full_cache(num_heads=2))
        seats[1].close()
        outcome = receivers[0].receive_together("req", timeout_s=300)
        assert outcome.verdict == "drop"
        assert outcome.cause_of(1).startswith("rank 1: gone")


def test_ranks_that_are_configured_differently_hear_it_when_the_channel_forms():
    settings = [HandoffConfig(receive_timeout_s=30.0), HandoffConfig(receive_timeout_s=10.0)]
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(Channel.form, group, facts=config.facts(), deadline=time.monotonic() + 30)
            for group, config in zip(ThreadGroup.create(2), settings, strict=True)
        ]
        for job in jobs:
            with pytest.raises(ConfigError, match=r"receive_timeout_s: 30.0 on rank 0, 10.0 on rank 1"):
                job.result(timeout=60)
