"""The transport that goes wrong on purpose: the same seed does the same, and each fault is what it says."""

import time
from itertools import count

import pytest
import torch

from omnikv import KVReceiver, KVSender, Route
from omnikv.core.keys import Edge, PayloadId
from omnikv.errors import ConfigError, OmniKVError, ReceiveTimeout, TransportError
from omnikv.testing.conformance import NamedPair
from omnikv.testing.transport_pair import pattern, payload_of, put
from omnikv.transports.base import Endpoint
from omnikv.transports.faulty import Faults, FaultyTransport

names = count()


def pair_of(**faults):
    return NamedPair(transport="faulty", options={"faults": faults})


def fates_of(pair, number=60):
    """What becomes of payloads that are put and got over a pair: absent, damaged, or whole."""
    fates = []
    with pair.open_source(0, (0,), {}) as source, pair.open_target(0, (0,), {}) as target:
        for at in range(number):
            payload = payload_of(pair, f"r{at}")
            put(source, payload, pattern(payload, 100))
            with target.get(payload, deadline=0.0) or NothingThere() as lease:
                fates.append("absent" if lease is None else bytes(lease.buffer) == pattern(payload, 100))
    return fates


class NothingThere:
    def __enter__(self):
        return None

    def __exit__(self, *_):
        pass


def test_nothing_happens_without_faults():
    assert set(fates_of(pair_of())) == {True}


def test_the_same_seed_does_the_same_and_another_one_does_not():
    edge = Edge(from_stage="a", to_stage="b", namespace="faulty-seeds")

    def fates(seed):
        options = {"faults": {"seed": seed, "drop": 0.3, "corrupt": 0.3}}
        return fates_of(NamedPair(transport="faulty", options=options, edge=edge))

    assert fates(1) == fates(1)
    assert fates(1) != fates(2)
    assert {str(fate) for fate in fates(1)} == {"absent", "True", "False"}


def test_a_share_of_payloads_is_lost_on_the_way():
    lost = fates_of(pair_of(drop=0.5), number=200).count("absent")
    assert 60 < lost < 140


def test_damage_is_one_bit_that_only_the_receiver_sees():
    pair = pair_of(corrupt=1.0)
    payload = payload_of(pair, "r1")
    with pair.open_source(0, (0,), {}) as source, pair.open_target(0, (0,), {}) as target:
        put(source, payload, bytes(50))
        for _ in range(2):
            with target.get(payload, deadline=0.0) as lease:
                assert sum(byte.bit_count() for byte in bytes(lease.buffer)) == 1


def test_a_lost_acknowledgement_leaves_the_payload_leased_until_the_receiver_ends():
    pair = NamedPair(transport="faulty")
    target_only = NamedPair(transport="faulty", edge=pair.edge, options={"faults": {"drop": 1.0}})
    payload = payload_of(pair, "r1")
    with pair.open_source(0, (0,), {}) as source, target_only.open_target(0, (0,), {}) as target:
        put(source, payload, b"x")
        target.get(payload, deadline=0.0).acknowledge()
        assert source.census()["leased"] == 1
        target.close()
        with pair.open_target(0, (0,), {}) as successor:
            successor.get(payload, deadline=0.0).acknowledge()
        assert source.drain(deadline=0.0) == 0


def test_an_end_that_dies_raises_from_then_on_and_its_peer_notices():
    edge = Edge(from_stage="a", to_stage="b", namespace=f"faulty-{next(names)}")
    payload = PayloadId(edge=edge, transfer_id="r1", source_rank=0, target_rank=0)
    dying = FaultyTransport(Endpoint(edge=edge, side="source", rank=0, peer_ranks=(0,)), faults=Faults(die_after=2))
    with FaultyTransport(Endpoint(edge=edge, side="target", rank=0, peer_ranks=(0,))) as target, dying:
        put(dying, payload, b"x")
        with pytest.raises(TransportError, match="died after 2 calls"):
            dying.reserve(payload, 1)
        with pytest.raises(TransportError, match="died"):
            dying.fail(payload, "too late")
        with pytest.raises(OmniKVError, match="has not come back"):
            target.get(payload, deadline=time.monotonic() + 60)


@pytest.mark.parametrize("faults", [{"drop": 2}, {"corrupt": -0.1}, {"dorp": 0.5}])
def test_a_fault_that_cannot_be_is_refused(faults):
    endpoint = Endpoint(edge=Edge(from_stage="a", to_stage="b"), side="source", rank=0, peer_ranks=(0,))
    with pytest.raises(ConfigError, match="faulty: "):
        FaultyTransport(endpoint, faults=faults)


@pytest.mark.parametrize("seed", range(8))
def test_a_handoff_over_a_faulty_transport_is_right_or_refused(seed):
    faults = {"seed": seed, "drop": 0.2, "corrupt": 0.3, "duplicate": 0.5, "delay": 0.2, "delay_s": 0.002}
    route = Route.tp("prefill", "decode", num_kv_heads=2, from_tp=1, to_tp=1, namespace=f"faulty-{next(names)}-{seed}")
    options = {"faults": faults}
    outcomes = set()
    with (
        KVSender(route, 0, transport="faulty", options=options) as sender,
        KVReceiver(route, 0, transport="faulty", options=options) as receiver,
    ):
        for number in range(20):
            layers = [(torch.full((3, 2, 4), float(number)), torch.full((3, 2, 4), -float(number)))]
            sender.send(f"r{number}", layers)
            try:
                with receiver.receive(f"r{number}", timeout_s=0.02) as kv:
                    assert torch.equal(kv.layers[0].key, layers[0][0])
                    assert torch.equal(kv.layers[0].value, layers[0][1])
                    outcomes.add("right")
            except ReceiveTimeout:
                outcomes.add("lost")
            except OmniKVError as error:
                outcomes.add(type(error).__name__)
    assert "right" in outcomes
    assert len(outcomes) > 1
