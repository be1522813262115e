"""Ranks in lockstep: all keep the same roles of a request or all drop it, and what is late is fetched again."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from stages import assert_same, full_cache, one_to_one, part, send_everywhere, stages

from omnikv import KVReceiver, KVSender, Route
from omnikv.config import HandoffConfig
from omnikv.errors import ConfigError, Dropped, ProducerFailed, RemoteProtocolError, VerdictInDoubt
from omnikv.groups.threads import ThreadGroup

# Short slices, so that a test of several rounds does not wait for seconds.
QUICK = HandoffConfig(slice_s=0.05)
# A slice that ends for want of waiting only, however busy the machine: all that comes, comes in one round.
PATIENT = HandoffConfig(slice_s=60.0)


def receive_together(receivers, request_id="req", timeout_s=10.0):
    with ThreadPoolExecutor(len(receivers)) as pool:
        return list(pool.map(lambda receiver: receiver.receive_together(request_id, timeout_s=timeout_s), receivers))


def test_a_group_that_has_everything_keeps_it(transport, namespace):
    layers = full_cache()
    route = Route.tp("a", "b", num_kv_heads=3, from_tp=1, to_tp=3, namespace=namespace)
    with stages(route, transport, groups=ThreadGroup.create(3)) as (senders, receivers):
        send_everywhere(senders, layers)
        for rank, outcome in enumerate(receive_together(receivers)):
            assert outcome.verdict == "keep"
            with outcome.require() as kv:
                assert_same(kv.layers, part(layers, [rank]))
        assert senders[0].drain(timeout_s=10) == 0


def test_d01_one_ranks_miss_drops_the_request_on_every_rank_and_the_next_one_works(transport, namespace):
    layers = full_cache()
    route = Route.tp("a", "b", num_kv_heads=2, from_tp=2, to_tp=2, namespace=namespace)
    with stages(route, transport, groups=ThreadGroup.create(2)) as (senders, receivers):
        senders[0].send("req", part(layers, [0]))
        outcomes = receive_together(receivers, timeout_s=0.2)
        assert [outcome.verdict for outcome in outcomes] == ["drop", "drop"]
        assert outcomes[0].causes == outcomes[1].causes
        assert "rank 1 lacks primary: nothing from source rank 1" in outcomes[0].cause_of(1)
        for outcome in outcomes:
            with pytest.raises(Dropped, match="dropped by every rank: rank 1 lacks primary: nothing"):
                outcome.require()
        senders[1].send("req", part(layers, [1]))
        retried = receive_together(receivers)
        assert [outcome.verdict for outcome in retried] == ["keep", "keep"]
        for outcome in retried:
            outcome.require().close()


def test_a_drop_can_be_made_final(transport, namespace):
    layers = full_cache()
    route = Route.tp("a", "b", num_kv_heads=2, from_tp=2, to_tp=2, namespace=namespace)
    with stages(route, transport, groups=ThreadGroup.create(2)) as (senders, receivers):
        senders[0].send("req", part(layers, [0]))
        senders[1].fail("req", "lost")
        assert [outcome.verdict for outcome in receive_together(receivers)] == ["drop", "drop"]
        assert [receiver.discard("req") for receiver in receivers] == [1, 0]
        assert [sender.drain(timeout_s=10) for sender in senders] == [0, 0]


def test_x12_ranks_that_hold_different_tokens_do_not_agree(transport, namespace):
    route = Route.tp("a", "b", num_kv_heads=2, from_tp=2, to_tp=2, namespace=namespace)
    with stages(route, transport, groups=ThreadGroup.create(2)) as (senders, receivers):
        for sender, tokens in zip(senders, (3, 99), strict=True):
            sender.send("req", full_cache(num_tokens=tokens, num_heads=1))
        outcomes = receive_together(receivers)
        assert [outcome.verdict for outcome in outcomes] == ["drop", "drop"]
        assert "99" in str(outcomes[0].causes)
        assert "3" in str(outcomes[0].causes)


def test_an_error_that_nobody_foresaw_is_a_vote_too(namespace, monkeypatch):
    layers = full_cache()
    route = Route.tp("a", "b", num_kv_heads=2, from_tp=2, to_tp=2, namespace=namespace)
    with stages(route, "memory", groups=ThreadGroup.create(2)) as (senders, receivers):
        send_everywhere(senders, layers)

        def out_of_memory(*_args, **_keywords):
            raise MemoryError("no room on the device")

        monkeypatch.setattr(receivers[1]._transport, "get_as_ready", out_of_memory)
        outcomes = receive_together(receivers)
        assert [outcome.verdict for outcome in outcomes] == ["drop", "drop"]
        assert outcomes[0].cause_of(1) == "rank 1 lacks primary: MemoryError: no room on the device"


def test_a_rank_whose_peer_never_votes_is_in_doubt_and_keeps_nothing(namespace):
    route = Route.tp("a", "b", num_kv_heads=2, from_tp=1, to_tp=2, namespace=namespace)
    config = HandoffConfig(transport="memory", vote_timeout_s=0.1)
    groups = ThreadGroup.create(2)
    with KVSender(route, 0, config=config) as sender, KVReceiver(route, 0, group=groups[0], config=config) as receiver:
        sender.send("req", full_cache(num_heads=2))
        with pytest.raises(VerdictInDoubt):
            receiver.receive_together("req", timeout_s=0.1)
        receiver.receive("req", timeout_s=10).close()


def test_receiving_together_needs_a_group(namespace):
    with stages(one_to_one(namespace), "memory") as (_, [receiver]), pytest.raises(ConfigError, match="pass group="):
        receiver.receive_together("req")


# --- rounds: what is late is fetched again, and only that ---------------------------------------------------------


def test_a_late_part_is_fetched_in_a_later_round_and_only_it_moves(transport, namespace):
    layers = full_cache()
    route = Route.tp("a", "b", num_kv_heads=3, from_tp=3, to_tp=1, namespace=namespace)
    with stages(route, transport, groups=ThreadGroup.create(1), config=QUICK) as (senders, [receiver]):
        send_everywhere(senders[:2], layers)
        taken = count_gets(receiver)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(receiver.receive_together, "req", timeout_s=60)
            wait_for_rounds(taken, source_rank=2, at_least=2)
            send_everywhere(senders[2:], layers)
            outcome = waiting.result(timeout=60)
        assert outcome.verdict == "keep"
        assert outcome.rounds >= 2
        assert_same(outcome.require().layers, layers)
        assert (taken.count(0), taken.count(1)) == (1, 1), "what had arrived was fetched again"
        outcome.close()
        assert [sender.drain(timeout_s=10) for sender in senders] == [0, 0, 0]


def test_a_late_companion_is_fetched_in_a_later_round_on_every_rank_that_lacks_it(transport, namespace):
    layers, text = full_cache(), full_cache(num_tokens=7)
    route = Route.tp("a", "b", num_kv_heads=3, from_tp=3, to_tp=3, namespace=namespace)
    with stages(route, transport, groups=ThreadGroup.create(3), config=QUICK) as (senders, receivers):
        send_everywhere(senders, layers)
        send_everywhere(senders[:2], text, role="cfg_text")
        taken = count_gets(receivers[2])
        with ThreadPoolExecutor(3) as pool:
            jobs = [
                pool.submit(receiver.receive_together, "req", timeout_s=60, required=["primary", "cfg_text"])
                for receiver in receivers
            ]
            wait_for_rounds(taken, source_rank=2, at_least=3)
            send_everywhere(senders[2:], text, role="cfg_text")
            outcomes = [job.result(timeout=60) for job in jobs]
        for rank, outcome in enumerate(outcomes):
            assert outcome.verdict == "keep"
            assert_same(outcome.require().layers, part(layers, [rank]))
            assert_same(outcome.roles["cfg_text"].layers, part(text, [rank]))
            outcome.close()
        assert [sender.drain(timeout_s=10) for sender in senders] == [0, 0, 0]


def test_d10_a_failure_on_one_rank_is_known_on_all_long_before_the_deadline(transport, namespace):
    route = Route.tp("a", "b", num_kv_heads=2, from_tp=2, to_tp=2, namespace=namespace)
    with stages(route, transport, groups=ThreadGroup.create(2), config=QUICK) as (senders, receivers):
        senders[1].fail("req", "prefill ran out of memory")
        outcomes = receive_together(receivers, timeout_s=3600)
        assert [outcome.verdict for outcome in outcomes] == ["drop", "drop"]
        assert "prefill ran out of memory" in outcomes[0].cause_of(1)


def test_d10_a_failure_of_one_sender_is_known_while_another_is_waited_for(transport, namespace):
    route = Route.tp("a", "b", num_kv_heads=2, from_tp=2, to_tp=1, namespace=namespace)
    with stages(route, transport) as (senders, [receiver]), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(receiver.receive, "req", timeout_s=3600)
        senders[1].fail("req", "evicted")
        with pytest.raises(ProducerFailed, match="evicted"):
            waiting.result(timeout=60)
        send_everywhere(senders[:1], full_cache(num_heads=2))
        assert receiver.discard("req") == 1


# --- roles --------------------------------------------------------------------------------------------------------


def receive_roles(receivers, **keywords):
    with ThreadPoolExecutor(len(receivers)) as pool:
        return list(pool.map(lambda receiver: receiver.receive_together("req", **keywords), receivers))


def test_d02_an_optional_companion_that_one_rank_lacks_is_left_out_on_all(transport, namespace):
    layers = full_cache(num_heads=2)
    route = Route.tp("a", "b", num_kv_heads=2, from_tp=2, to_tp=2, namespace=namespace)
    with stages(route, transport, groups=ThreadGroup.create(2), config=QUICK) as (senders, receivers):
        send_everywhere(senders, layers)
        send_everywhere(senders[:1], layers, role="cfg_text")
        senders[1].fail("req", "evicted", role="cfg_text")
        for outcome in receive_roles(receivers, timeout_s=20, optional=["cfg_text"]):
            assert (outcome.verdict, sorted(outcome.roles), outcome.left_out) == ("keep", ["primary"], ("cfg_text",))
            assert outcome.cause_of(1).startswith("rank 1 lacks cfg_text: ProducerFailed")
            outcome.close()
        # What one rank held of the role that was left out went back to its sender.
        assert [receiver.discard("req", role="cfg_text") for receiver in receivers] == [1, 0]
        assert [sender.drain(timeout_s=10) for sender in senders] == [0, 0]


def test_d05_an_optional_companion_that_its_senders_call_off_is_not_waited_for(transport, namespace):
    layers = full_cache(num_heads=2)
    route = Route.tp("a", "b", num_kv_heads=2, from_tp=2, to_tp=2, namespace=namespace)
    with stages(route, transport, groups=ThreadGroup.create(2), config=PATIENT) as (senders, receivers):
        send_everywhere(senders, layers)
        for sender in senders:
            sender.fail("req", "this request has no image branch", role="cfg_img")
        for outcome in receive_roles(receivers, timeout_s=3600, optional=["cfg_img"]):
            assert (outcome.verdict, outcome.left_out, outcome.rounds) == ("keep", ("cfg_img",), 1)
            assert "this request has no image branch" in outcome.cause_of(0)
            outcome.close()


def test_an_optional_companion_that_nobody_has_at_the_deadline_is_left_out(namespace):
    route = Route.tp("a", "b", num_kv_heads=2, from_tp=2, to_tp=2, namespace=namespace)
    with stages(route, "memory", groups=ThreadGroup.create(2), config=QUICK) as (senders, receivers):
        send_everywhere(senders, full_cache(num_heads=2))
        for outcome in receive_roles(receivers, timeout_s=0.2, optional=["cfg_img"]):
            assert (outcome.verdict, outcome.left_out) == ("keep", ("cfg_img",))
            outcome.close()


def test_d06_a_required_companion_that_never_comes_drops_the_request(transport, namespace):
    route = Route.tp("a", "b", num_kv_heads=2, from_tp=2, to_tp=2, namespace=namespace)
    with stages(route, transport, groups=ThreadGroup.create(2), config=QUICK) as (senders, receivers):
        send_everywhere(senders, full_cache(num_heads=2))
        outcomes = receive_roles(receivers, timeout_s=0.3, required=["primary", "cfg_text"])
        assert [outcome.verdict for outcome in outcomes] == ["drop", "drop"]
        assert [outcome.roles for outcome in outcomes] == [{}, {}]
        assert outcomes[0].cause_of(0).startswith("rank 0 lacks cfg_text: nothing from source rank 0")


@pytest.mark.parametrize("roles", [{"required": ["primary", "primary"]}, {"optional": ["primary"]}, {"required": []}])
def test_a_role_is_named_once_and_there_is_at_least_one(namespace, roles):
    with (
        stages(one_to_one(namespace), "memory", groups=ThreadGroup.create(1)) as (_, [receiver]),
        pytest.raises(ConfigError, match="name each role once and at least one"),
    ):
        receiver.receive_together("req", **roles)


# --- misuse that every rank hears of ------------------------------------------------------------------------------


def test_ranks_that_receive_different_requests_hear_it_on_every_rank(namespace):
    route = Route.tp("a", "b", num_kv_heads=2, from_tp=2, to_tp=2, namespace=namespace)
    with (
        stages(route, "memory", groups=ThreadGroup.create(2), config=QUICK) as (_, receivers),
        ThreadPoolExecutor(2) as pool,
    ):
        for job in [
            pool.submit(receiver.receive_together, f"req-{rank}", timeout_s=0.1)
            for rank, receiver in enumerate(receivers)
        ]:
            with pytest.raises(RemoteProtocolError, match=r"same request: 'req-0/0' on rank 0, 'req-1/0' on"):
                job.result(timeout=60)


def test_ranks_that_are_configured_differently_hear_it_on_every_rank(namespace):
    route = Route.tp("a", "b", num_kv_heads=2, from_tp=2, to_tp=2, namespace=namespace)
    groups = ThreadGroup.create(2)
    configs = [HandoffConfig(transport="memory", receive_timeout_s=seconds) for seconds in (1.0, 2.0)]
    with (
        KVReceiver(route, 0, group=groups[0], config=configs[0]) as first,
        KVReceiver(route, 1, group=groups[1], config=configs[1]) as second,
        ThreadPoolExecutor(2) as pool,
    ):
        for job in [pool.submit(receiver.receive_together, "req", timeout_s=0.1) for receiver in (first, second)]:
            with pytest.raises(RemoteProtocolError, match="do not vote on the same facts"):
                job.result(timeout=60)


def count_gets(receiver):
    """The source ranks that the receiver asks, as it asks them."""
    asked = []
    original = receiver._transport.get_as_ready

    def counted(identities, *, deadline, preview):
        asked.extend(identity.source_rank for identity in identities)
        return original(identities, deadline=deadline, preview=preview)

    receiver._transport.get_as_ready = counted
    return asked


def wait_for_rounds(asked, *, source_rank, at_least):
    """Until the receiver asked a source that often."""
    give_up = time.monotonic() + 60
    while asked.count(source_rank) < at_least:
        assert time.monotonic() < give_up, asked
        os.sched_yield()


def test_a_group_may_wait_without_end(transport, namespace):
    route = Route.tp("a", "b", num_kv_heads=2, from_tp=1, to_tp=2, namespace=namespace)
    with stages(route, transport, groups=ThreadGroup.create(2)) as ([sender], receivers), ThreadPoolExecutor(2) as pool:
        outcomes = [pool.submit(receiver.receive_together, "req", timeout_s=float("inf")) for receiver in receivers]
        sender.send("req", full_cache(num_heads=2))
        for waiting in outcomes:
            outcome = waiting.result(timeout=60)
            assert outcome.verdict == "keep"
            outcome.close()
