"""Who may try to get room next at a sender whose memory is full: first come, first served, and nobody tries in vain.

Theory of operation. Whoever arrives while nobody waits may try at once. One that finds no room waits, if it has time,
behind those that waited before it, and so does one that arrives while others wait: nobody overtakes, or a large request
would starve behind small ones. Only the first in the row may try, and only when room was freed since it last tried or
the one before it left. `freed` counts what was freed, so that room that came back during a try is not missed.

Pure: requests are tickets, any numbers that are given out once; how much room there is stays the memory's business.
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """The tickets that wait for room, in order, and how often room was freed."""

    waiting: tuple[int, ...] = ()
    freed: int = 0


class Arrive(NamedTuple):
    """A request wants room; one that is not patient does not wait for it."""

    ticket: int
    is_patient: bool


class NoRoom(NamedTuple):
    """A request tried, as `Try` said at that `freed`, and found no room."""

    ticket: int
    is_patient: bool
    freed: int


class RoomFreed(NamedTuple):
    """Something gave its room back."""


class Leave(NamedTuple):
    """A request has its room, or gave up."""

    ticket: int


class Try(NamedTuple):
    """This request may try now."""

    ticket: int
    freed: int


Event = Arrive | NoRoom | RoomFreed | Leave


def step(row: Row, event: Event) -> tuple[Row, tuple[Try, ...]]:
    """The next state, and who may try."""
    match event:
        case Arrive(ticket, is_patient):
            return (_wait(row, ticket, is_patient), ()) if row.waiting else (row, (Try(ticket, row.freed),))
        case NoRoom(ticket, is_patient, freed):
            is_first = row.waiting[:1] in ((), (ticket,))
            if freed != row.freed and is_first:
                return row, (Try(ticket, row.freed),)
            return _wait(row, ticket, is_patient), ()
        case RoomFreed():
            row = Row(row.waiting, row.freed + 1)
            return row, _first(row)
        case Leave(ticket):
            if ticket not in row.waiting:
                return row, ()
            after = Row(tuple(other for other in row.waiting if other != ticket), row.freed)
            return after, _first(after) if row.waiting[0] == ticket else ()


def _wait(row: Row, ticket: int, is_patient: bool) -> Row:
    return Row((*row.waiting, ticket), row.freed) if is_patient and ticket not in row.waiting else row


def _first(row: Row) -> tuple[Try, ...]:
    return (Try(row.waiting[0], row.freed),) if row.waiting else ()
