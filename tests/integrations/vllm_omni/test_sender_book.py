"""What a receiver remembers of its sender, and what it does with info that names none."""

from __future__ import annotations

from collections import Counter

import pytest

from omnikv.core.senders import SenderAddress
from omnikv.errors import ConfigError
from omnikv.integrations.vllm_omni.sender_book import SenderBook

A, B = {"host": "a", "zmq_port": 1000}, {"host": "b", "zmq_port": 2000}


def test_the_source_stages_entry_is_remembered():
    book = SenderBook("1", Counter())
    assert book.update({0: A, 1: B}) == SenderAddress(host="b", base_port=2000)
    assert (book.host, book.base_port) == ("b", 2000)
    assert book.for_receive(None) == SenderAddress(host="b", base_port=2000)


def test_a_stage_can_be_stated_instead():
    book = SenderBook("1", Counter())
    book.update({0: A, 1: B}, 0)
    assert book.host == "a"


def test_d12_an_unknown_stage_fails_the_next_receive_at_once_with_the_known_ones(caplog):
    counters = Counter()
    book = SenderBook("7", counters)
    assert book.update({0: A, "1": B}) is None
    with pytest.raises(ConfigError, match="known stages are 0, '1'"):
        book.for_receive(None)
    assert counters == {"sender_unknown": 1}
    assert len(caplog.records) == 1


def test_d12_the_same_trouble_is_logged_once_and_counted_each_time(caplog):
    counters = Counter()
    book = SenderBook("7", counters)
    for _ in range(3):
        book.update({0: A, 1: B})
    assert counters == {"sender_unknown": 3}
    assert len(caplog.records) == 1


def test_better_info_ends_the_trouble():
    book = SenderBook("1", Counter())
    book.update("nonsense")
    book.update({"1": B})
    assert book.for_receive(None).host == "b"


def test_a_malformed_table_keeps_the_address_that_was_known_but_does_not_use_it():
    book = SenderBook("1", Counter())
    book.update(B)
    book.update({"host": "c", "zmq_port": "x"})
    assert book.host == "b"
    with pytest.raises(ConfigError, match="zmq_port='x'"):
        book.for_receive(None)


def test_the_only_entry_is_assumed_to_be_meant_and_that_is_said_once(caplog):
    counters = Counter()
    book = SenderBook("prefill", counters)
    book.update({0: A})
    book.update({0: A})
    assert book.host == "a"
    assert counters == {"sender_assumed": 2}
    assert len(caplog.records) == 1


def test_a_request_may_bring_its_own_sender():
    book = SenderBook("1", Counter())
    book.update(A)
    assert book.for_receive({"1": B}).host == "b"
    assert book.host == "a"


def test_a_request_whose_own_sender_has_no_port_is_not_sent_elsewhere():
    with pytest.raises(ConfigError, match="no zmq_port"):
        SenderBook("1", Counter()).for_receive({"host": "a"})


def test_nothing_told_is_no_error():
    assert SenderBook("1", Counter()).for_receive(None) is None


def test_resolving_gives_an_entry_without_remembering_it():
    book = SenderBook("1", Counter())
    assert book.resolve({0: A, 1: B}) == B
    assert book.resolve({0: A, 1: B}, 0) == A
    assert book.resolve({0: A, 1: B}, 9) is None
    assert book.resolve({}) is None
    assert book.resolve(A, 9) == A
    assert book.for_receive(None) is None
