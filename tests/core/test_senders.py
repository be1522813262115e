"""Where the sender listens, out of what an orchestrator tells."""

from __future__ import annotations

from types import MappingProxyType

import pytest

from omnikv.core.senders import SenderAddress, find_entry, is_assumed, read_address
from omnikv.errors import ConfigError

A, B = {"host": "a", "zmq_port": 1000}, {"host": "b", "zmq_port": 2000}


@pytest.mark.parametrize("table", [{0: A, 1: B}, {"0": A, "1": B}, {0: A, "1": B}])
@pytest.mark.parametrize("stage", [1, "1"])
def test_d12_the_entry_of_the_expected_stage_is_taken_whatever_its_key_is_written_as(table, stage):
    assert find_entry(table, stage) == B
    assert not is_assumed(table, stage)


def test_d12_an_unknown_stage_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"no entry for source stage 7: known stages are 0, '1'"):
        find_entry({0: A, "1": B}, 7)


def test_a_single_entry_needs_no_stage():
    assert find_entry(A, 7) == A
    assert not is_assumed(A, 7)


def test_the_only_entry_of_a_table_is_taken_and_said_to_be_assumed():
    assert find_entry({0: A}, "prefill") == A
    assert is_assumed({0: A}, "prefill")


@pytest.mark.parametrize("sender_info", [None, "host:1", 3, ["host"], {}, {0: "a"}, {0: {"port": 1}}])
def test_what_names_no_sender_is_an_error(sender_info):
    with pytest.raises(ConfigError, match="sender info"):
        find_entry(sender_info, 0)


def test_an_address_reads_its_port_from_a_number_or_text():
    assert read_address(A) == read_address({"host": "a", "zmq_port": "1000"}) == SenderAddress(host="a", base_port=1000)


@pytest.mark.parametrize(
    "entry", [{"host": ""}, {"host": 3}, {"host": "a", "zmq_port": "x"}, {"host": "a", "zmq_port": 0}]
)
def test_an_address_that_leads_nowhere_is_an_error(entry):
    with pytest.raises(ConfigError, match="sender info has"):
        read_address(entry)


def test_each_rank_listens_one_stride_higher():
    address = read_address(A)
    assert address.for_rank(None) == {"source_host": "a", "source_port": 1000}
    assert address.for_rank(3) == {"source_host": "a", "source_port": 1048}


def test_without_a_port_there_is_nothing_to_tell_a_connector():
    assert read_address({"host": "a"}).for_rank(1) is None


@pytest.mark.parametrize("port", [float("inf"), float("nan"), 5.5, True, b"80", [], "eighty"])
def test_d12_a_port_that_is_no_integer_is_refused_by_name(port):
    with pytest.raises(ConfigError, match=r"zmq_port=.*no integer; host is 'a'"):
        read_address({"host": "a", "zmq_port": port})


@pytest.mark.parametrize("port", [80, "80", 80.0])
def test_a_port_may_be_written_as_text(port):
    assert read_address({"host": "a", "zmq_port": port}).base_port == 80


def test_a_rank_whose_port_would_be_none_is_an_error_that_names_it():
    with pytest.raises(ConfigError, match="rank 5 of the sender at 'a' would listen on port 65610"):
        read_address({"host": "a", "zmq_port": 65530}).for_rank(5)


def test_d12_two_entries_for_one_stage_that_differ_are_no_answer():
    assert find_entry({1: B, "1": dict(B)}, 1) == B
    with pytest.raises(ConfigError, match="two entries that differ for source stage 1"):
        find_entry({1: A, "1": B}, 1)


def test_a_table_may_be_any_mapping():
    assert find_entry(MappingProxyType({"0": MappingProxyType(A), "1": MappingProxyType(B)}), 1) == B
