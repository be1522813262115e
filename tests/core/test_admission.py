"""Who may try for room next: first come first served, never in vain, and nobody is forgotten."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omnikv.core.admission import Arrive, Leave, NoRoom, RoomFreed, Row, Try, step


def told(row, *events):
    turns = []
    for event in events:
        row, more = step(row, event)
        turns += more
    return row, turns


def test_whoever_arrives_while_nobody_waits_tries_at_once():
    _, turns = told(Row(), Arrive(1, is_patient=False), Arrive(2, is_patient=False))
    assert turns == [Try(1, 0), Try(2, 0)]


def test_one_that_finds_no_room_waits_and_others_wait_behind_it():
    row, _ = told(Row(), Arrive(1, True), NoRoom(1, True, 0))
    row, turns = told(row, Arrive(2, True), Arrive(3, False))
    assert row.waiting == (1, 2)
    assert turns == []
    row, turns = told(row, RoomFreed())
    assert turns == [Try(1, 1)]
    _, turns = told(row, Leave(1))
    assert turns == [Try(2, 1)]


def test_the_impatient_never_wait():
    row, _ = told(Row(), Arrive(1, False), NoRoom(1, False, 0), Leave(1))
    assert row.waiting == ()


def test_room_that_came_back_during_a_try_is_not_missed():
    row, _ = told(Row(), Arrive(1, True), RoomFreed())
    row, turns = told(row, NoRoom(1, True, 0))
    assert (row.waiting, turns) == ((), [Try(1, 1)])


def test_one_in_the_middle_that_gives_up_wakes_nobody():
    row = Row(waiting=(1, 2, 3))
    row, turns = told(row, Leave(2))
    assert (row.waiting, turns) == ((1, 3), [])


class Shop(RuleBasedStateMachine):
    """Requests of any size at a memory of ten pieces, which the naive account hands out itself."""

    def __init__(self):
        super().__init__()
        self.row = Row()
        self.free = 10
        self.sizes = {}
        self.admitted = []
        self.queue = []
        self.next = 1

    def see(self, event):
        self.row, turns = step(self.row, event)
        for turn in turns:
            self.attempt(turn)

    def attempt(self, turn):
        assert not self.queue or self.queue[0] == turn.ticket, "somebody overtook"
        size = self.sizes[turn.ticket]
        if size <= self.free:
            self.free -= size
            self.admitted.append(turn.ticket)
            if turn.ticket in self.queue:
                self.queue.remove(turn.ticket)
            self.see(Leave(turn.ticket))
        else:
            if turn.ticket not in self.queue:
                self.queue.append(turn.ticket)
            self.see(NoRoom(turn.ticket, True, turn.freed))

    @rule(size=st.integers(1, 10))
    def arrive(self, size):
        ticket, self.next = self.next, self.next + 1
        self.sizes[ticket] = size
        if self.queue:
            self.queue.append(ticket)
        self.see(Arrive(ticket, True))

    @precondition(lambda self: self.admitted)
    @rule(data=st.data())
    def free_one(self, data):
        ticket = data.draw(st.sampled_from(self.admitted))
        self.admitted.remove(ticket)
        self.free += self.sizes.pop(ticket)
        self.see(RoomFreed())

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def give_up(self, data):
        ticket = data.draw(st.sampled_from(self.queue))
        self.queue.remove(ticket)
        self.see(Leave(ticket))

    @invariant()
    def the_row_is_the_queue(self):
        assert list(self.row.waiting) == self.queue

    @invariant()
    def nobody_waits_for_room_that_is_there(self):
        assert not self.queue or self.sizes[self.queue[0]] > self.free


TestShop = Shop.TestCase
TestShop.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
