"""A transport of one's own: `signed` puts an HMAC behind every payload and refuses one whose signature does not hold.

It moves its bytes through another transport, as a stranger's may through any library. Registered by name it serves
`KVSender` and `KVReceiver` like the built-in ones; an installed package would name it in the entry-point group
"omnikv.transports" instead. The conformance scenarios of `omnikv.testing` prove that it keeps all rules of a transport.

Run it: python examples/custom_transport.py
"""

import hashlib
import hmac
import os
from typing import Any

import torch

from omnikv import KVReceiver, KVSender, PayloadId, Route
from omnikv.errors import ConfigError, TransportError
from omnikv.testing.conformance import NamedPair, transport_scenarios
from omnikv.transports.base import Capabilities, Endpoint, Lease, Slot, Transport
from omnikv.transports.registry import open_transport, register_transport

TAG_NBYTES = hashlib.sha256().digest_size


class SignedSlot(Slot):
    """Room with space for the signature behind it."""

    def __init__(self, inner: Slot, secret: bytes) -> None:
        self._inner, self._secret, self._published = inner, secret, False

    @property
    def buffer(self) -> memoryview:
        return self._inner.buffer[:-TAG_NBYTES]

    def publish(self) -> None:
        if not self._published:
            self._inner.buffer[-TAG_NBYTES:] = sign(self._secret, self.buffer)
            self._published = True
        self._inner.publish()

    def drop(self) -> None:
        self._inner.drop()


class SignedLease(Lease):
    """A payload whose signature held, shown without it."""

    def __init__(self, inner: Lease) -> None:
        self._inner = inner

    @property
    def buffer(self) -> memoryview:
        return self._inner.buffer[:-TAG_NBYTES]

    def acknowledge(self) -> None:
        self._inner.acknowledge()

    def release(self) -> None:
        self._inner.release()


class SignedTransport(Transport):
    """Moves signed payloads between processes that share `secret`."""

    name = "signed"
    capabilities = Capabilities(cross_process=True, cross_host=False, shared_memory=True, notices_peer_death=True)

    def __init__(self, endpoint: Endpoint, *, secret: str, **options: Any) -> None:
        self._secret = secret.encode()
        self._inner = open_transport("shm", endpoint, options)

    def reserve(self, payload: PayloadId, nbytes: int) -> Slot:
        if nbytes < 0:
            raise ConfigError(f"signed: a payload has at least 0 bytes, got {nbytes}")
        return SignedSlot(self._inner.reserve(payload, nbytes + TAG_NBYTES), self._secret)

    def get(self, payload: PayloadId, *, deadline: float) -> Lease | None:
        inner = self._inner.get(payload, deadline=deadline)
        if inner is None:
            return None
        lease = SignedLease(inner)
        if not hmac.compare_digest(sign(self._secret, lease.buffer), inner.buffer[-TAG_NBYTES:]):
            lease.release()
            raise TransportError(f"signed: {payload.encode()} was not signed with our secret", transport="signed")
        return lease

    def fail(self, payload: PayloadId, cause: str) -> None:
        self._inner.fail(payload, cause)

    def drain(self, *, deadline: float) -> int:
        return self._inner.drain(deadline=deadline)

    def close(self) -> None:
        self._inner.close()


def sign(secret: bytes, data: memoryview) -> bytes:
    """The signature of a payload's bytes."""
    return hmac.digest(secret, data, "sha256")


def main() -> None:
    """Prove the transport, use it, and show what it is for."""
    register_transport("signed", SignedTransport)
    for name, check in transport_scenarios():
        check(NamedPair(transport="signed", options={"secret": "for the suite"}))
        print(f"passed: {name}")

    route = Route.tp("prefill", "decode", num_kv_heads=2, from_tp=1, to_tp=1, namespace=f"signed-{os.getpid()}")
    layers = [(torch.randn(5, 2, 8), torch.randn(5, 2, 8))]
    with (
        KVSender(route, 0, transport="signed", options={"secret": "ours"}) as sender,
        KVReceiver(route, 0, transport="signed", options={"secret": "ours"}) as receiver,
    ):
        sender.send("request-1", layers)
        with receiver.receive("request-1", timeout_s=30.0) as kv:
            assert torch.equal(kv.layers[0].key, layers[0][0])
    with (
        KVSender(route, 0, transport="signed", options={"secret": "ours"}) as sender,
        KVReceiver(route, 0, transport="signed", options={"secret": "theirs"}) as receiver,
    ):
        sender.send("request-1", layers)
        try:
            receiver.receive("request-1", timeout_s=30.0)
        except TransportError as error:
            print(f"refused: {error}")
    print("all scenarios passed, a payload was handed over, and a forged one was refused")


if __name__ == "__main__":
    main()
