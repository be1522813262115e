"""Rank 0 in an exploration: its record, everything that may happen to it next, and what its rulings must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from omnikv.core.messages import Ballot, Ruling
from omnikv.core.vote import Announce, Cast, Conclude, Event, Expired, Heard, LeaderState, Lost
from omnikv.errors import LocalProtocolError
from omnikv.testing.explore_ballots import is_sound_to_keep, right_decision, spell_ballots
from omnikv.testing.explore_messages import NOTHING, Decided, Message, Move, Numbers, Vocabulary, without_words
from omnikv.testing.steps import Steps

Book = tuple[tuple[int, LeaderState], ...]


class LeaderRank(NamedTuple):
    """Rank 0. `book` holds the requests whose books are not closed, `lost` the ranks that it knows to be dead."""

    is_alive: bool = True
    done: int = 0
    opened: int = 0
    nth_round: int = 0
    held: int = NOTHING
    lost: tuple[int, ...] = ()
    book: Book = ()


class Leaders:
    """All records of rank 0 by number, with the moves out of each, worked out once."""

    def __init__(self, steps: Steps, vocabulary: Vocabulary, ranks: int, requests: int) -> None:
        self._steps = steps
        self._vocabulary = vocabulary
        self._ranks = ranks
        self._requests = requests
        self._numbers: Numbers[LeaderRank] = Numbers()
        self._views: Numbers[tuple[object, ...]] = Numbers()
        self._moves: dict[int, list[Move]] = {}
        self._heard: dict[tuple[int, int, Message], Move] = {}
        self._lost: dict[tuple[int, int], Move] = {}
        self._views_of: dict[int, tuple[int, ...]] = {}
        self._permuted: dict[tuple[int, tuple[int, ...]], int] = {}
        self.start = self._numbers.of(LeaderRank())
        self.dead = self._numbers.of(LeaderRank(is_alive=False))

    def rank(self, number: int) -> LeaderRank:
        """The record of that number."""
        return self._numbers.values[number]

    def is_waiting(self, number: int) -> bool:
        """Whether rank 0 lives and has requests to finish."""
        rank = self.rank(number)
        return rank.is_alive and rank.done < self._requests

    def moves(self, number: int) -> list[Move]:
        """Everything that may happen at rank 0 by itself."""
        if number not in self._moves:
            self._moves[number] = self._find_moves(self.rank(number))
        return self._moves[number]

    def hear(self, number: int, follower: int, message: Message) -> Move:
        """Rank 0 hears the ballot `message` of the rank `follower`."""
        key = (number, follower, message)
        if key not in self._heard:
            self._heard[key] = self._hear(self.rank(number), follower, message)._replace(about=follower)
        return self._heard[key]

    def lose(self, number: int, follower: int) -> Move:
        """Rank 0 learns that the rank `follower` is dead."""
        key = (number, follower)
        if key not in self._lost:
            self._lost[key] = self._lose(self.rank(number), follower)
        return self._lost[key]

    def views(self, number: int) -> tuple[int, ...]:
        """For each follower a number for all that rank 0 knows of it: equal ones are interchangeable."""
        if number not in self._views_of:
            rank = self.rank(number)
            self._views_of[number] = tuple(self._views.of(_view(rank, follower)) for follower in self._followers)
        return self._views_of[number]

    def permuted(self, number: int, order: tuple[int, ...]) -> int:
        """The record when the follower at position i is the one that was at position `order[i]`."""
        key = (number, order)
        if key not in self._permuted:
            self._permuted[key] = self._numbers.of(_permute(self.rank(number), order))
        return self._permuted[key]

    @property
    def _followers(self) -> range:
        return range(1, self._ranks)

    def _find_moves(self, rank: LeaderRank) -> list[Move]:
        if not rank.is_alive:
            return []
        moves = [Move(("crashes", NOTHING), self.dead, is_ordinary=False, is_crash=True)]
        if rank.done >= self._requests:
            return moves
        state = dict(rank.book).get(rank.done) or self._fresh(rank)
        if state.ballots and state.ballots[0] is not None:
            move = self._step(rank, rank.done, Expired(), ("reaches its deadline", NOTHING))
            if not move.broken and self.rank(move.record).done == rank.done:
                move = move._replace(broken="its deadline does not end its waiting")
            return [*moves, move._replace(is_ordinary=False)]
        for choice in self._vocabulary.choices(rank.held, state.round, rank.nth_round):
            ballot = self._vocabulary.ballots.values[choice]
            move = self._step(rank._replace(held=choice), rank.done, Cast(ballot), ("casts", choice))
            if state.round != rank.nth_round:
                broken = f"round {rank.nth_round} of a request is numbered {state.round}, as an earlier one was"
                move = move._replace(broken=broken)
            moves.append(move)
        return moves

    def _fresh(self, rank: LeaderRank) -> LeaderState:
        state = LeaderState(size=self._ranks)
        for follower in rank.lost:
            state = self._steps.leader(state, Lost(follower, "gone"))[0]
        return state

    def _hear(self, rank: LeaderRank, follower: int, message: Message) -> Move:
        words = ("hears RANK's ballot of", message.content)
        index = self._steps.ballot_goes_to([state for _, state in rank.book], follower)
        request = rank.opened if index is None else rank.book[index][0]
        if request != message.request:
            return Move(words, NOTHING, broken=f"a ballot on request {message.request} counts for {request}")
        if request == rank.done and message.nth_round != rank.nth_round:
            return Move(
                words, NOTHING, broken=f"a ballot of round {message.nth_round} counts in round {rank.nth_round}"
            )
        return self._step(rank, request, Heard(follower, self._vocabulary.ballots.values[message.content]), words)

    def _lose(self, rank: LeaderRank, follower: int) -> Move:
        words = ("learns of the death of rank", follower)
        move = Move(words, self._numbers.of(rank._replace(lost=tuple(sorted({*rank.lost, follower})))))
        for request, _ in rank.book:
            after = self._step(self.rank(move.record), request, Lost(follower, "gone"), words)
            move = after._replace(
                sends=move.sends + after.sends,
                decided=move.decided or after.decided,
                broken=move.broken or after.broken,
            )
            if move.broken:
                break
        return move

    def _step(self, rank: LeaderRank, request: int, event: Event, words: tuple[str, int]) -> Move:
        book = dict(rank.book)
        before = book.get(request) or self._fresh(rank)
        try:
            state, effects = self._steps.leader(before, event)
        except LocalProtocolError as error:
            return Move(words, NOTHING, broken=f"the step refuses: {error}")
        after = rank._replace(opened=max(rank.opened, request + 1))
        decided, broken = None, ""
        sends: tuple[tuple[int, Message], ...] = ()
        for effect in effects:
            if isinstance(effect, Announce):
                sends += self._sends(effect, request, rank.nth_round if request == rank.done else 0)
            elif isinstance(effect, Conclude):
                broken = broken or _wrong(effect.ruling, _ballots(before, event, self._ranks), before, event)
                if effect.ruling.kind == "refetch":
                    after = after._replace(nth_round=rank.nth_round + 1)
                else:
                    decided = Decided(request, effect.ruling.kind, effect.ruling.usable)
                    after = after._replace(done=request + 1, nth_round=0, held=NOTHING)
        book[request] = _settled(state)
        if state.is_over:
            del book[request]
        record = self._numbers.of(after._replace(book=tuple(sorted(book.items()))))
        return Move(words, record, decided=decided, sends=sends, broken=broken)

    def _sends(self, effect: Announce, request: int, nth_round: int) -> tuple[tuple[int, Message], ...]:
        message = Message(request, nth_round, self._vocabulary.rulings.of(without_words(effect.ruling)))
        return tuple((follower, message) for follower in effect.ranks)


def _ballots(state: LeaderState, event: Event, size: int) -> list[Ballot | None]:
    ballots = list(state.ballots or (None,) * size)
    if isinstance(event, Cast):
        ballots[0] = event.ballot
    elif isinstance(event, Heard):
        ballots[event.rank] = event.ballot
    return ballots


def _wrong(ruling: Ruling, ballots: Sequence[Ballot | None], before: LeaderState, event: Event) -> str:
    """Which invariant a ruling breaks: it must be the right one on complete ballots, and a foreseen drop on others."""
    cast = [ballot for ballot in ballots if ballot is not None]
    if ruling.kind == "keep" and not is_sound_to_keep(ballots, ruling.usable):
        return "keep without every rank's ballot, equal in contents, on every required role"
    if len(cast) == len(ballots):
        right = right_decision(cast)
        got = (ruling.kind, ruling.usable, ruling.missing)
        return "" if got == right else f"ruled {got} on {spell_ballots(cast)}; right is {right}"
    lost = {rank for rank, _ in before.lost} | ({event.rank} if isinstance(event, Lost) else set())
    if ruling.kind != "drop":
        return f"{ruling.kind} before every rank has voted"
    if not isinstance(event, Expired) and not any(ballots[rank] is None for rank in lost):
        return "drop before every rank has voted, although none is lost and no deadline has passed"
    return ""


def _view(rank: LeaderRank, follower: int) -> tuple[object, ...]:
    return (
        follower in rank.lost,
        tuple(
            (
                request,
                state.ballots[follower] if state.ballots else None,
                any(lost == follower for lost, _ in state.lost),
                follower in state.owing,
            )
            for request, state in rank.book
        ),
    )


def _permute(rank: LeaderRank, order: tuple[int, ...]) -> LeaderRank:
    place = {was + 1: position + 1 for position, was in enumerate(order)}
    book = tuple(
        (
            request,
            replace(
                state,
                ballots=state.ballots and (state.ballots[0], *(state.ballots[was + 1] for was in order)),
                lost=tuple(sorted((place[lost], cause) for lost, cause in state.lost)),
                owing=frozenset(place[owing] for owing in state.owing),
            ),
        )
        for request, state in rank.book
    )
    return rank._replace(lost=tuple(sorted(place[lost] for lost in rank.lost)), book=book)


def _settled(state: LeaderState) -> LeaderState:
    return LeaderState(
        size=state.size,
        round=state.round,
        ballots=state.ballots,
        lost=state.lost,
        final=None if state.final is None else without_words(state.final),
        owing=state.owing,
    )
