"""One call of a channel: the requests that a rank votes on together, and what came of each of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec

from omnikv.core.messages import Ballot, Ruling
from omnikv.errors import ConfigError, VerdictInDoubt
from omnikv.groups.channel_link import MAX_FRAME_NBYTES

MAX_KEY_CHARS = 1024
_MAX_VOTES_NBYTES = MAX_FRAME_NBYTES - 64

encode = msgspec.msgpack.Encoder().encode


class Call:
    """One call's requests at this rank, and what came of them.

    `deadline` is the caller's, `due` is when waiting for them really ends, both on the monotonic clock; `left` is how
    many of them have no ruling and are not in doubt either.
    """

    # Every vote goes through here, so it is one pass with few calls: see `python -m omnikv.bench agreement`.
    __slots__ = (
        "bell",
        "can_be_kept",
        "deadline",
        "doubts",
        "due",
        "encoded",
        "heard",
        "hopes",
        "is_first_round",
        "keys",
        "left",
        "number",
        "rulings",
        "votes",
        "watch",
    )

    def __init__(self, votes: Sequence[tuple[str, Ballot]], deadline: float, grace_s: float = 0.0) -> None:
        """Waiting may go on for `grace_s` after `deadline`.

        Raises:
            ConfigError: a key is no text of 1 to 1024 characters, or comes twice, or the ballots are too long.
        """
        self.votes = votes
        self.deadline = deadline
        self.due = deadline + grace_s
        self.is_first_round = True
        # Whether `rule` keeps each ballot if all ranks cast the same in the first round.
        self.can_be_kept = True
        # A dict for its order; it must not hold the call itself, which would then be left to the garbage collector.
        self.keys: dict[str, None] = {}
        for key, ballot in votes:
            if not isinstance(key, str) or not 0 < len(key) <= MAX_KEY_CHARS:
                raise ConfigError(f"a vote's key must be a text of 1 to {MAX_KEY_CHARS} characters, got {key!r:.100}")
            self.keys[key] = None
            if ballot.round:
                self.is_first_round = False
            for entry in ballot.roles:
                if entry.standing != "have":
                    self.can_be_kept = False
        self.left = len(self.keys)
        if self.left < len(votes):
            raise ConfigError("the keys of ballots that are cast together must differ")
        try:
            self.encoded = encode(votes)
        except UnicodeEncodeError as error:
            raise ConfigError(f"a vote's key and texts must be encodable as UTF-8: {error}") from error
        if len(self.encoded) > _MAX_VOTES_NBYTES:
            raise ConfigError(
                f"{len(votes)} ballots take {len(self.encoded)} bytes, at most {_MAX_VOTES_NBYTES} go out together; "
                "cast fewer at once or shorten their causes"
            )
        self.rulings: dict[int, Ruling] = {}
        self.doubts: dict[int, str] = {}
        # What each ballot comes to if all ranks cast the same; while it is whole, the number of this follower's own
        # message, and at the leader those of the ranks that cast the same so far.
        self.hopes: list[Ruling] | None = None
        self.number = -1
        self.heard: dict[int, int] = {}
        # Who sleeps until this call changes, and the set of calls that nobody waits for, while it is in there.
        self.bell: threading.Condition | None = None
        self.watch: set[Call] | None = None

    def foresee(self) -> list[Ruling]:
        """What `rule` comes to on each ballot if all ranks cast the same and each can be kept; worked out once."""
        if self.hopes is None:
            known: dict[tuple[str, ...], Ruling] = {}
            self.hopes = []
            for _, ballot in self.votes:
                names = tuple([entry.role for entry in ballot.roles])
                ruling = known.get(names)
                if ruling is None:
                    ruling = known[names] = Ruling("keep", 0, usable=names)
                self.hopes.append(ruling)
        return self.hopes

    def fulfil(self) -> None:
        """Nothing; every request came to what was hoped for."""
        self.left = 0
        self.ring()

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
            if not self.rulings:
                return self.foresee()
            return [self.rulings[index] for index in range(len(self.votes))]
        index, cause = next(iter(self.doubts.items()))
        key = self.votes[index][0]
        raise VerdictInDoubt(
            f"rank {rank} voted on {key!r} and cannot learn the ruling: {cause}; tear this group down",
            request_id=key,
            rank=rank,
        )
