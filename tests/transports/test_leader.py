"""A thread that waits for an answer reads the link itself, and loses nothing of anybody's by that."""

import threading
import time

import pytest

from omnikv.errors import Aborted, ProducerFailed, TransportError
from omnikv.transports import leader as leader_module
from omnikv.transports.base import Seat
from omnikv.transports.link_loop import LinkLoop


def far():
    return time.monotonic() + 60


def put(source, payload, content):
    with source.reserve(payload, len(content)) as slot:
        slot.buffer[:] = content
        slot.publish()


def is_led(target):
    with target._lock:
        return bool(target._loop._lent)


def wait_until(condition):
    limit = far()
    while not condition():
        assert time.monotonic() < limit
        threading.Event().wait(0.001)


@pytest.fixture
def hearers(monkeypatch):
    """The names of the threads that hear links, as they do."""
    names = []
    hear = LinkLoop._hear

    def noted(loop, link):
        names.append(threading.current_thread().name)
        hear(loop, link)

    monkeypatch.setattr(LinkLoop, "_hear", noted)
    return names


@pytest.fixture
def met(world):
    """A source and a target that have met."""
    source, target = world.open("source"), world.open("target")
    put(source, world.payload("first"), b"first")
    target.get(world.payload("first"), deadline=far()).acknowledge()
    return source, target


@pytest.fixture
def waits(world, met, in_thread):
    """A get of "wanted" that leads already, in a thread."""
    _, target = met

    def get():
        threading.current_thread().name = "waiting"
        return target.get(world.payload("wanted"), deadline=far())

    future = in_thread(get)
    wait_until(lambda: is_led(target))
    return future


def test_what_is_waited_for_is_heard_by_the_thread_that_waits(world, met, waits, hearers):
    put(met[0], world.payload("wanted"), b"here")
    assert bytes(waits.result(60).buffer) == b"here"
    wait_until(lambda: not is_led(met[1]))
    assert [name for name in hearers if "-source-" not in name] == ["waiting"]


def test_the_main_thread_leaves_it_to_the_transports_thread(world, met, in_thread, hearers):
    source, target = met
    in_thread(put, source, world.payload("wanted"), b"here")
    target.get(world.payload("wanted"), deadline=far()).acknowledge()
    assert threading.current_thread().name not in hearers


def test_the_one_that_leads_hands_others_what_is_theirs(world, met, waits, in_thread):
    source, target = met
    others = [in_thread(target.get, world.payload(f"other-{number}"), deadline=far()) for number in range(3)]
    for number, other in enumerate(others):
        put(source, world.payload(f"other-{number}"), f"other-{number}".encode())
        assert bytes(other.result(60).buffer) == f"other-{number}".encode()
    put(source, world.payload("wanted"), b"here")
    assert bytes(waits.result(60).buffer) == b"here"


def test_one_that_gives_up_gives_the_link_back(world, met, in_thread):
    source, target = met
    assert in_thread(target.get, world.payload("late"), deadline=time.monotonic() + 0.05).result(60) is None
    assert not is_led(target)
    put(source, world.payload("late"), b"late")
    assert bytes(target.get(world.payload("late"), deadline=far()).buffer) == b"late"


def test_a_source_that_ends_is_noticed_by_the_one_that_leads(met, waits):
    met[0].close()
    with pytest.raises(ProducerFailed):
        waits.result(60)
    assert not is_led(met[1])


def test_a_withdrawal_wakes_the_one_that_leads(world, met, waits):
    met[1].withdraw([world.payload("wanted")])
    with pytest.raises(Aborted):
        waits.result(60)


def test_closing_the_transport_wakes_the_one_that_leads(met, waits):
    met[1].close()
    with pytest.raises(TransportError, match="closed during a get"):
        waits.result(60)


def test_what_nobody_foresaw_while_it_leads_ends_the_transport_and_is_told(world, met, waits, monkeypatch, caplog):
    def break_down(link, message, extra):
        raise ZeroDivisionError

    monkeypatch.setattr(met[1]._target._window, "handle", break_down)
    put(met[0], world.payload("wanted"), b"here")
    with pytest.raises(TransportError, match="closed during a get"):
        waits.result(60)
    with pytest.raises(TransportError, match="ZeroDivisionError"):
        met[1].get(world.payload("wanted"), deadline=far())
    assert "its thread ends" in caplog.text


def test_what_waits_to_go_out_is_the_transports_threads_to_send(world, met, waits):
    source, target = met
    (link,) = target._target._sources.values()
    with target._lock:
        link._queue.append((b"\x91\xa4nope", -1))
        link._watch(link)
        assert not target._loop._lent
        link._queue.clear()
        link._watch(link)
    put(source, world.payload("wanted"), b"here")
    assert bytes(waits.result(60).buffer) == b"here"


def test_links_are_lent_to_one_at_a_time(world, met, waits):
    (link,) = met[1]._target._sources.values()
    assert link.seat == Seat(0)
    with met[1]._lock:
        assert not met[1]._loop.lend([link])
    put(met[0], world.payload("wanted"), b"here")
    assert bytes(waits.result(60).buffer) == b"here"


def test_no_more_than_a_few_links_are_lent(met, in_thread, monkeypatch):
    monkeypatch.setattr(leader_module, "MAX_LED_LINKS", 0)
    (link,) = met[1]._target._sources.values()
    assert in_thread(leader_module.lead, met[1]._loop, {link}).result(60) is None


def test_where_the_system_gives_no_descriptor_the_transports_thread_reads_on(world, met, in_thread, monkeypatch):
    def refuse(value, flags):
        raise OSError(24, "too many open files")

    monkeypatch.setattr(leader_module.os, "eventfd", refuse)
    source, target = met
    waiting = in_thread(target.get, world.payload("wanted"), deadline=far())
    put(source, world.payload("wanted"), b"here")
    assert bytes(waiting.result(60).buffer) == b"here"
    assert not is_led(target)
