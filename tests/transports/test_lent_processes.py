"""Paged caches lent over NIXL between processes: bytes, several ranks, a kill in mid-read, expiry, abort, memory."""

import contextlib
import importlib
import json
import secrets
import time
from pathlib import Path

import lent_source
import pytest
import torch
from answering_process import ToldProcess
from lent_source import HEADS, LAYERS, SLOTS, shuffled, whole_caches
from tcp_ends import free_address

from omnikv import KVReceiver, Route
from omnikv.errors import Aborted, Expired, ProducerFailed

PROGRAM = Path(lent_source.__file__)
TOKENS = 27 * SLOTS + 5
BLOCKS = 64


class Source(ToldProcess):
    def __init__(self, *settings):
        super().__init__(PROGRAM, settings)

    def wait_until_open(self):
        assert json.loads(self.line()) == "open"

    def ask(self, *command):
        self.tell(command)
        return json.loads(self.line())


class Stages:
    def __init__(self, stack, from_tp, to_tp, blocks, ttl_s):
        self.stack, self.settings = stack, (from_tp, to_tp)
        self.blocks, self.ttl_s = blocks, ttl_s
        self.namespace = f"test-{secrets.token_hex(8)}"
        self.route = Route.tp(
            "prefill", "decode", num_kv_heads=HEADS, from_tp=from_tp, to_tp=to_tp, namespace=self.namespace
        )
        self.addresses = {rank: free_address() for rank in range(from_tp)}
        self.sources = [self.source(rank) for rank in range(from_tp)]
        for source in self.sources:
            source.wait_until_open()
        options = {"peers": self.addresses, "landing_nbytes": 512 << 20}
        self.receivers = [
            stack.enter_context(KVReceiver(self.route, rank, transport="nixl", options=options))
            for rank in range(to_tp)
        ]

    def source(self, rank):
        source = Source(rank, self.namespace, *self.settings, self.addresses[rank], self.blocks, self.ttl_s)
        self.stack.callback(source.end)
        return source

    def send(self, request_id, ids, num_tokens=TOKENS):
        for source in self.sources:
            source.ask("send", request_id, ids, num_tokens)

    def receive(self, rank, request_id, ids, num_tokens=TOKENS):
        """Takes the request, and fails unless every bit of it is what it must be."""
        heads = list(self.route.target_heads[rank])
        with self.receivers[rank].receive(request_id, timeout_s=60) as received:
            assert len(received.layers) == LAYERS
            for layer, pair in zip(received.layers, whole_caches(self.blocks), strict=True):
                for got, half in zip(layer, pair, strict=True):
                    assert torch.equal(got.view(torch.int16), half[ids].flatten(0, 1)[:num_tokens, heads])


@pytest.fixture
def stages(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    try:
        importlib.import_module("nixl_cu12._api")
    except ImportError as error:
        pytest.skip(f"NIXL cannot be loaded here: {error}")
    with contextlib.ExitStack() as stack:
        yield lambda from_tp=1, to_tp=1, blocks=BLOCKS, ttl_s=300.0: Stages(stack, from_tp, to_tp, blocks, ttl_s)


def until(condition):
    give_up = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.005)


def test_shuffled_blocks_of_four_ranks_arrive_at_two_bit_for_bit_through_a_pool_that_holds_none_of_them(stages):
    four_to_two = stages(4, 2)
    for number in range(5):
        ids = shuffled(BLOCKS, number)
        four_to_two.send(f"r{number}", ids)
        for rank in range(2):
            four_to_two.receive(rank, f"r{number}", ids)
    for source in four_to_two.sources:
        assert source.ask("drain") == 0
        assert source.ask("census")["lent"] == 0


def test_the_blocks_of_one_request_are_free_when_it_was_read_though_others_are_not(stages):
    pair = stages()
    (source,), ids = pair.sources, shuffled(BLOCKS, 3)
    pair.send("read", ids)
    pair.send("unread", ids)
    assert not source.ask("free", "read", 0)
    pair.receive(0, "read", ids)
    assert source.ask("free", "read", 60)
    assert not source.ask("free", "unread", 0)


def test_a_sender_killed_while_its_caches_are_read_is_known_and_its_next_life_lends_again(stages, in_thread):
    pair = stages(blocks=512)
    (receiver,), ids = pair.receivers, shuffled(512, 0)
    tokens = len(ids) * SLOTS
    waiting = in_thread(receiver.receive, "large", timeout_s=60)
    pair.send("large", ids, tokens)
    until(lambda: receiver._transport.pool.used_nbytes > 100 << 20)
    pair.sources[0].kill()
    assert isinstance(waiting.exception(), ProducerFailed)
    until(lambda: not receiver._transport.pool.used_nbytes)
    pair.sources = [pair.source(0)]
    pair.sources[0].wait_until_open()
    for number in range(3):
        pair.send(f"r{number}", ids[:28])
        pair.receive(0, f"r{number}", ids[:28])


def test_what_is_aborted_or_expires_is_told_and_no_longer_lent(stages):
    pair = stages(ttl_s=0.3)
    (source,), (receiver,), ids = pair.sources, pair.receivers, shuffled(BLOCKS, 1)
    pair.send("aborted", ids)
    source.ask("abort", "aborted")
    assert source.ask("census")["lent"] == 0
    with pytest.raises(Aborted):
        receiver.receive("aborted", timeout_s=60)
    pair.send("expired", ids)
    until(lambda: source.ask("census")["lent"] == 0)
    with pytest.raises(Expired):
        receiver.receive("expired", timeout_s=60)


def test_memory_stays_flat_however_often_a_cache_is_lent(stages):
    pair = stages()
    (source,) = pair.sources
    ids = shuffled(BLOCKS, 2)

    def rounds(first, count):
        for number in range(first, first + count):
            pair.send(f"r{number}", ids)
            pair.receivers[0].receive(f"r{number}", timeout_s=60).close()
        return source.ask("resident")

    before = rounds(0, 30)
    assert rounds(30, 150) < before + (8 << 20)
    assert source.ask("drain") == 0
