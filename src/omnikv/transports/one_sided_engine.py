"""What a transport asks of an engine that reads another process's memory on its own, and how engines say no."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeAlias

# `(address, bytes)` of a stretch of a source's memory.
Place: TypeAlias = "tuple[int, int]"


class EngineFault(Exception):
    """An engine refused, or a read ended badly. `code` is the engine's own word or number for it, kept as it was."""

    def __init__(self, call: str, code: object) -> None:
        super().__init__(f"{call} ended with {code}")
        self.code = code


class Reading(Protocol):
    """One read under way. Its destination belongs to the engine until `poll` says that it is over."""

    def poll(self) -> bool:
        """Whether every byte is here; asked again while it is not.

        Raises:
            EngineFault: it ended badly; nothing of it comes any more.
        """


class Engine(Protocol):
    """The engine of one end. Any thread may call it; a call may block for as long as its network makes it.

    `needs_serving` says that reads only go on while they are called for: `serve` at the source, `poll` at the target.
    `has_notices` says that a read which went well can say so to the source's engine, which hands it out in `serve`.
    """

    needs_serving: bool
    has_notices: bool

    def hail(self) -> bytes:
        """What a peer must learn of this end before anything else."""

    def register(self, address: int, nbytes: int) -> bytes:
        """What a peer must learn besides to read this memory; empty where it need not. It stays until `unregister`.

        Raises:
            EngineFault: the engine does not take it.
        """

    def unregister(self, address: int) -> None:
        """Nothing; peers can read this memory no more, as far as the engine can prevent it."""

    def learn(self, word: bytes) -> str:
        """The name of the source that said `word`, the same for all that it says.

        Raises:
            EngineFault: it is nothing that this engine says.
        """

    def forget(self, source: str) -> None:
        """Nothing; gives back what reading from `source` took."""

    def start(self, source: str, local: int, places: Sequence[Place], notice: bytes = b"") -> Reading:
        """A read of these places of `source`, one after another into the address `local` here; all are registered.

        Once all of it is here, `source` gets the `notice`, if it is not empty and there are notices.

        Raises:
            EngineFault: it could not begin; nothing of it comes.
        """

    def serve(self) -> Sequence[bytes]:
        """The notices that came since; lets reads of this end's memory go on. Anybody may have sent them."""

    def close(self) -> None:
        """Nothing; gives everything back. No read is under way."""


def one_by_one(local: int, places: Sequence[Place]) -> Iterator[tuple[int, int, int]]:
    """`(to, from, bytes)` of each of a read's places, to `local` and on from there."""
    for address, nbytes in places:
        yield local, address, nbytes
        local += nbytes
