"""A payload's life, event by event: D08, D09, D22, D23, D28 as the pure steps have them."""

import itertools

import pytest

from omnikv.core.keys import Edge, PayloadId
from omnikv.core.lease import (
    Abort,
    Acknowledge,
    Answer,
    Close,
    Drop,
    Effect,
    End,
    Fail,
    GiveBack,
    Interest,
    Lapse,
    Life,
    NoInterest,
    Phase,
    Publish,
    Reserve,
    Take,
    TimePassed,
    answer,
    error_of,
    step,
)
from omnikv.errors import Aborted, AlreadyConsumed, Expired, LocalProtocolError, ProducerFailed

TTL_S = 1.0


def live(*events, life=None, now=0.0):
    """The state after `events`, and every effect on the way."""
    life, effects = life or Life(), []
    for event in events:
        life, more = step(life, event, now)
        effects += more
    return life, effects


def ready(num_readers=1, ttl_s=TTL_S, generation=1):
    return live(Reserve(generation, num_readers, ttl_s), Publish(generation))[0]


def test_d08_every_declared_reader_gets_a_lease_and_the_room_is_freed_after_the_last_one():
    life = ready(num_readers=3)
    for reader in range(3):
        assert answer(life, reader) is Answer.TAKE
        life, effects = live(Take(reader, reader, f"process {reader}"), life=life)
        assert effects == []
    for reader in (2, 0):
        life, effects = live(Acknowledge(reader, f"process {reader}"), life=life)
        assert Effect.FREE_ROOM not in effects
        assert answer(life, reader) == End("released", 1, f"reader {reader} has used it")
    assert answer(life, 3) == End("released", 1, "reader 3 is not one of its 3")
    life, effects = live(Acknowledge(1, "process 1"), life=life)
    assert (life.phase, effects.count(Effect.FREE_ROOM)) == (Phase.RELEASED, 1)


def test_a_reader_has_one_lease_at_a_time_and_others_are_not_held_up_by_it():
    life, _ = live(Take(1, 0, "a"), life=ready(num_readers=2))
    assert answer(life, 0) is Answer.WAIT
    assert answer(life, 1) is Answer.TAKE
    with pytest.raises(LocalProtocolError, match="not possible"):
        step(life, Take(2, 0, "a"), 0.0)


def test_d09_interest_stops_the_clock_and_its_end_starts_it_anew():
    life, _ = live(Interest("a"), life=ready(), now=0.5)
    life, effects = live(TimePassed(), life=life, now=100.0)
    assert (life.phase, effects) == (Phase.READY, [])
    life, _ = live(NoInterest("a"), life=life, now=100.0)
    life, _ = live(TimePassed(), life=life, now=100.9)
    assert life.phase is Phase.READY
    life, effects = live(TimePassed(), life=life, now=101.0)
    assert life.phase is Phase.EXPIRED
    assert effects.count(Effect.FREE_ROOM) == 1


def test_d09_the_clock_starts_with_the_last_chunk_and_not_with_the_reservation():
    life, _ = live(Reserve(1, 1, TTL_S))
    life, _ = live(Publish(1), life=life, now=50.0)
    assert life.expires_at == 51.0


def test_d09_interest_from_before_the_payload_counts():
    life, _ = live(Interest("a"), Reserve(1, 1, TTL_S), Publish(1))
    assert life.expires_at is None


def test_what_is_leased_does_not_expire_and_what_comes_back_gets_its_time_anew():
    life, _ = live(Take(1, 0, "a"), life=ready(), now=0.5)
    life, _ = live(GiveBack(1, "a"), life=life, now=99.0)
    assert (life.phase, life.expires_at) == (Phase.READY, 100.0)


def test_d22_an_expired_generation_is_never_read():
    life = ready(generation=7)
    with pytest.raises(LocalProtocolError):
        step(life, Take(1, 0, "a"), TTL_S)
    life, _ = live(TimePassed(), life=life, now=TTL_S)
    end = answer(life, 0)
    assert (end.how, end.generation) == ("expired", 7)


@pytest.mark.parametrize("order", list(itertools.permutations([Abort("gone"), Acknowledge(1, "a"), Abort("again")])))
def test_d23_abort_and_acknowledge_in_any_order_release_once(order):
    life, _ = live(Take(1, 0, "a"), life=ready())
    life, effects = live(*order, *order, GiveBack(1, "a"), TimePassed(), life=life)
    assert effects.count(Effect.FREE_ROOM) == 1
    assert life.phase is (Phase.RELEASED if isinstance(order[0], Acknowledge) else Phase.ABORTED)


@pytest.mark.parametrize("order", list(itertools.permutations([Abort("gone"), Fail("broken"), TimePassed()])))
def test_d23_the_first_end_counts(order):
    life, effects = live(*order, life=ready(), now=TTL_S)
    assert effects.count(Effect.FREE_ROOM) == 1
    assert life.phase is Phase.EXPIRED


def test_d28_a_second_life_has_its_own_generation_and_late_words_of_the_first_do_nothing():
    life, _ = live(Take(1, 0, "a"), Acknowledge(1, "a"), life=ready())
    life, _ = live(Reserve(2, 1, TTL_S), Publish(2), life=life)
    assert answer(life, 0) is Answer.TAKE
    before = life
    life, effects = live(Acknowledge(1, "a"), GiveBack(1, "a"), Drop(1), life=life)
    assert (life, effects) == (before, [])
    with pytest.raises(LocalProtocolError):
        step(life, Publish(1), 0.0)


