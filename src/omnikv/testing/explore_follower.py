"""A follower in an exploration: its record, and everything that may happen to it next."""

from __future__ import annotations

from typing import NamedTuple

from omnikv.core.vote import Cast, Conclude, Doubt, Event, Expired, FollowerState, Lost, Report, Ruled
from omnikv.errors import LocalProtocolError
from omnikv.testing.explore_messages import NOTHING, Decided, Message, Move, Numbers, Vocabulary, without_words
from omnikv.testing.steps import Steps

LIVE, IN_DOUBT, DEAD, GONE = "live", "in doubt", "dead", "gone"

Book = tuple[tuple[int, FollowerState], ...]


class FollowerRank(NamedTuple):
    """A follower. A dead one may still have ballots under way; a gone one is known to be dead and has none.

    `book` holds the requests it knows of and has not finished, `opened` counts all that were ever in it.
    """

    status: str = LIVE
    done: int = 0
    opened: int = 0
    nth_round: int = 0
    held: int = NOTHING
    leader_lost: bool = False
    book: Book = ()
    up: tuple[Message, ...] = ()
    down: tuple[Message, ...] = ()


class Followers:
    """All records of followers by number, with the moves out of each, worked out once."""

    def __init__(self, steps: Steps, vocabulary: Vocabulary, requests: int) -> None:
        self._steps = steps
        self._vocabulary = vocabulary
        self._requests = requests
        self._numbers: Numbers[FollowerRank] = Numbers()
        self._moves: dict[tuple[int, bool], list[Move]] = {}
        self._pushed: dict[tuple[int, Message], int] = {}
        self._popped: dict[int, int] = {}
        self._orphaned: dict[int, int] = {}
        self.start = self._numbers.of(FollowerRank())
        self.gone = self._numbers.of(FollowerRank(status=GONE))

    def rank(self, number: int) -> FollowerRank:
        """The record of that number."""
        return self._numbers.values[number]

    def pushed(self, number: int, message: Message) -> int:
        """The record once `message` of the leader is under way to it."""
        key = (number, message)
        if key not in self._pushed:
            rank = self.rank(number)
            alive = rank.status in (LIVE, IN_DOUBT)
            self._pushed[key] = self._numbers.of(rank._replace(down=(*rank.down, message))) if alive else number
        return self._pushed[key]

    def popped(self, number: int) -> int:
        """The record once its oldest ballot under way has arrived."""
        if number not in self._popped:
            rank = self.rank(number)
            self._popped[number] = self._numbers.of(rank._replace(up=rank.up[1:]))
        return self._popped[number]

    def orphaned(self, number: int) -> int:
        """The record once the leader is dead, so that no ballot arrives any more."""
        if number not in self._orphaned:
            rank = self.rank(number)
            is_dead = rank.status in (DEAD, GONE)
            self._orphaned[number] = self.gone if is_dead else self._numbers.of(rank._replace(up=()))
        return self._orphaned[number]

    def is_waiting(self, number: int) -> bool:
        """Whether this rank lives and has requests to finish."""
        rank = self.rank(number)
        return rank.status == IN_DOUBT or (rank.status == LIVE and rank.done < self._requests)

    def moves(self, number: int, leader_is_alive: bool) -> list[Move]:
        """Everything that may happen at this rank, apart from the leader hearing of it."""
        key = (number, leader_is_alive)
        if key not in self._moves:
            self._moves[key] = list(self._find_moves(self.rank(number), leader_is_alive))
        return self._moves[key]

    def _find_moves(self, rank: FollowerRank, leader_is_alive: bool) -> list[Move]:
        if rank.status not in (LIVE, IN_DOUBT):
            return []
        dead = FollowerRank(status=DEAD, up=rank.up) if leader_is_alive else FollowerRank(status=GONE)
        moves = [Move(("crashes", NOTHING), self._numbers.of(dead), is_ordinary=False, is_crash=True)]
        if rank.status == IN_DOUBT:
            moves.append(Move(("leaves, being in doubt", NOTHING), self._numbers.of(dead)))
        if rank.down:
            moves.append(self._hear(rank))
        if not leader_is_alive and not rank.leader_lost:
            moves.append(self._lose_leader(rank))
        if rank.status == LIVE and rank.done < self._requests:
            state = dict(rank.book).get(rank.done) or self._fresh(rank)
            if state.phase == "fetching":
                choices = self._vocabulary.choices(rank.held, state.round, rank.nth_round)
                moves += [self._cast(rank, state, choice, leader_is_alive) for choice in choices]
            if state.phase == "voted":
                moves.append(self._expire(rank, state))
        return moves

    def _fresh(self, rank: FollowerRank) -> FollowerState:
        state = FollowerState(rank=1)
        return self._steps.follower(state, Lost(0, "gone"))[0] if rank.leader_lost else state

    def _cast(self, rank: FollowerRank, state: FollowerState, choice: int, leader_is_alive: bool) -> Move:
        ballot = self._vocabulary.ballots.values[choice]
        words = ("casts", choice)
        if state.round != rank.nth_round:
            broken = f"round {rank.nth_round} of a request is numbered {state.round}, as an earlier one was"
            return Move(words, NOTHING, broken=broken)
        return self._step(rank._replace(held=choice), rank.done, Cast(ballot), words, sends=leader_is_alive)

    def _hear(self, rank: FollowerRank) -> Move:
        message, rest = rank.down[0], rank._replace(down=rank.down[1:])
        words = ("hears", message.content)
        if rank.status == IN_DOUBT:
            request = rank.done
        else:
            index = self._steps.ruling_goes_to([state for _, state in rank.book])
            request = rank.opened if index is None else rank.book[index][0]
            if request != message.request:
                return Move(words, NOTHING, broken=f"a ruling on request {message.request} is taken for {request}'s")
        return self._step(rest, request, Ruled(self._vocabulary.rulings.values[message.content]), words)

    def _lose_leader(self, rank: FollowerRank) -> Move:
        words = ("loses the leader", NOTHING)
        move = Move(words, self._numbers.of(rank._replace(leader_lost=True, down=())))
        for request, _ in rank.book:
            move = self._step(self.rank(move.record), request, Lost(0, "gone"), words)
        return move

    def _expire(self, rank: FollowerRank, state: FollowerState) -> Move:
        words = ("reaches its deadline", NOTHING)
        move = self._step(rank, rank.done, Expired(), words)
        after = self.rank(move.record)
        if not move.broken and after.status == LIVE and after.done == rank.done:
            return move._replace(broken="its deadline does not end its waiting")
        return move._replace(is_ordinary=False)

    def _step(
        self, rank: FollowerRank, request: int, event: Event, words: tuple[str, int], *, sends: bool = False
    ) -> Move:
        book = dict(rank.book)
        try:
            state, effects = self._steps.follower(book.get(request) or self._fresh(rank), event)
        except LocalProtocolError as error:
            return Move(words, NOTHING, broken=f"the step refuses: {error}")
        opened = max(rank.opened, request + 1)
        after, decided, broken = rank._replace(opened=opened), None, ""
        for effect in effects:
            if isinstance(effect, Report) and sends:
                message = Message(request, rank.nth_round, self._vocabulary.ballots.of(effect.ballot))
                after = after._replace(up=(*after.up, message))
            elif isinstance(effect, Conclude) and effect.ruling.kind == "refetch":
                after = after._replace(nth_round=rank.nth_round + 1)
            elif isinstance(effect, Conclude):
                decided = Decided(request, effect.ruling.kind, effect.ruling.usable)
                after = after._replace(done=request + 1, nth_round=0, held=NOTHING)
            elif isinstance(effect, Doubt):
                after = after._replace(status=IN_DOUBT)
                if not (rank.leader_lost or isinstance(event, Expired | Lost)):
                    broken = "it is in doubt although no deadline passed and the leader is there"
        book[request] = _settled(state)
        if state.is_over and after.status == LIVE:
            del book[request]
        return Move(
            words, self._numbers.of(after._replace(book=tuple(sorted(book.items())))), decided=decided, broken=broken
        )


def _settled(state: FollowerState) -> FollowerState:
    early = None if state.early is None else without_words(state.early)
    return FollowerState(rank=state.rank, round=state.round, phase=state.phase, early=early, lost=state.lost)
