"""The payloads of a simulated world at their senders, with the count of every lease on them."""

from __future__ import annotations

from dataclasses import dataclass, field

from omnikv.testing.world_faults import Fate, Part


@dataclass(slots=True)
class _Shelf:
    fate: Fate
    ready: int = 0
    leased: int = 0
    acknowledged: int = 0
    failed: bool = False


@dataclass(slots=True)
class Payloads:
    """What lies at the senders. A lease is a promise to acknowledge or give back; what is broken is written down."""

    wrongs: list[str] = field(default_factory=list)
    leases: int = 0
    _shelves: dict[Part, _Shelf] = field(default_factory=dict)

    def expect(self, part: Part, fate: Fate) -> None:
        """Nothing; the payload will meet this fate."""
        self._shelves[part] = _Shelf(fate)

    def publish(self, part: Part) -> None:
        """Nothing; the payload is there, perhaps once more."""
        self._shelves[part].ready += 1

    def fail(self, part: Part) -> None:
        """Nothing; its sender says that it will not come."""
        self._shelves[part].failed = True

    def has_failed(self, part: Part) -> bool:
        """Whether its sender said that it will not come."""
        return self._shelves[part].failed

    def lease(self, part: Part) -> Fate | None:
        """What lies there, leased; None when nothing does."""
        shelf = self._shelves[part]
        if not shelf.ready:
            return None
        shelf.ready -= 1
        shelf.leased += 1
        self.leases += 1
        return shelf.fate

    def acknowledge(self, part: Part) -> None:
        """Nothing; one lease ends and the payload with it."""
        shelf = self._shelves[part]
        shelf.leased -= 1
        shelf.acknowledged += 1
        if shelf.acknowledged > 1:
            self.wrongs.append(f"{spell_part(part)} was consumed {shelf.acknowledged} times")

    def give_back(self, part: Part) -> None:
        """Nothing; one lease ends, and the payload is as ready as before."""
        shelf = self._shelves[part]
        shelf.leased -= 1
        shelf.ready += 1

    def acknowledged(self) -> list[Part]:
        """The payloads that were consumed."""
        return [part for part, shelf in self._shelves.items() if shelf.acknowledged]

    def still_leased(self) -> list[Part]:
        """The payloads with a lease on them."""
        return [part for part, shelf in self._shelves.items() if shelf.leased]


def spell_part(part: Part) -> str:
    """A payload's name in words."""
    return f"{part.role} of {part.key} from source {part.source} at rank {part.rank}"
