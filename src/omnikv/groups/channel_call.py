"""One call of a channel: the requests that a rank votes on together, and what came of each of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from omnikv.core.messages import Ballot, Ruling
from omnikv.errors import ConfigError, VerdictInDoubt

MAX_KEY_CHARS = 1024


class Call:
    """One call's requests at this rank, and what came of them.

    `deadline` is the caller's, `due` is when waiting for them really ends, both on the monotonic clock; `left` is how
    many of them have no ruling and are not in doubt either. The call `is_first` if each of its ballots is of the first
    round.
    """

    # Every vote goes through here, right after other work: what it touches and where it goes, it finds cold in the
    # caches. So there are few steps, and plain ones: see `python -m omnikv.bench agreement`.
    __slots__ = (
        "_foreseen",
        "alike",
        "bell",
        "deadline",
        "doubts",
        "due",
        "encoded",
        "is_first",
        "keys",
        "left",
        "rulings",
        "votes",
        "watch",
    )

    def __init__(self, votes: Sequence[tuple[str, Ballot]], deadline: float, grace_s: float = 0.0) -> None:
        """Waiting may go on for `grace_s` after `deadline`.

        Raises:
            ConfigError: a key is no text of 1 to 1024 characters, or comes twice.
        """
        is_first = True
        for key, ballot in votes:
            if not isinstance(key, str) or not 0 < len(key) <= MAX_KEY_CHARS:
                raise ConfigError(f"a vote's key must be a text of 1 to {MAX_KEY_CHARS} characters, got {key!r:.100}")
            if ballot.round:
                is_first = False
        # For its order; it must not hold the call itself, which would then be left to the garbage collector.
        keys = dict(votes)
        if len(keys) < len(votes):
            raise ConfigError("the keys of ballots that are cast together must differ")
        self.votes = votes
        self.keys = keys
        self.is_first = is_first
        self.left = len(keys)
        self.deadline = deadline
        self.due = deadline + grace_s
        self.rulings: dict[int, Ruling] = {}
        self.doubts: dict[int, str] = {}
        self._foreseen: list[Ruling] = []
        # The leader's notes while it holds the call whole: its ballots as bytes, and who cast the same so far.
        self.encoded = b""
        self.alike: list[int] = []
        # Who sleeps until this call changes, and the set of calls that nobody waits for, while it is in there.
        self.bell: threading.Condition | None = None
        self.watch: set[Call] | None = None

    def foresee(self) -> bool:
        """Whether each ballot is kept should all ranks cast the same: it is of the first round and has every role.

        Nothing that is sent depends on this, so it is best asked while what was sent is under way.
        """
        if not self.is_first:
            return False
        votes = self.votes
        # The name of the one role that each ballot has, if it is the same in all of them.
        only = votes[0][1].roles[0].role if votes and votes[0][1].roles else None
        for _, ballot in votes:
            roles = ballot.roles
            if len(roles) != 1:
                only = None
            for entry in roles:
                if entry.standing != "have":
                    return False
                if entry.role != only:
                    only = None
        # What `rule` comes to on each of them.
        if only is not None:
            self._foreseen = [Ruling("keep", 0, (only,))] * len(votes)
        else:
            self._foreseen = [Ruling("keep", 0, tuple(entry.role for entry in ballot.roles)) for _, ballot in votes]
        return True

    def settle(self, index: int, ruling: Ruling) -> None:
        """Nothing; the ruling on one request of the call is here."""
        self.rulings[index] = ruling
        self.left -= 1
        self.ring()

    def doubt(self, index: int, cause: str) -> None:
        """Nothing; the ruling on one request of the call cannot be learnt."""
        self.doubts[index] = cause
        self.left -= 1
        self.ring()

    def hasten(self, due: float) -> None:
        """Nothing; waiting ends at `due` if that is sooner."""
        if due < self.due:
            self.due = due
            self.ring()

    def ring(self) -> None:
        """Nothing; whoever sleeps until this call changes looks at it again."""
        if self.watch is not None and not self.left:
            self.watch.discard(self)
        if self.bell is not None:
            self.bell.notify_all()

    def outcome(self, rank: int) -> list[Ruling]:
        """The rulings, in the order of the votes, when nothing is left.

        Raises:
            VerdictInDoubt: one of them could not be learnt.
        """
        if not self.doubts:
            # Without any ruling all ranks cast the same, as was foreseen.
            return [self.rulings[index] for index in range(len(self.votes))] if self.rulings else self._foreseen
        index, cause = next(iter(self.doubts.items()))
        key = self.votes[index][0]
        raise VerdictInDoubt(
            f"rank {rank} voted on {key!r} and cannot learn the ruling: {cause}; tear this group down",
            request_id=key,
            rank=rank,
        )
