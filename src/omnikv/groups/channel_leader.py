"""The ledger of rank 0: it hears every ballot, rules, and announces."""

from __future__ import annotations

import struct
from collections.abc import Mapping

import msgspec

from omnikv.core.messages import Ballot, Kept, Ruling, Rulings, Votes
from omnikv.core.vote import Announce, Cast, Effect, Event, Expired, Heard, LeaderState, Lost, step_leader
from omnikv.errors import RemoteProtocolError
from omnikv.groups.channel_call import Call
from omnikv.groups.channel_ledger import Ledger, Request, Send, encode

_decode = msgspec.msgpack.Decoder(Votes).decode
_read_due = struct.Struct(">d").unpack_from
# A message of ballots: its head, `due_s` in eight bytes, and from there on nothing but the ballots.
_BALLOTS_AT = len(encode(Votes(0.0, ()))) - 1
_DUE_AT = _BALLOTS_AT - 8
_HEAD = encode(Votes(0.0, ()))[:_DUE_AT]
# So many bytes of its ballots tell a call from others, since they begin with its first key.
_TELLING_NBYTES = 1024


class LeaderLedger(Ledger[LeaderState]):
    """All requests at rank 0."""

    def __init__(self, size: int, lines: Mapping[int, Send]) -> None:
        super().__init__(lines)
        self._size = size
        self._lost: dict[int, str] = {}
        # Whole calls by the first bytes of their ballots.
        self._by_start: dict[bytes, Call] = {}
        self._announced: dict[int, list[tuple[str, Ruling]]] = {}

    def cast(self, call: Call) -> None:
        call.encoded = bytes(self._encode(call.votes))
        start = call.encoded[:_TELLING_NBYTES]
        if self._lost or start in self._by_start or not self._hold(call):
            self._cast_each(call)
            return
        self._by_start[start] = call
        if self._size == 1:
            self._keep_whole(call)

    def cast_alone(self, call: Call) -> tuple[bytes, bytes, int] | None:
        if self._whole or self._requests:
            return None
        ballots = bytes(self._encode(call.votes))
        return _HEAD, ballots, _BALLOTS_AT + len(ballots)

    def keep(self, call: Call) -> None:
        kept = encode(Kept(call.votes[0][0]))
        for send in self._lines.values():
            send(kept)
        call.left = 0

    def take_up(self, call: Call) -> None:
        self.cast(call)

    def hear(self, rank: int, payload: bytes) -> None:
        call = self._by_start.get(payload[_BALLOTS_AT : _BALLOTS_AT + _TELLING_NBYTES])
        if (
            call is not None
            and payload[_BALLOTS_AT:] == call.encoded
            and payload.startswith(_HEAD)
            and rank not in call.alike
        ):
            call.alike.append(rank)
            if len(call.alike) == self._size - 1:
                self._keep_whole(call)
            else:
                (due_s,) = _read_due(payload, _DUE_AT)
                if due_s < call.due:
                    call.hasten(due_s)
            return
        try:
            message = _decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RemoteProtocolError(f"it sent {len(payload)} bytes that are no ballots: {error}") from error
        for key, ballot in message.votes:
            self._hear_one(rank, key, ballot, message.due_s)
        self._seal()

    def lose(self, rank: int, cause: str) -> None:
        for call in set(self._whole.values()):
            self._open(call)
        self._lost[rank] = cause
        for request in self._all_requests():
            self._commit(request, *step_leader(request.state, Lost(rank, cause)))
        self._seal()

    def expire(self, call: Call, now: float) -> None:
        if call.votes and self._whole.get(call.votes[0][0]) is call:
            self._open(call)
        waiting = [request for key, _ in call.votes for request in self._requests.get(key, ()) if request.call is call]
        left = [request for request in waiting if min(request.due, call.deadline) > now]
        call.due = min([call.deadline, *(request.due for request in left)])
        for request in waiting:
            if request not in left:
                self._commit(request, *step_leader(request.state, Expired()))
        self._seal()

    def _keep_whole(self, call: Call) -> None:
        """Nothing; every rank cast the very ballots of `call`, and all can be kept."""
        self._release(call)
        # No rank is lost while a call is held whole.
        self.keep(call)
        if call.bell is not None:
            call.ring()

    def _release(self, call: Call) -> None:
        super()._release(call)
        del self._by_start[call.encoded[:_TELLING_NBYTES]]

    def _hear_one(self, rank: int, key: str, ballot: Ballot, due: float) -> None:
        whole = self._whole.get(key)
        if whole is not None:
            self._open(whole)
        requests = self._requests.get(key, [])
        request = next((request for request in requests if request.state.expects(rank)), None)
        if request is None:
            if any(request.state.final is None for request in requests):
                raise RemoteProtocolError(f"it voted on {key!r} again before the ruling")
            request = self._opened_by_peer(key)
        request.due = min(request.due, due)
        self._take_remote(request, Heard(rank, ballot))
        if request.call is not None:
            request.call.hasten(request.due)

    def _cast_each(self, call: Call) -> None:
        steps = []
        for key, ballot in call.votes:
            request = self._to_cast(key)
            steps.append((request, step_leader(request.state, Cast(ballot))))
        for index, (request, (state, effects)) in enumerate(steps):
            request.call, request.index = call, index
            call.hasten(request.due)
            self._keep_request(request)
            self._commit(request, state, effects)
        self._seal()

    def _open(self, call: Call) -> None:
        self._release(call)
        for index, (key, ballot) in enumerate(call.votes):
            request = Request(key, self._fresh_state())
            request.call, request.index, request.due = call, index, call.due
            self._keep_request(request)
            self._commit(request, *step_leader(request.state, Cast(ballot)))
            for rank in call.alike:
                self._commit(request, *step_leader(request.state, Heard(rank, ballot)))

    def _fresh_state(self) -> LeaderState:
        return LeaderState(size=self._size, lost=tuple(sorted(self._lost.items())))

    def _step(self, state: LeaderState, event: Event) -> tuple[LeaderState, tuple[Effect, ...]]:
        return step_leader(state, event)

    def _may_cast(self, state: LeaderState) -> bool:
        return state.final is None

    def _pass_on(self, request: Request[LeaderState], effect: Effect) -> None:
        if isinstance(effect, Announce):
            for rank in effect.ranks:
                self._announced.setdefault(rank, []).append((request.key, effect.ruling))

    def _seal(self) -> None:
        """Nothing; rulings made since the last message become one message a follower."""
        for rank, rulings in self._announced.items():
            self._lines[rank](encode(Rulings(tuple(rulings))))
        self._announced.clear()
