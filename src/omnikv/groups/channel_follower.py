"""The ledger of a rank other than 0: it reports its ballots and hears the rulings."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from omnikv.core.messages import Kept, Ruling, Rulings, Votes
from omnikv.core.vote import Cast, Effect, Event, Expired, FollowerState, Lost, Report, Ruled, step_follower
from omnikv.errors import RemoteProtocolError
from omnikv.groups.channel_call import Call
from omnikv.groups.channel_ledger import Ledger, Request, Send, encode

_decode = msgspec.msgpack.Decoder(Kept | Rulings).decode
LEADER = 0
_NO_DUE_S = float("inf")


class FollowerLedger(Ledger[FollowerState]):
    """All requests at one rank other than 0. With `shares_clock` the leader is told when this rank stops waiting."""

    def __init__(self, rank: int, lines: Mapping[int, Send], *, shares_clock: bool) -> None:
        super().__init__(lines)
        self._rank = rank
        self._report = lines[LEADER]
        self._shares_clock = shares_clock

    def cast(self, call: Call) -> None:
        message = self._encode(Votes(call.deadline if self._shares_clock else _NO_DUE_S, call.votes))
        if self._hold(call):
            self._report(message)
        else:
            self._cast_each(call)

    def cast_alone(self, call: Call) -> tuple[bytes, bytes, int] | None:
        if self._whole or self._requests:
            return None
        self._report(self._encode(Votes(call.deadline if self._shares_clock else _NO_DUE_S, call.votes)))
        kept = encode(Kept(call.votes[0][0]))
        return kept, b"", len(kept)

    def keep(self, call: Call) -> None:
        call.left = 0

    def take_up(self, call: Call) -> None:
        if not self._hold(call):
            self._note_each(call)

    def hear(self, rank: int, payload: bytes) -> None:
        try:
            message = _decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RemoteProtocolError(f"it sent {len(payload)} bytes that are no rulings: {error}") from error
        if isinstance(message, Rulings):
            for key, ruling in message.rulings:
                self._hear_one(key, ruling)
            return
        call = self._whole.get(message.key)
        if call is not None:
            self._release(call)
            self.keep(call)
            if call.bell is not None:
                call.ring()
        elif not self.broken:
            # Once broken, this may answer a vote that is in doubt by now.
            raise RemoteProtocolError(f"it keeps what was cast with {message.key!r}, and no vote on that can be kept")

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
            self._report(self._encode(Votes(call.deadline if self._shares_clock else _NO_DUE_S, reported)))
        for index, (request, (state, effects)) in enumerate(steps):
            request.call, request.index = call, index
            self._keep_request(request)
            self._commit(request, state, effects)

    def _open(self, call: Call) -> None:
        self._release(call)
        self._note_each(call)

    def _note_each(self, call: Call) -> None:
        """Nothing; takes the steps of a call whose ballots are reported already."""
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