@pytest.mark.parametrize("end", [Abort("gone"), Fail("broken")])
def test_room_that_is_written_to_is_freed_when_its_writer_is_done(end):
    life, effects = live(Reserve(1, 1, TTL_S), end)
    assert Effect.FREE_ROOM not in effects
    with pytest.raises(LocalProtocolError):
        step(life, Publish(1), 0.0)
    _, effects = live(Drop(1), Drop(1), life=life)
    assert effects.count(Effect.FREE_ROOM) == 1


@pytest.mark.parametrize("end", [Abort("gone"), Fail("broken")])
def test_room_that_is_read_is_freed_when_its_last_reader_is_done(end):
    life, effects = live(Take(1, 0, "a"), Take(2, 1, "b"), end, GiveBack(1, "a"), life=ready(num_readers=2))
    assert Effect.FREE_ROOM not in effects
    with pytest.raises(LocalProtocolError):
        step(life, Reserve(2, 1, TTL_S), 0.0)
    _, effects = live(Acknowledge(2, "b"), life=life)
    assert effects[0] is Effect.FREE_ROOM


def test_an_identity_may_end_before_it_is_there_and_live_after_that():
    life, effects = live(Fail("no GPU"))
    assert effects == [Effect.LOOK_AGAIN]
    assert answer(life, 0) == End("failed", 0, "no GPU")
    life, _ = live(Reserve(1, 1, TTL_S), life=life)
    assert answer(life, 0) is Answer.WAIT


def test_an_acknowledgement_and_every_end_take_interest_back():
    life, _ = live(Interest("a"), Interest("b"), Take(1, 0, "a"), Acknowledge(1, "a"), life=ready(num_readers=2))
    assert life.interest == {"b"}
    life, _ = live(Abort("gone"), life=life)
    assert not life.interest


def lapsed(life=None):
    """A payload that process "a" had leased when its connection broke; it may be heard again as "a, back"."""
    return live(Take(1, 0, "a"), Lapse(1, "a", "a, back"), life=life or ready())[0]


def test_an_acknowledgement_that_was_lost_counts_when_it_is_said_again():
    life = lapsed()
    assert answer(life, 0) is Answer.TAKE
    life, effects = live(Acknowledge(1, "a, back"), Acknowledge(1, "a, back"), life=life)
    assert (life.phase, effects.count(Effect.FREE_ROOM)) == (Phase.RELEASED, 1)


@pytest.mark.parametrize(
    "event", [Acknowledge(1, "a"), Acknowledge(1, "b"), Acknowledge(2, "a, back"), GiveBack(1, "a, back")]
)
def test_only_the_name_that_was_noted_may_acknowledge_a_lapsed_lease(event):
    life = lapsed()
    assert live(event, life=life) == (life, [])


def test_what_was_leased_anew_since_is_not_acknowledged_by_what_is_said_of_an_earlier_lease():
    life, _ = live(Take(2, 0, "b"), Acknowledge(1, "a, back"), life=lapsed())
    assert (life.phase, answer(life, 0)) == (Phase.READY, Answer.WAIT)
    life, _ = live(GiveBack(2, "b"), Acknowledge(1, "a, back"), life=life)
    assert answer(life, 0) is Answer.TAKE


def test_a_lapsed_lease_of_one_reader_is_nothing_to_the_others():
    life, _ = live(Take(2, 1, "b"), Acknowledge(2, "b"), life=lapsed(ready(num_readers=2)))
    life, effects = live(Acknowledge(1, "a, back"), life=life)
    assert (life.phase, effects.count(Effect.FREE_ROOM)) == (Phase.RELEASED, 1)


def test_a_lapsed_lease_does_not_stop_the_clock_nor_outlive_its_payload():
    life, _ = live(TimePassed(), life=lapsed(), now=TTL_S)
    assert life.phase is Phase.EXPIRED
    assert live(Acknowledge(1, "a, back"), life=life, now=TTL_S) == (life, [])
    life, _ = live(Reserve(2, 1, TTL_S), Publish(2), Acknowledge(1, "a, back"), life=life, now=TTL_S)
    assert answer(life, 0) is Answer.TAKE


def test_a_lease_of_what_has_failed_is_over_when_it_lapses():
    life, _ = live(Take(1, 0, "a"), Fail("broken"), life=ready())
    life, effects = live(Lapse(1, "a", "a, back"), life=life)
    assert effects[0] is Effect.FREE_ROOM
    assert life.lapsed == ()


def test_closing_frees_whatever_is_held():
    life, _ = live(Take(1, 0, "a"), life=ready())
    life, effects = live(Close(), Close(), life=life)
    assert effects.count(Effect.FREE_ROOM) == 1
    assert life == Life()


def test_nothing_is_said_again_where_nothing_changed():
    life = ready()
    for event in (Interest("a"), NoInterest("a"), TimePassed(), GiveBack(5, "a"), Acknowledge(5, "a"), Drop(1)):
        assert live(event, life=life)[1] == []


@pytest.mark.parametrize(
    ("how", "kind", "words", "consumed"),
    [
        ("failed", ProducerFailed, "the sender failed n/a/b/0/r1/primary/0/1/2: why", False),
        ("aborted", Aborted, "the sender aborted n/a/b/0/r1/primary/0/1/2: why", False),
        ("expired", Expired, "has expired .generation 3.: why", False),
        ("released", AlreadyConsumed, "was already consumed .generation 3.: why", True),
    ],
)
def test_every_end_has_its_error(how, kind, words, consumed):
    edge = Edge(from_stage="a", to_stage="b", namespace="n")
    payload = PayloadId(edge=edge, transfer_id="r1", source_rank=1, target_rank=2)
    error = error_of(payload, End(how, 3, "why"))
    assert type(error) is kind
    assert (error.request_id, error.rank, error.consumed) == ("r1", 1, consumed)
    with pytest.raises(kind, match=words):
        raise error
