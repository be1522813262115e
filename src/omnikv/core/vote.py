"""The steps by which the ranks of a group come to one ruling on a request, and to no two.

Theory of operation. Ranks that run a request in lockstep must take the same way. Each rank fetches what it needs and
casts exactly one ballot a round, whatever happened to it; rank 0, the leader, hears all ballots of a round, rules once
with `rule`, and announces the ruling. "Keep" and "drop" end the request; "refetch" starts another round, in which only
what is missing is fetched and every rank votes again. So the leader is the one place where a request is decided:

* A rank that does not vote by the leader's deadline, or whose connection ends, cannot stop the others: no ruling to
  keep can exist without its ballot, so the leader may drop.
* A follower that voted and hears nothing by its deadline, or loses the leader, does not know which way its peers went.
  It never takes that for "drop": it is in doubt, and its group must be torn down.
* A ballot that comes after its request was dropped is answered with that ruling and counts for nothing else; a ballot
  names its round, so one of an earlier round cannot be counted in a later one.

`step_leader` and `step_follower` are these rules as pure functions from a state and an event to a state and effects;
an event that a state cannot take raises `LocalProtocolError` with the history. Time, connections and fetching belong to
the caller. `rule` itself depends on the ballots alone, so a group that shows every ballot to every rank may also let
each rank rule for itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from omnikv.core.messages import Ballot, Ruling
from omnikv.core.verdict import WHOLE_RANK, rule
from omnikv.errors import LocalProtocolError

# Events


@dataclass(frozen=True, slots=True)
class Cast:
    """This rank casts its own ballot."""

    ballot: Ballot


@dataclass(frozen=True, slots=True)
class Heard:
    """The leader hears a follower's ballot."""

    rank: int
    ballot: Ballot


@dataclass(frozen=True, slots=True)
class Ruled:
    """A follower hears the leader's ruling."""

    ruling: Ruling


@dataclass(frozen=True, slots=True)
class Lost:
    """A peer's connection ended: for a follower only the leader's matters."""

    rank: int
    cause: str


@dataclass(frozen=True, slots=True)
class Expired:
    """This rank's deadline for the request passed, after it cast its ballot."""


# Effects


@dataclass(frozen=True, slots=True)
class Report:
    """Send this rank's ballot to the leader."""

    ballot: Ballot


@dataclass(frozen=True, slots=True)
class Announce:
    """Send the ruling to these followers."""

    ranks: tuple[int, ...]
    ruling: Ruling


@dataclass(frozen=True, slots=True)
class Conclude:
    """Give this rank's caller the ruling: it ends the request, or asks for another round."""

    ruling: Ruling


@dataclass(frozen=True, slots=True)
class Doubt:
    """Tell this rank's caller that it voted and cannot learn the ruling."""

    cause: str


Event = Cast | Heard | Ruled | Lost | Expired
Effect = Report | Announce | Conclude | Doubt


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderState:
    """One request at rank 0. `owing` are ranks whose ballot is still to come although the request was dropped."""

    size: int
    round: int = 0
    ballots: tuple[Ballot | None, ...] = ()
    lost: tuple[tuple[int, str], ...] = ()
    final: Ruling | None = None
    owing: frozenset[int] = frozenset()
    history: tuple[str, ...] = ()

    @property
    def is_over(self) -> bool:
        """Whether nothing more can come for this request."""
        return self.final is not None and not self.owing

    def expects(self, rank: int) -> bool:
        """Whether a ballot of `rank` is still to come for this request."""
        return rank in self.owing if self.final else rank not in dict(self.lost) and self._ballot(rank) is None

    def _ballot(self, rank: int) -> Ballot | None:
        return self.ballots[rank] if self.ballots else None


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerState:
    """One request at a rank other than 0. `early` is a ruling that came before this rank cast its ballot."""

    rank: int
    round: int = 0
    phase: Literal["fetching", "voted", "over"] = "fetching"
    early: Ruling | None = None
    lost: str | None = None
    history: tuple[str, ...] = ()

    @property
    def is_over(self) -> bool:
        """Whether this rank knows the end of this request, or knows that it cannot know it."""
        return self.phase == "over"


def step_leader(state: LeaderState, event: Event) -> tuple[LeaderState, tuple[Effect, ...]]:
    """The state after `event` at rank 0, and what to do.

    Raises:
        LocalProtocolError: this state cannot take this event.
    """
    state = replace(state, history=(*state.history, _name(event)), ballots=state.ballots or (None,) * state.size)
    match event:
        case Cast(ballot) if state.final is None and state.ballots[0] is None:
            return _rule_if_complete(_with_ballot(state, 0, ballot))
        case Heard(rank, ballot) if 0 < rank < state.size and state.expects(rank):
            if state.final is None:
                return _rule_if_complete(_with_ballot(state, rank, ballot))
            # It was told when the request was dropped; its ballot only ends the waiting for it.
            return replace(state, owing=state.owing - {rank}), ()
        case Lost(rank, cause) if 0 < rank < state.size:
            lost = tuple(sorted({**dict(state.lost), rank: cause}.items()))
            return _rule_if_complete(replace(state, lost=lost, owing=state.owing - {rank}))
        case Expired() if state.ballots[0] is not None and state.final is None:
            return _drop(state, "did not vote by the deadline")
    raise _cannot(state, event)


