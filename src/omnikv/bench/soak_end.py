"""One end of a soak: a process that sends or receives batches of requests as it is told, until it is ended or killed.

What becomes of a request follows from its number and the run's seed, so both ends and the controller know it alike:
its size, its content, and whether it is sent, failed, or sent and aborted.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal, TypeAlias

import torch

from omnikv.bench.workload import bench_route
from omnikv.config import HandoffConfig
from omnikv.errors import OmniKVError, ProducerFailed
from omnikv.handoff.api import KVReceiver, KVSender
from omnikv.handoff.received import ReceivedKV
from omnikv.tensors.kv import LayerKV

Fate: TypeAlias = Literal["sent", "failed", "aborted"]
EndName: TypeAlias = Literal["sender", "receiver"]

# Never reached unless something hangs.
TIMEOUT_S = 60.0
NUM_LAYERS, NUM_HEADS, HEAD_DIM = 4, 2, 64
MAX_TOKENS = 4096
# Holds a whole batch, so that a dead receiver holds nobody up; made at once, so that it takes one descriptor.
POOL_NBYTES = 128 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Send or receive these requests."""

    first: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """The other end lost this batch: free what is left of it, and tell whoever still waits for it."""

    first: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """Say what this process holds while no request is under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What an end holds: descriptors, threads, and payloads that nobody acknowledged."""

    descriptors: int
    threads: int
    payloads: int


@dataclass(slots=True, kw_only=True)
class BatchEnd:
    """What came of a batch at one end: requests by what became of them, and what was compared byte by byte."""

    outcomes: dict[int, str]
    checked_nbytes: int = 0
    wrong: int = 0
    given_back: int = 0


def fate_of(seed: int, number: int) -> Fate:
    """What the sender does with a request."""
    chance = random.Random(f"fate-{seed}-{number}").random()
    return "failed" if chance < 0.1 else "aborted" if chance < 0.2 else "sent"


def content_of(seed: int, number: int) -> list[LayerKV]:
    """The layers of a request; small ones are the most, a few are large."""
    chance = random.Random(f"content-{seed}-{number}")
    num_tokens = max(1, int(MAX_TOKENS ** chance.random()))
    start = chance.randrange(1 << 16)
    values = num_tokens * NUM_HEADS * HEAD_DIM
    bits = torch.arange(start, start + 2 * NUM_LAYERS * values, dtype=torch.int32).to(torch.int16)
    tensors = bits.view(torch.bfloat16).view(2 * NUM_LAYERS, num_tokens, NUM_HEADS, HEAD_DIM).unbind(0)
    return [LayerKV(*pair) for pair in zip(tensors[::2], tensors[1::2], strict=True)]


def request_name(number: int) -> str:
    """The id of a request."""
    return f"soak-{number}"


def serve(pipe: Connection, end: EndName, namespace: str, seed: int) -> None:
    """Nothing; does what comes through `pipe` until None comes."""
    torch.set_num_threads(1)
    route = bench_route(namespace, NUM_HEADS)
    config = HandoffConfig(options={"pool_nbytes": POOL_NBYTES, "segment_nbytes": POOL_NBYTES})
    if end == "sender":
        with KVSender(route, rank=0, config=config) as sender:
            _obey(pipe, lambda order: _do_as_sender(sender, seed, order))
    else:
        with KVReceiver(route, rank=0, config=config) as receiver:
            _obey(pipe, lambda order: _do_as_receiver(receiver, seed, order))


def _obey(pipe: Connection, do: Callable[[object], object]) -> None:
    while (order := pipe.recv()) is not None:
        pipe.send(do(order))


def _do_as_sender(sender: KVSender, seed: int, order: object) -> object:
    if isinstance(order, Batch):
        return BatchEnd(outcomes={number: _send(sender, seed, number) for number in _numbers(order)})
    if isinstance(order, Forget):
        for number in _numbers(order):
            sender.abort(request_name(number), "the other end was killed")
        return None
    return _held(sender.drain(timeout_s=TIMEOUT_S))


def _send(sender: KVSender, seed: int, number: int) -> str:
    fate, name = fate_of(seed, number), request_name(number)
    if fate == "failed":
        sender.fail(name, "as the seed says")
        return fate
    sender.send(name, content_of(seed, number))
    if fate == "aborted":
        sender.abort(name)
    return fate


def _do_as_receiver(receiver: KVReceiver, seed: int, order: object) -> object:
    if isinstance(order, Batch):
        end = BatchEnd(outcomes={})
        for number in _numbers(order):
            end.outcomes[number] = _receive(receiver, seed, number, end)
        return end
    return None if isinstance(order, Forget) else _held(0)


def _receive(receiver: KVReceiver, seed: int, number: int, end: BatchEnd) -> str:
    name = request_name(number)
    try:
        kv = receiver.receive(name, timeout_s=TIMEOUT_S)
        if random.Random(f"retry-{seed}-{number}").random() < 0.1:
            # Given back and asked for again: nothing may have been consumed.
            kv.give_back()
            end.given_back += 1
            kv = receiver.receive(name, timeout_s=TIMEOUT_S)
    except ProducerFailed:
        return "told"
    except OmniKVError as error:
        return f"{type(error).__name__}: {error}"
    with kv:
        _compare(kv, content_of(seed, number), end)
    return "received"


def _compare(kv: ReceivedKV, expected: list[LayerKV], end: BatchEnd) -> None:
    is_right = len(kv.layers) == len(expected)
    for found, wanted in zip(kv.layers, expected, strict=False):
        for one, other in zip(found, wanted, strict=True):
            is_right = is_right and torch.equal(one.view(torch.int16), other.view(torch.int16))
            end.checked_nbytes += one.nbytes
    end.wrong += not is_right


def _numbers(order: Batch | Forget) -> range:
    return range(order.first, order.first + order.count)


def _held(payloads: int) -> Held:
    # Threads that help to pack start when the first large payload needs them, and stay.
    threads = [thread for thread in threading.enumerate() if not thread.name.startswith("omnikv-pack")]
    return Held(descriptors=len(os.listdir("/proc/self/fd")), threads=len(threads), payloads=payloads)
