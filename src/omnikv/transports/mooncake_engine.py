"""Mooncake's transfer engine, called as it is: one a process for each network, for as long as the process lives.

Its codes are kept: a batch that could not be submitted is 0, a read that ended badly is negative. The engine shares its
sockets with no one else's control, asks nobody who they are, and keeps them open over `exec`; see `docs/security.md`.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Sequence
from typing import Any

from omnikv.errors import TransportUnavailable
from omnikv.transports.one_sided_engine import EngineFault, Place, Reading, one_by_one

NAME = "mooncake"
_INSTALL = (
    "install it with `pip install 'omnikv[mooncake]'`, and the system's library libibverbs1 (Debian and Ubuntu: "
    "`apt-get install libibverbs1`), which it needs even where it only uses TCP"
)
# What `transfer_check_status` says of a read.
_UNDER_WAY, _DONE, _SLOW = 0, 1, -2

_lock = threading.Lock()
_engines: dict[tuple[int, str, str, str], MooncakeEngine] = {}


def mooncake_engine(host: str, protocol: str, devices: str) -> MooncakeEngine:
    """This process's engine that peers reach at `host` by `protocol` ("tcp", "rdma") over `devices` (empty: any).

    Raises:
        TransportUnavailable: it is not installed, or does not start.
    """
    with _lock:
        # A forked child has no threads of its parent's engine, so it gets one of its own.
        key = (os.getpid(), host, protocol, devices)
        if key not in _engines:
            _engines[key] = MooncakeEngine(host, protocol, devices)
        return _engines[key]


class MooncakeEngine:
    """An engine that was started, and reads that it does. Safe to use from several threads.

    Raises:
        TransportUnavailable: it is not installed, or does not start.
    """

    needs_serving = False
    has_notices = False

    def __init__(self, host: str, protocol: str, devices: str) -> None:
        try:
            module: Any = importlib.import_module("mooncake.engine")
        except ImportError as error:
            raise TransportUnavailable(
                f"{NAME}: Mooncake's transfer engine cannot be loaded ({error}): {_INSTALL}", transport=NAME
            ) from error
        self.host = host
        self._engine = module.TransferEngine()
        code = self._engine.initialize(host, "P2PHANDSHAKE", protocol, devices)
        if code != 0:
            raise TransportUnavailable(
                f"{NAME}: the transfer engine does not start at {host} with protocol {protocol!r}, devices {devices!r} "
                f"(code {code}): the option host must be an address of this machine, and the protocol one it has",
                transport=NAME,
            )
        self.port: int = self._engine.get_rpc_port()

    def hail(self) -> bytes:
        """The address at which this engine is reached."""
        return f"{self.host}:{self.port}".encode()

    def register(self, address: int, nbytes: int) -> bytes:
        """Nothing to tell; the engine's peers learn of memory from each other.

        Raises:
            EngineFault: it does not take this memory.
        """
        code = self._engine.register_memory(address, nbytes)
        if code != 0:
            raise EngineFault("register_memory", code)
        return b""

    def unregister(self, address: int) -> None:
        """Nothing; reads of this memory are refused from now on."""
        self._engine.unregister_memory(address)

    def learn(self, word: bytes) -> str:
        """The address of the engine that said this.

        Raises:
            EngineFault: it is no text.
        """
        try:
            return word.decode()
        except UnicodeDecodeError as error:
            raise EngineFault("reading an address", repr(word[:64])) from error

    def forget(self, source: str) -> None:
        """Nothing; the engine keeps what it knows of its peers to itself."""

    def start(self, source: str, local: int, places: Sequence[Place], notice: bytes = b"") -> Reading:
        """A read, once the source's engine has answered, which may take as long as its network lets it.

        Raises:
            EngineFault: the source's engine was not reached, or took nothing.
        """
        batches: list[int] = []
        refusal: EngineFault | None = None
        for to, remote, nbytes in one_by_one(local, places):
            # One for each place: what the engine says of a batch is true of the first read in it alone.
            batch = self._engine.batch_transfer_async_read(source, [to], [remote], [nbytes])
            if batch <= 0:
                refusal = EngineFault("batch_transfer_async_read", batch)
                break
            batches.append(batch)
        if refusal is not None and not batches:
            raise refusal
        return _Batches(self._engine, batches, refusal)

    def write(self, peer: str, locals_: list[int], remotes: list[int], sizes: list[int]) -> int:
        """The engine's code of writing each stretch here to its place at `peer`, 0 when all went well. Blocks."""
        code: int = self._engine.batch_transfer_sync_write(peer, locals_, remotes, sizes)
        return code

    def serve(self) -> Sequence[bytes]:
        """No notices; the engine has threads of its own."""
        return ()

    def close(self) -> None:
        """Nothing; others of this process may be using it, and later ones will."""


class _Batches:
    """One read, in a batch of the engine's for each of its places, but for those that it took no more."""

    def __init__(self, engine: Any, batches: list[int], fault: EngineFault | None) -> None:
        self._engine = engine
        self._batches = batches
        self._fault = fault

    def poll(self) -> bool:
        """Whether every byte is here.

        Raises:
            EngineFault: a slice of it ended badly.
        """
        self._batches = [batch for batch in self._batches if not self._has_ended(batch)]
        if self._batches:
            # What went wrong is said when the engine is done with the rest, too.
            return False
        if self._fault is not None:
            raise self._fault
        return True

    def _has_ended(self, batch: int) -> bool:
        code = self._engine.transfer_check_status(batch)
        if code in (_UNDER_WAY, _SLOW):
            # What is slow may still come, so it is not over.
            return False
        if code != _DONE:
            self._fault = self._fault or EngineFault("transfer_check_status", code)
        return True
