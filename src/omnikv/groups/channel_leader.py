"""The ledger of rank 0: it hears every ballot, rules, and announces."""

from __future__ import annotations

import msgspec

from omnikv.core.messages import Ballot, Kept, Name, Ruling, Rulings, Votes
from omnikv.core.vote import Announce, Cast, Effect, Event, Expired, Heard, LeaderState, Lost, step_leader
from omnikv.errors import RemoteProtocolError
from omnikv.groups.channel_call import Call
from omnikv.groups.channel_ledger import Ledger, Request

_decode_votes = msgspec.msgpack.Decoder(Votes).decode
_decode_ballots = msgspec.msgpack.Decoder(list[tuple[Name, Ballot]]).decode


class LeaderLedger(Ledger[LeaderState]):
    """All requests at rank 0."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._lost: dict[int, str] = {}
        self._by_bytes: dict[bytes, Call] = {}
        self._announced: dict[int, list[tuple[str, Ruling]]] = {}

    def cast(self, call: Call) -> None:
        if self._lost or not self._is_new(call):
            self._cast_each(call)
            return
        self._whole.update(dict.fromkeys(call.keys, call))
        self._by_bytes[call.encoded] = call
        if self._size == 1:
            self._conclude_whole(call)

    def hear(self, rank: int, payload: bytes) -> None:
        try:
            message = _decode_votes(payload)
            due = message.due_us / 1e6 if message.due_us else float("inf")
            call = self._by_bytes.get(message.votes)
            if call is not None and rank not in call.heard:
                call.heard[rank] = message.number
                if len(call.heard) == self._size - 1:
                    self._conclude_whole(call)
                else:
                    call.hasten(due)
                return
            ballots = _decode_ballots(message.votes)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RemoteProtocolError(f"it sent {len(payload)} bytes that are no ballots: {error}") from error
        for key, ballot in ballots:
            self._hear_one(rank, key, ballot, due)
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

    def _conclude_whole(self, call: Call) -> None:
        """Nothing; every rank cast the very ballots of `call`."""
        if not call.can_be_kept:
            self._open(call)
            self._seal()
            return
        for key in call.keys:
            del self._whole[key]
        del self._by_bytes[call.encoded]
        for rank, number in call.heard.items():
            self.outgoing.append((rank, Kept(number)))
        call.fulfil()

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
        for key in call.keys:
            del self._whole[key]
        del self._by_bytes[call.encoded]
        for index, (key, ballot) in enumerate(call.votes):
            request = Request(key, self._fresh_state())
            request.call, request.index, request.due = call, index, call.due
            self._keep_request(request)
            self._commit(request, *step_leader(request.state, Cast(ballot)))
            for rank in call.heard:
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
            self.outgoing.append((rank, Rulings(tuple(rulings))))
        self._announced.clear()
