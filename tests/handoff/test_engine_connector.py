"""The edge to an engine's connector: whatever it does becomes a value or an error of ours."""

from __future__ import annotations

import threading

import pytest
import torch

from omnikv.errors import ConnectError, PutRejected, TransportError, WireError
from omnikv.handoff import engine_connector
from omnikv.handoff.engine_connector import Stages, ask, open_payload, put_once, put_with_retry
from omnikv.tensors.pack import KVCacheTransferData

EDGE = Stages("a", "b")


def packed(value=1.0):
    layer = torch.full((2, 1, 4), value)
    return KVCacheTransferData("r1", {"key_cache": [layer], "value_cache": [layer + 1]}, [0], {"seq_len": 2}).to_bytes()


class Failing:
    """Raises or returns, in turn, what it was given."""

    def __init__(self, *outcomes):
        self.outcomes = list(outcomes)

    def put(self, from_stage, to_stage, put_key, data):
        return self._next()

    def get(self, from_stage, to_stage, get_key, metadata=None):
        return self._next()

    def _next(self):
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(engine_connector, "FIRST_RETRY_S", 0.0)


def put(connector):
    return put_with_retry(lambda: put_once(connector, EDGE, "k", b"x"), closing=threading.Event())


def test_a_put_reports_the_connectors_size():
    assert put(Failing((True, 17, {}))) == 17


def test_a_refused_put_is_tried_three_times():
    connector = Failing((False, 0, None), (False, 0, None), (True, 5, None), "never reached")
    assert put(connector) == 5
    assert connector.outcomes == ["never reached"]


def test_a_put_that_is_refused_every_time_is_an_error():
    with pytest.raises(PutRejected, match="refused 'k'"):
        put(Failing(*[(False, 0, None)] * 3))


def test_an_error_that_may_pass_is_tried_again_with_its_cause_kept():
    cause = OSError("no route")
    with pytest.raises(TransportError, match="OSError: no route") as caught:
        put(Failing(OSError("a"), ConnectionError("b"), cause))
    assert caught.value.__cause__ is cause


@pytest.mark.parametrize("error", [TypeError("t"), ValueError("v"), NotImplementedError("n"), KeyError("k")])
def test_an_error_that_cannot_change_is_not_tried_again(error):
    connector = Failing(error, "never reached")
    with pytest.raises(TransportError):
        put(connector)
    assert connector.outcomes == ["never reached"]


def test_our_own_errors_say_themselves_whether_a_retry_helps():
    connector = Failing(ConnectError("not yet"), (True, 1, {}))
    assert put(connector) == 1
    with pytest.raises(PutRejected, match="for ever"):
        put(Failing(PutRejected("for ever")))


def test_a_result_of_another_form_is_the_connectors_fault():
    with pytest.raises(TransportError):
        put(Failing(None))


@pytest.mark.parametrize("nothing", [None, False, ()])
def test_absence_is_no_error(nothing):
    assert ask(Failing(nothing), EDGE, "k", None, deadline=0.0) is None


def test_a_fault_is_not_mistaken_for_absence():
    with pytest.raises(TransportError, match="PermissionError: no") as caught:
        ask(Failing(PermissionError("no")), EDGE, "k", None, deadline=0.0)
    assert isinstance(caught.value.__cause__, PermissionError)


@pytest.mark.parametrize(
    "form",
    [
        bytes,
        bytearray,
        memoryview,
        lambda data: torch.frombuffer(bytearray(data), dtype=torch.uint8),
        lambda data: {**KVCacheTransferData.from_bytes(data)},
    ],
)
def test_a_payload_is_read_in_every_form_that_connectors_give(form):
    delivery = ask(Failing((form(packed(3.0)), 99)), EDGE, "k", None, deadline=0.0)
    assert delivery.nbytes == 99
    assert delivery.data["request_id"] == "r1"
    assert torch.equal(delivery.data["layer_blocks"]["key_cache"][0], torch.full((2, 1, 4), 3.0))
    delivery.settle()
    delivery.put_back()


class Pool:
    def __init__(self, data):
        self.tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.released = 0

    def release(self):
        self.released += 1


def test_a_leased_buffer_is_read_in_place_and_released_when_settled():
    pool = Pool(packed())
    delivery = open_payload(pool, 7, "k")
    assert (pool.released, delivery.borrowed[0] is pool.tensor) == (0, True)
    delivery.settle()
    assert pool.released == 1


def test_a_leased_buffer_that_holds_no_payload_is_released_at_once():
    pool = Pool(b"garbage")
    with pytest.raises(WireError):
        open_payload(pool, 7, "k")
    assert pool.released == 1


def test_a_buffer_that_cannot_be_released_does_not_lose_the_payload(caplog):
    class Broken(Pool):
        def release(self):
            raise RuntimeError("pool is gone")

    open_payload(Broken(packed()), 7, "k").settle()
    assert "could not be released" in caplog.text


def test_a_tensor_outlives_the_buffer_it_was_read_from():
    delivery = open_payload(torch.frombuffer(bytearray(packed(5.0)), dtype=torch.uint8), 7, "k")
    key = delivery.data["layer_blocks"]["key_cache"][0]
    del delivery
    torch.zeros(10_000)
    assert torch.equal(key, torch.full((2, 1, 4), 5.0))


@pytest.mark.parametrize("raw", ["text", 3, torch.zeros(4), torch.zeros(2, 2, dtype=torch.uint8), [1]])
def test_what_is_no_form_of_a_payload_is_refused(raw):
    with pytest.raises(WireError, match=r"no form of a payload|1-D uint8"):
        open_payload(raw, 1, "k")


@pytest.mark.parametrize("nothing", [None, (), (None, 0)])
def test_an_answer_without_a_payload_is_an_absent_one(nothing):
    assert ask(Failing(nothing), EDGE, "k", None, deadline=0.0) is None


@pytest.mark.parametrize("size", [None, "17", float("nan")])
def test_a_payload_counts_whatever_its_connector_says_of_its_size(size):
    delivery = ask(Failing((packed(), size)), EDGE, "k", None, deadline=0.0)
    assert delivery.data["request_id"] == "r1"
    assert delivery.nbytes == 0
    assert put_once(Failing((True, size, None)), EDGE, "k", b"x") == 0
