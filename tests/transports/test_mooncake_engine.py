"""Mooncake's engine, called as it is: when a read of several places is over, and what came of it."""

import sys
from types import SimpleNamespace

import pytest

from omnikv.transports.mooncake_engine import MooncakeEngine
from omnikv.transports.one_sided_engine import EngineFault

UNDER_WAY, DONE, FAILED = 0, 1, -1
PLACES = [(1000, 10), (2000, 20), (3000, 30)]


class Library:
    """Tells of each batch what `status` says of its first read, as the engine does, and nothing once it has ended."""

    def __init__(self):
        self.batches = {}
        self.status = {}
        self.refused = set()

    def initialize(self, *where):
        return 0

    def get_rpc_port(self):
        return 1

    def batch_transfer_async_read(self, source, locals_, remotes, sizes):
        if remotes[0] in self.refused:
            return 0
        batch = len(self.batches) + 1
        self.batches[batch] = list(zip(locals_, remotes, sizes, strict=True))
        return batch

    def transfer_check_status(self, batch):
        code = self.status[self.batches[batch][0][1]]
        if code != UNDER_WAY:
            del self.batches[batch]
        return code


@pytest.fixture
def library(monkeypatch):
    made = Library()
    monkeypatch.setitem(sys.modules, "mooncake.engine", SimpleNamespace(TransferEngine=lambda: made))
    return made


@pytest.fixture
def engine(library):
    return MooncakeEngine("127.0.0.1", "tcp", "")


def test_a_read_of_several_places_is_over_when_the_last_of_them_is(engine, library):
    reading = engine.start("source", 500, PLACES)
    started = [place for batch in library.batches.values() for place in batch]
    assert started == [(500, 1000, 10), (510, 2000, 20), (530, 3000, 30)]
    library.status = {1000: DONE, 2000: UNDER_WAY, 3000: DONE}
    assert not reading.poll()
    assert not reading.poll()
    library.status[2000] = DONE
    assert reading.poll()
    assert not library.batches


def test_a_place_that_ended_badly_is_told_when_nothing_comes_any_more(engine, library):
    reading = engine.start("source", 500, PLACES)
    library.status = {1000: FAILED, 2000: DONE, 3000: UNDER_WAY}
    assert not reading.poll()
    library.status[3000] = DONE
    with pytest.raises(EngineFault, match="transfer_check_status ended with -1"):
        reading.poll()


def test_a_place_that_the_engine_did_not_take_is_told_when_the_others_have_ended(engine, library):
    library.refused = {2000}
    reading = engine.start("source", 500, PLACES)
    library.status = {1000: UNDER_WAY}
    assert not reading.poll()
    library.status = {1000: DONE}
    with pytest.raises(EngineFault, match="batch_transfer_async_read ended with 0"):
        reading.poll()


def test_a_read_of_which_the_engine_took_nothing_does_not_begin(engine, library):
    library.refused = {1000}
    with pytest.raises(EngineFault, match="batch_transfer_async_read ended with 0"):
        engine.start("source", 500, PLACES)
