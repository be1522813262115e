"""What a rank knows of the requests its channel votes on: calls, the steps of each request, and what to send.

`omnikv.core.vote` gives every request a state and says what an event does to it. Here the states are kept, ballots and
rulings find theirs by key and order, and effects become settled calls and messages to send. No sockets, no clock.

Most of the time every rank casts the same ballots and each is kept. For that a call whose keys are all new, and whose
ballots have every role, is held *whole*: its steps are put off, and messages that would have it kept are known by their
bytes, without decoding. When all have come, every request is kept, which is what the steps come to (`rule` on equal
ballots that have every role). When anything else happens to one of its keys, the call is *opened* first: the steps that
were put off are taken, request by request, and then the event. A key is either in a whole call or has requests of its
own, never both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

import msgspec

from omnikv.core.messages import Ballot, Votes
from omnikv.core.vote import Conclude, Doubt, Effect, Event, FollowerState, LeaderState
from omnikv.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from omnikv.groups.channel_call import Call
from omnikv.groups.channel_link import MAX_FRAME_NBYTES

# More requests than any group has in flight; beyond that somebody has stopped voting.
MAX_OPEN_REQUESTS = 1 << 16

# A frame has room for what stands before the ballots.
_MAX_BALLOTS_NBYTES = MAX_FRAME_NBYTES - 64
# A buffer that had to hold more is not kept.
_LARGE_NBYTES = 1 << 20

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode

Send = Callable[[bytes | bytearray], None]
State = TypeVar("State", LeaderState, FollowerState)


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

    `broken` says why no further vote is possible at this rank.
    """

    def __init__(self, lines: Mapping[int, Send]) -> None:
        """`lines` lead to other ranks: they keep the order of messages, copy them, and neither raise nor call back."""
        self.broken: str | None = None
        self._lines = lines
        self._whole: dict[str, Call] = {}
        self._buffer = bytearray()
        self._requests: dict[str, list[Request[State]]] = {}

    @abstractmethod
    def cast(self, call: Call) -> None:
        """Nothing; this rank votes on the requests of `call`.

        Raises:
            ConfigError: the ballots are too long; nothing was cast then.
            LocalProtocolError: a vote on one of the keys is open, or its round is another; nothing was cast then.
        """

    @abstractmethod
    def cast_alone(self, call: Call) -> tuple[bytes, bytes, int] | None:
        """How each peer's next message begins and ends and how long it is, if all have `call` kept, which is first.

        It is cast, and no book is kept on it here. None, and it is not cast, while anything is known of other requests.

        Raises:
            ConfigError: the ballots are too long; nothing was cast then.
        """

    @abstractmethod
    def keep(self, call: Call) -> None:
        """Nothing; every peer said what has `call` kept."""

    @abstractmethod
    def take_up(self, call: Call) -> None:
        """Nothing; `call` was cast alone and is held here from now on, as if it had been cast here."""

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

    def _encode(self, ballots: Votes | Sequence[tuple[str, Ballot]]) -> bytearray:
        """Ballots as bytes, good until the next are encoded.

        Raises:
            ConfigError: they have no such form, or a longer one than may be sent.
        """
        buffer = self._buffer
        try:
            # Into a buffer that is there already: one that grows is copied again and again.
            _encoder.encode_into(ballots, buffer)
        except UnicodeEncodeError as error:
            raise ConfigError(f"a vote's key and texts must be encodable as UTF-8: {error}") from error
        if len(buffer) > _LARGE_NBYTES:
            self._buffer = bytearray()
            if len(buffer) > _MAX_BALLOTS_NBYTES:
                raise ConfigError(
                    f"ballots of {len(buffer)} bytes were cast together, at most {_MAX_BALLOTS_NBYTES} go out at once; "
                    "cast fewer at once or shorten their causes"
                )
        return buffer

    def _hold(self, call: Call) -> bool:
        """Whether `call` is held whole from now on: there is hope, and nothing is known of its keys yet."""
        if not call.foresee():
            return False
        whole, requests = self._whole, self._requests
        if whole or requests:
            for key in call.keys:
                if key in whole or key in requests:
                    return False
        for key in call.keys:
            whole[key] = call
        return True

    def _release(self, call: Call) -> None:
        """Nothing; `call` is not held whole any more."""
        whole = self._whole
        for key in call.keys:
            del whole[key]

    def _all_requests(self) -> Iterator[Request[State]]:
        for requests in list(self._requests.values()):
            yield from tuple(requests)

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
