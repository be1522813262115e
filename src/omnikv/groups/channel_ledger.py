"""What a rank knows of the requests its channel votes on: calls, the steps of each request, and what to send.

`omnikv.core.vote` gives every request a state and says what an event does to it. Here the states are kept, ballots and
rulings find theirs by key and order, and effects become settled calls and messages to send. No sockets, no clock.

Most of the time every rank casts the same ballots and each is kept. For that a call whose keys are all new is held
*whole*: its steps are put off, and only who cast the very same bytes is written down. When all have, every request is
kept, which is what the steps come to (`rule` on equal ballots that have every role). When anything else happens to one
of its keys, the call is *opened* first: the steps that were put off are taken, request by request, and then the event.
A key is either in a whole call or has requests of its own, never both.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

import msgspec

from omnikv.core.messages import Ballot, Kept, Ruling, Rulings, Votes
from omnikv.core.vote import Conclude, Doubt, Effect, Event, FollowerState, LeaderState
from omnikv.errors import ConfigError, LocalProtocolError, RemoteProtocolError, VerdictInDoubt
from omnikv.groups.channel_link import MAX_FRAME_NBYTES

# More requests than any group has in flight; beyond that somebody has stopped voting.
MAX_OPEN_REQUESTS = 1 << 16
MAX_KEY_CHARS = 1024
_MAX_VOTES_NBYTES = MAX_FRAME_NBYTES - 64

encode = msgspec.msgpack.Encoder().encode
State = TypeVar("State", LeaderState, FollowerState)


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


class Request(Generic[State]):
    """One request of its own: its state, and the call that waits for its next ruling, if this rank has voted."""

    __slots__ = ("call", "due", "index", "key", "state")

    def __init__(self, key: str, state: State) -> None:
        self.key = key
        self.state: State = state
        self.call: Call | None = None
        self.index = 0
        self.due = float("inf")


class Ledger(ABC, Generic[State]):
    """All requests at one rank. It belongs to whoever holds its channel's lock.

    `outgoing` are (rank, message) pairs to be sent in order; whoever calls a method sends and clears them. `broken`
    says why no further vote is possible at this rank.
    """

    def __init__(self) -> None:
        self.outgoing: list[tuple[int, Votes | Kept | Rulings]] = []
        self.broken: str | None = None
        self._whole: dict[str, Call] = {}
        self._requests: dict[str, list[Request[State]]] = {}

    @abstractmethod
    def cast(self, call: Call) -> None:
        """Nothing; this rank votes on the requests of `call`.

        Raises:
            LocalProtocolError: a vote on one of the keys is open, or its round is another; nothing was cast then.
        """

    def foresee(self, call: Call) -> None:
        """Nothing; prepares, right after `cast` and while peers are at work, what is needed when they answer."""

    @abstractmethod
    def hear(self, rank: int, payload: bytes) -> None:
        """Nothing; takes what a peer says.

        Raises:
            RemoteProtocolError: it is no message that may come now.
        """

    @abstractmethod
    def lose(self, rank: int, cause: str) -> None:
        """Nothing; a peer is gone."""

    @abstractmethod
    def expire(self, call: Call, now: float) -> None:
        """Nothing; ends the waiting for those requests of `call` whose time has come."""

    @abstractmethod
    def _fresh_state(self) -> State: ...

    @abstractmethod
    def _step(self, state: State, event: Event) -> tuple[State, tuple[Effect, ...]]: ...

    @abstractmethod
    def _open(self, call: Call) -> None:
        """Nothing; takes the steps of a whole call that were put off."""

    def open_calls(self) -> set[Call]:
        """The calls that wait for a ruling."""
        waiting = {request.call for request in self._all_requests() if request.call is not None}
        return waiting | set(self._whole.values())

    def abandon(self, cause: str) -> None:
        """Nothing; every call that waits for a ruling is in doubt, and no further vote is possible."""
        self.broken = self.broken or cause
        for call in self.open_calls():
            for index in set(range(len(call.votes))) - set(call.rulings) - set(call.doubts):
                call.doubt(index, cause)
        self._whole.clear()
        self._requests.clear()

    def _all_requests(self) -> Iterator[Request[State]]:
        for requests in list(self._requests.values()):
            yield from tuple(requests)

    def _is_new(self, call: Call) -> bool:
        """Whether `call` may be held whole: no request of its keys is known."""
        keys = call.keys
        return call.is_first_round and self._whole.keys().isdisjoint(keys) and self._requests.keys().isdisjoint(keys)

    def _to_cast(self, key: str) -> Request[State]:
        """The oldest request of `key` that this rank has not voted on; a new one, not yet kept, if there is none."""
        requests = self._requests.get(key, [])
        if key in self._whole or any(request.call is not None for request in requests):
            raise LocalProtocolError(f"this rank's vote on {key!r} is still open: await its ruling before the next")
        for request in requests:
            if self._may_cast(request.state):
                return request
        if len(self._requests) >= MAX_OPEN_REQUESTS:
            raise LocalProtocolError(
                f"{len(self._requests)} requests are open already: a rank of this group has stopped voting"
            )
        return Request(key, self._fresh_state())

    @abstractmethod
    def _may_cast(self, state: State) -> bool: ...

    def _keep_request(self, request: Request[State]) -> None:
        requests = self._requests.setdefault(request.key, [])
        if request not in requests:
            requests.append(request)

    def _opened_by_peer(self, key: str) -> Request[State]:
        if len(self._requests) >= MAX_OPEN_REQUESTS:
            raise RemoteProtocolError(f"it is more than {MAX_OPEN_REQUESTS} requests ahead of this rank")
        return Request(key, self._fresh_state())

    def _take_remote(self, request: Request[State], event: Event) -> None:
        try:
            state, effects = self._step(request.state, event)
        except LocalProtocolError as error:
            raise RemoteProtocolError(f"it broke the order of the vote on {request.key!r}: {error}") from error
        self._keep_request(request)
        self._commit(request, state, effects)

    def _commit(self, request: Request[State], state: State, effects: tuple[Effect, ...]) -> None:
        request.state = state
        for effect in effects:
            if isinstance(effect, Conclude | Doubt):
                self._settle(request, effect)
            else:
                self._pass_on(request, effect)
        if state.is_over:
            requests = self._requests[request.key]
            requests.remove(request)
            if not requests:
                del self._requests[request.key]

    def _settle(self, request: Request[State], effect: Conclude | Doubt) -> None:
        call, request.call = request.call, None
        request.due = float("inf")
        if isinstance(effect, Doubt):
            self.broken = self.broken or effect.cause
        if call is None:
            return
        if isinstance(effect, Doubt):
            call.doubt(request.index, effect.cause)
        else:
            call.settle(request.index, effect.ruling)

    @abstractmethod
    def _pass_on(self, request: Request[State], effect: Effect) -> None: ...