def step_follower(state: FollowerState, event: Event) -> tuple[FollowerState, tuple[Effect, ...]]:
    """The state after `event` at a rank other than 0, and what to do.

    Raises:
        LocalProtocolError: this state cannot take this event.
    """
    state = replace(state, history=(*state.history, _name(event)))
    match event:
        case Cast(ballot) if state.phase == "fetching" and ballot.round == state.round:
            return _cast_as_follower(state, ballot)
        case Ruled(ruling) if state.phase == "voted" and ruling.round == state.round:
            if ruling.kind == "refetch":
                return replace(state, phase="fetching", round=state.round + 1), (Conclude(ruling),)
            return replace(state, phase="over"), (Conclude(ruling),)
        case Ruled(ruling) if state.phase == "fetching" and ruling.kind == "drop" and ruling.round == state.round:
            # Only "drop" needs no ballot of ours; this rank still votes, so that the leader's books close.
            return replace(state, early=ruling), ()
        case Lost(0, cause) if state.phase == "fetching":
            return replace(state, lost=cause), ()
        case Lost(0, cause) if state.phase == "voted":
            return replace(state, phase="over"), (Doubt(f"the leader is gone ({cause})"),)
        case Expired() if state.phase == "voted":
            return replace(state, phase="over"), (Doubt("no ruling came by the deadline"),)
        case Ruled() | Lost() if state.phase == "over":
            return state, ()
    raise _cannot(state, event)


def _cast_as_follower(state: FollowerState, ballot: Ballot) -> tuple[FollowerState, tuple[Effect, ...]]:
    if state.early is not None:
        return replace(state, phase="over"), (Report(ballot), Conclude(state.early))
    if state.lost is not None:
        return replace(state, phase="over"), (Doubt(f"the leader is gone ({state.lost})"),)
    return replace(state, phase="voted"), (Report(ballot),)


def _with_ballot(state: LeaderState, rank: int, ballot: Ballot) -> LeaderState:
    if ballot.round != state.round:
        raise _cannot(state, Heard(rank, ballot))
    return replace(state, ballots=(*state.ballots[:rank], ballot, *state.ballots[rank + 1 :]))


def _rule_if_complete(state: LeaderState) -> tuple[LeaderState, tuple[Effect, ...]]:
    if state.final is not None or state.ballots[0] is None:
        return state, ()
    if any(state.ballots[rank] is None for rank, _ in state.lost):
        return _drop(state, "has not voted yet")
    ballots = [ballot for ballot in state.ballots if ballot is not None]
    if len(ballots) < state.size:
        return state, ()
    ruling = rule(ballots)
    effects = (Announce(_living_followers(state), ruling), Conclude(ruling))
    if ruling.kind != "refetch":
        return replace(state, final=ruling), effects
    fresh = replace(state, round=state.round + 1, ballots=(None,) * state.size)
    return fresh, effects


def _drop(state: LeaderState, why_unheard: str) -> tuple[LeaderState, tuple[Effect, ...]]:
    lost = dict(state.lost)
    unheard = [rank for rank, ballot in enumerate(state.ballots) if ballot is None]
    causes = [(rank, WHOLE_RANK, f"gone ({lost[rank]})" if rank in lost else why_unheard) for rank in unheard]
    causes += [
        (rank, entry.role, entry.cause or entry.standing)
        for rank, ballot in enumerate(state.ballots)
        if ballot is not None
        for entry in ballot.roles
        if entry.standing != "have"
    ]
    ruling = Ruling("drop", state.round, causes=tuple(sorted(causes)))
    dropped = replace(state, final=ruling, owing=frozenset(unheard) - set(lost))
    return dropped, (Announce(_living_followers(state), ruling), Conclude(ruling))


def _living_followers(state: LeaderState) -> tuple[int, ...]:
    lost = dict(state.lost)
    return tuple(rank for rank in range(1, state.size) if rank not in lost)


def _name(event: Event) -> str:
    match event:
        case Cast(ballot):
            return f"cast round {ballot.round}"
        case Heard(rank, ballot):
            return f"heard rank {rank} round {ballot.round}"
        case Ruled(ruling):
            return f"ruled {ruling.kind} round {ruling.round}"
        case Lost(rank, _):
            return f"lost rank {rank}"
    return "expired"


def _cannot(state: LeaderState | FollowerState, event: Event) -> LocalProtocolError:
    return LocalProtocolError(
        f"a vote in round {state.round} cannot take this now: {_name(event)}; before it came "
        f"{', '.join(state.history[:-1]) or 'nothing'}",
        history=state.history,
    )
