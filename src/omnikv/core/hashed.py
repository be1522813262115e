"""Tuples that are keys again and again."""

from __future__ import annotations

from typing import TypeVar

Item = TypeVar("Item")


class Hashed(tuple[Item, ...]):
    """A tuple that is hashed once: what follows from a hundred tensors is looked up by them several times a payload."""

    _hash: int | None = None

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = super().__hash__()
        return self._hash

    def __reduce__(self) -> tuple[type[Hashed[Item]], tuple[tuple[Item, ...]]]:
        # Without the hash: texts are hashed otherwise in another process.
        return type(self), (tuple(self),)
