"""A room that a peer writes into is handed out again only when no byte can come any more, whatever is said when."""

import itertools

import pytest

from omnikv.core.landing import Abandon, Fenced, Landing, Phase, TimePassed, WriterGone, Written, step

GRACE_S = 2.0


def after(*events, now=0.0):
    landing = Landing()
    for event in events:
        landing = step(landing, event, now)
    return landing.phase


@pytest.mark.parametrize(
    ("events", "phase"),
    [
        ([], Phase.LANDING),
        ([Written()], Phase.LANDED),
        ([Written(), Abandon()], Phase.FREE),
        ([Abandon()], Phase.QUARANTINED),
        ([Abandon(), Written()], Phase.FREE),
        ([Abandon(), Fenced()], Phase.FREE),
        ([Fenced()], Phase.FREE),
        ([Written(), Fenced()], Phase.LANDED),
        ([Written(), WriterGone(GRACE_S)], Phase.LANDED),
        ([WriterGone(GRACE_S)], Phase.QUARANTINED),
        ([Abandon(), WriterGone(GRACE_S), TimePassed()], Phase.QUARANTINED),
    ],
)
def test_every_way_of_a_room(events, phase):
    assert after(*events) is phase


def test_d26_the_grace_begins_with_the_end_of_the_connection_and_is_bounded():
    landing = step(Landing(), Abandon(), 0.0)
    assert step(landing, TimePassed(), 1e6).phase is Phase.QUARANTINED
    landing = step(landing, WriterGone(GRACE_S), 10.0)
    landing = step(landing, WriterGone(GRACE_S), 11.9)
    assert step(landing, TimePassed(), 11.9).phase is Phase.QUARANTINED
    assert step(landing, TimePassed(), 12.0).phase is Phase.FREE


EVENTS = (Written(), Abandon(), WriterGone(GRACE_S), Fenced(), TimePassed())


def test_d27_no_order_of_events_frees_a_room_that_may_still_be_written_to():
    for events in itertools.product(EVENTS, repeat=5):
        landing = Landing()
        ended = fenced = gone = False
        for number, event in enumerate(events):
            landing = step(landing, event, float(number))
            ended = ended or isinstance(event, Written)
            fenced = fenced or isinstance(event, Fenced)
            gone = gone or (isinstance(event, WriterGone) and number + GRACE_S < len(events))
            assert landing.phase is not Phase.FREE or ended or fenced or gone, events


def test_everything_may_be_said_twice():
    for events in itertools.product(EVENTS, repeat=3):
        doubled = [event for event in events for _ in range(2)]
        assert after(*doubled) is after(*events)
