"""NVIDIA's NIXL agent over UCX, called as it is: no thread of its own, one call at a time, host memory.

Without a thread of its own an agent moves only while it is called: reads of a source's memory go on while the source
serves, and its words are NIXL's metadata, first how it is connected to, then one for each stretch of memory.

UCX picks the network itself, or as UCX_TLS says. Over TCP it asks nobody who they are and does not hold a peer to the
memory that was registered; see `docs/security.md`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omnikv.errors import TransportUnavailable
from omnikv.transports.one_sided_engine import EngineFault, Place, Reading, one_by_one

NAME = "nixl"
_INSTALL = "install it with `pip install 'omnikv[nixl]'`"
_BACKEND = "UCX"
_HOST_MEMORY = "DRAM"
_ADAPTERS = Path("/sys/class/infiniband")


class NixlEngine:
    """An agent of its own name, and reads that it does. Safe to use from several threads.

    Raises:
        TransportUnavailable: it is not installed, or does not start.
    """

    needs_serving = True
    has_notices = True

    def __init__(self) -> None:
        try:
            api: Any = importlib.import_module("nixl_cu12._api")
            self._bindings: Any = importlib.import_module("nixl_cu12._bindings")
        except ImportError as error:
            raise TransportUnavailable(
                f"{NAME}: NIXL cannot be loaded ({error}): {_INSTALL}", transport=NAME
            ) from error
        if not _ADAPTERS.is_dir():
            # UCX would load the system's RDMA library beside the package's own copies of what that needs, and the
            # process would end by SIGSEGV at its exit. Without an adapter there is nothing to load it for.
            os.environ.setdefault("UCX_MODULES", "^ib")
        try:
            settings = api.nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND])
            self._agent = api.nixl_agent(uuid.uuid4().hex, settings)
        except Exception as error:  # edge: NIXL raises errors of many kinds where UCX does not start
            raise TransportUnavailable(
                f"{NAME}: an agent over {_BACKEND} does not start ({error}): see what UCX_TLS allows on this machine",
                transport=NAME,
            ) from error
        self._lock = threading.Lock()
        self._registered: dict[int, Any] = {}

    def hail(self) -> bytes:
        """How this agent is connected to."""
        nothing = self._bindings.nixlRegDList(self._bindings.DRAM_SEG)
        with self._lock:
            word: bytes = self._agent.get_partial_agent_metadata(nothing, True)
        return word

    def register(self, address: int, nbytes: int) -> bytes:
        """What a peer's agent must know to read this memory.

        Raises:
            EngineFault: it does not take this memory.
        """
        with self._lock, _faults("register_memory"):
            memory = self._agent.register_memory([(address, nbytes, 0, "")], _HOST_MEMORY)
            self._registered[address] = memory
            word: bytes = self._agent.get_partial_agent_metadata(memory)
            return word

    def unregister(self, address: int) -> None:
        """Nothing; the agent knows this memory no more."""
        with self._lock, contextlib.suppress(EngineFault), _faults("deregister_memory"):
            self._agent.deregister_memory(self._registered.pop(address))

    def learn(self, word: bytes) -> str:
        """The name of the agent that said this.

        Raises:
            EngineFault: it is no metadata of an agent's.
        """
        with self._lock, _faults("add_remote_agent"):
            name: bytes = self._agent.add_remote_agent(word)
            return name.decode()

    def forget(self, source: str) -> None:
        """Nothing; ends the connection to that agent."""
        with self._lock, contextlib.suppress(EngineFault), _faults("remove_remote_agent"):
            self._agent.remove_remote_agent(source)

    def start(self, source: str, local: int, places: Sequence[Place], notice: bytes = b"") -> Reading:
        """A read that goes on while it is asked after, and that NIXL notifies the source of when all of it is here.

        Raises:
            EngineFault: the agent knows no such source or memory, or could not begin.
        """
        with self._lock, _faults("transfer"):
            moves = list(one_by_one(local, places))
            here = self._agent.get_xfer_descs([(to, nbytes, 0) for to, _, nbytes in moves], _HOST_MEMORY)
            there = self._agent.get_xfer_descs([(origin, nbytes, 0) for _, origin, nbytes in moves], _HOST_MEMORY)
            handle = self._agent.initialize_xfer("READ", here, there, source, notice)
            reading = _Transfer(self._agent, handle, self._lock)
            reading.begin()
            return reading

    def serve(self) -> Sequence[bytes]:
        """The notifications that came, of whatever agent; lets peers' reads go on."""
        with self._lock, contextlib.suppress(EngineFault), _faults("get_new_notifs"):
            came: dict[str, list[bytes]] = self._agent.get_new_notifs()
            return [notice for notices in came.values() for notice in notices]
        return []

    def close(self) -> None:
        """Nothing; ends the agent. No read is under way."""
        with self._lock:
            self._agent = None


class _Transfer:
    """One read of an agent's."""

    def __init__(self, agent: Any, handle: Any, lock: threading.Lock) -> None:
        self._agent = agent
        self._handle = handle
        self._lock = lock
        self._is_over = False

    def begin(self) -> None:
        """Nothing; the read is under way. Called with the lock, as its caller holds it.

        Raises:
            EngineFault: it ended badly at once.
        """
        self._take(self._ask(self._agent.transfer))

    def poll(self) -> bool:
        """Whether every byte is here; lets the read go on.

        Raises:
            EngineFault: a part of it ended badly.
        """
        with self._lock:
            return self._is_over or self._take(self._ask(self._agent.check_xfer_state))

    def _ask(self, call: Any) -> str:
        try:
            with _faults(call.__name__):
                state: str = call(self._handle)
                return state
        except EngineFault:
            self._release()
            raise

    def _take(self, state: str) -> bool:
        if state == "PROC":
            return False
        self._release()
        if state != "DONE":
            raise EngineFault("transfer", state)
        self._is_over = True
        return True

    def _release(self) -> None:
        with contextlib.suppress(EngineFault), _faults("release_xfer_handle"):
            self._agent.release_xfer_handle(self._handle)


@contextlib.contextmanager
def _faults(call: str) -> Any:
    """Maps what NIXL raises, whose text is its own code.

    Raises:
        EngineFault: something was raised.
    """
    try:
        yield
    except EngineFault:
        raise
    except Exception as error:  # edge: every status of NIXL is an exception of a class of its own
        raise EngineFault(call, str(error)) from error
