"""What lies on a device is queued on a lane of its own and is in place when `fill` returns, whatever else happens."""

from contextlib import contextmanager

import pytest
import torch

from omnikv.tensors import fill as fill_module
from omnikv.tensors import lanes
from omnikv.tensors.fill import fill

DEVICE = torch.device("cuda", 0)


class Lane:
    """A stream whose work is done when somebody waits for it."""

    def __init__(self, history):
        self.queue = []
        self.history = history

    def wait_stream(self, other):
        self.history.append(f"lane waits for {other}")

    def synchronize(self):
        self.history.append("lane is waited for")
        for work in self.queue:
            work()
        self.queue.clear()


class OnDevice:
    device = DEVICE
    dtype = torch.uint8
    shape = (4,)

    def __init__(self, lane, value):
        self.lane, self.value = lane, value

    def queue_into(self, out):
        if self.value is None:
            raise LookupError("this source is gone")
        self.lane.history.append("queued")
        self.lane.queue.append(lambda: out.fill_(self.value))

    def write_into(self, out):
        raise AssertionError("the lane does it")


class OnHost:
    device = torch.device("cpu")
    dtype = torch.uint8
    shape = (4,)

    def __init__(self, lane, value):
        self.lane, self.value = lane, value

    def write_into(self, out):
        if self.value is None:
            raise LookupError("this source is gone")
        self.lane.history.append("written")
        out.fill_(self.value)


@pytest.fixture
def lane(monkeypatch):
    lane = Lane([])

    @contextmanager
    def stream(entered):
        assert entered is lane
        yield

    monkeypatch.setattr(fill_module, "have_streams", lambda: True)
    monkeypatch.setattr(lanes, "_lane_of", lambda device: lane)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the engine's stream")
    monkeypatch.setattr(torch.cuda, "stream", stream)
    return lane


def places(count):
    return [torch.zeros(4, dtype=torch.uint8) for _ in range(count)]


def test_the_device_works_while_the_host_copies_and_both_are_done_at_the_end(lane):
    outs = places(3)
    sources = [OnHost(lane, 1), OnDevice(lane, 2), OnHost(lane, 3)]
    fill(list(zip(sources, outs, strict=True)))
    assert [int(out[0]) for out in outs] == [1, 2, 3]
    waits = "lane waits for the engine's stream"
    assert lane.history == [waits, "queued", "written", "written", "lane is waited for"]


@pytest.mark.parametrize("kind", [OnDevice, OnHost])
def test_a_failure_leaves_nothing_queued(lane, kind):
    outs = places(2)
    with pytest.raises(LookupError, match="gone"):
        fill(list(zip([OnDevice(lane, 1), kind(lane, None)], outs, strict=True)))
    assert lane.queue == []
    assert lane.history[-1] == "lane is waited for"


def test_a_source_that_names_no_device_is_written_by_the_calling_thread(lane, monkeypatch):
    class Unknown(OnHost):
        device = None

    monkeypatch.setattr(fill_module.PACKERS, "submit", lambda work: pytest.fail("a helper does not know the stream"))
    outs = places(2)
    fill(list(zip([Unknown(lane, 1), Unknown(lane, 2)], outs, strict=True)), 2)
    assert [int(out[0]) for out in outs] == [1, 2]


class Driver:
    def __init__(self, answer):
        self.answer = answer
        self.calls = []

    def cudaHostRegister(self, address, nbytes, flags):
        self.calls.append((address, nbytes, flags))
        return self.answer

    def cudaHostUnregister(self, address):
        self.calls.append(address)


@pytest.mark.parametrize(("in_use", "answer", "pinned"), [(True, 0, True), (True, 2, False), (False, 0, False)])
def test_memory_is_pinned_where_a_device_is_in_use_and_takes_it(monkeypatch, in_use, answer, pinned):
    driver, room = Driver(answer), bytearray(64)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    assert lanes.pin(memoryview(room)) is pinned
    address = torch.frombuffer(room, dtype=torch.uint8).data_ptr()
    assert driver.calls == [(address, 64, 0)] * in_use
    lanes.unpin(memoryview(room))
    assert driver.calls[-1] == address
