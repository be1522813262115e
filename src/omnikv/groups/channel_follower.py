"""The ledger of a rank other than 0: it reports its ballots and hears the rulings."""

from __future__ import annotations

import msgspec

from omnikv.core.messages import Kept, Ruling, Rulings, Votes
from omnikv.core.vote import Cast, Effect, Event, Expired, FollowerState, Lost, Report, Ruled, step_follower
from omnikv.errors import RemoteProtocolError
from omnikv.groups.channel_call import Call, encode
from omnikv.groups.channel_ledger import Ledger, Request

_decode = msgspec.msgpack.Decoder(Kept | Rulings).decode
LEADER = 0


class FollowerLedger(Ledger[FollowerState]):
    """All requests at one rank other than 0. With `shares_clock` the leader is told when this rank stops waiting."""

    def __init__(self, rank: int, *, shares_clock: bool) -> None:
        super().__init__()
        self._rank = rank
        self._shares_clock = shares_clock
        self._number = 0
        # Whole calls by the very bytes of the message that would keep them: the usual answer needs no decoding.
        self._kept_by: dict[bytes, Call] = {}

    def cast(self, call: Call) -> None:
        if not self._is_new(call):
            self._cast_each(call)
            return
        self._whole.update(dict.fromkeys(call.keys, call))
        call.number = self._report(call, call.encoded)

    def foresee(self, call: Call) -> None:
        if call.number >= 0 and call.can_be_kept:
            self._kept_by[encode(Kept(call.number))] = call
            call.foresee()

    def hear(self, rank: int, payload: bytes) -> None:
        call = self._kept_by.pop(payload, None)
        if call is not None:
            for key in call.keys:
                del self._whole[key]
            call.fulfil()
            return
        try:
            message = _decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RemoteProtocolError(f"it sent {len(payload)} bytes that are no rulings: {error}") from error
        if isinstance(message, Rulings):
            for key, ruling in message.rulings:
                self._hear_one(key, ruling)
        elif message.number >= self._number or not self.broken:
            # Once broken, this may answer a vote that is in doubt by now.
            raise RemoteProtocolError(f"it kept message {message.number}, which has no ballots to keep")

    def lose(self, rank: int, cause: str) -> None:
        for call in set(self._whole.values()):
            self._open(call)
        for request in self._all_requests():
            self._commit(request, *step_follower(request.state, Lost(rank, cause)))
        self.broken = self.broken or f"the leader is gone ({cause})"

    def expire(self, call: Call, now: float) -> None:
        if call.votes and self._whole.get(call.votes[0][0]) is call:
            self._open(call)
        for key, _ in call.votes:
            for request in tuple(self._requests.get(key, ())):
                if request.call is call:
                    self._commit(request, *step_follower(request.state, Expired()))

    def _hear_one(self, key: str, ruling: Ruling) -> None:
        whole = self._whole.get(key)
        if whole is not None:
            self._open(whole)
        request = next((request for request in self._requests.get(key, []) if request.state.early is None), None)
        if request is None and self.broken:
            # The answer to a vote that is in doubt by now; nothing is voted on here any more.
            return
        self._take_remote(request or self._opened_by_peer(key), Ruled(ruling))

    def _cast_each(self, call: Call) -> None:
        steps = []
        for key, ballot in call.votes:
            request = self._to_cast(key)
            steps.append((request, step_follower(request.state, Cast(ballot))))
        reported = [
            (request.key, effect.ballot)
            for request, (_, effects) in steps
            for effect in effects
            if isinstance(effect, Report)
        ]
        if reported:
            self._report(call, call.encoded if len(reported) == len(call.votes) else encode(reported))
        for index, (request, (state, effects)) in enumerate(steps):
            request.call, request.index = call, index
            self._keep_request(request)
            self._commit(request, state, effects)

    def _report(self, call: Call, encoded: bytes) -> int:
        due_us = max(int(call.deadline * 1e6), 1) if self._shares_clock else 0
        number = self._number
        self._number = number + 1
        self.outgoing.append((LEADER, Votes(number, due_us, encoded)))
        return number

    def _open(self, call: Call) -> None:
        for key in call.keys:
            del self._whole[key]
        self._kept_by.pop(encode(Kept(call.number)), None)
        for index, (key, ballot) in enumerate(call.votes):
            request = Request(key, self._fresh_state())
            request.call, request.index = call, index
            request.state, _ = step_follower(request.state, Cast(ballot))
            self._keep_request(request)

    def _fresh_state(self) -> FollowerState:
        return FollowerState(rank=self._rank)

    def _step(self, state: FollowerState, event: Event) -> tuple[FollowerState, tuple[Effect, ...]]:
        return step_follower(state, event)

    def _may_cast(self, state: FollowerState) -> bool:
        return state.phase == "fetching"

    def _pass_on(self, request: Request[FollowerState], effect: Effect) -> None:
        # A follower's only message is its report, which goes out with those of the same call.
        return
