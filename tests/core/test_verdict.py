"""Ballots in, one ruling out: the same for every rank that sees them, with the reasons in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnikv.core.messages import Ballot, RoleBallot, Ruling, read_facts, spell_facts
from omnikv.core.verdict import MAX_ROUNDS, rule, spell_causes
from omnikv.errors import LocalProtocolError


def have(role="primary", *, tokens=3, required=True):
    return RoleBallot(role, "have", required, facts=spell_facts({"tokens": str(tokens)}))


def missing(role="primary", *, required=True):
    return RoleBallot(role, "missing", required, cause="nothing from source rank 2 by the deadline")


def failed(role="primary", *, required=True):
    return RoleBallot(role, "failed", required, cause="ProducerFailed: out of memory")


def ballot(*roles, number=0, can_refetch=True):
    return Ballot(number, can_refetch, tuple(sorted(roles, key=lambda entry: entry.role)))


def test_all_ranks_with_the_same_facts_keep():
    assert rule([ballot(have())] * 3) == Ruling("keep", 0, usable=("primary",))


def test_a_single_rank_decides_for_itself():
    assert rule([ballot(have())]).kind == "keep"


def test_what_is_missing_is_fetched_again_while_every_rank_has_time():
    ruling = rule([ballot(have()), ballot(missing())])
    assert (ruling.kind, ruling.missing) == ("refetch", ((1, "primary"),))
    assert spell_causes(ruling.causes) == "rank 1 lacks primary: nothing from source rank 2 by the deadline"


def test_without_time_on_one_rank_what_is_missing_drops_the_request_on_all():
    ruling = rule([ballot(have()), ballot(missing()), ballot(have(), can_refetch=False)])
    assert (ruling.kind, ruling.missing, ruling.usable) == ("drop", (), ())


def test_rounds_come_to_an_end():
    ruling = rule([ballot(have(), number=MAX_ROUNDS - 1), ballot(missing(), number=MAX_ROUNDS - 1)])
    assert ruling.kind == "drop"


def test_what_failed_for_good_is_not_waited_for():
    ruling = rule([ballot(have()), ballot(failed()), ballot(missing())])
    assert ruling.kind == "drop"
    assert [cause[:2] for cause in ruling.causes] == [(1, "primary"), (2, "primary")]


def test_a_required_role_that_every_rank_lacks_is_no_agreement_to_keep():
    assert rule([ballot(missing(), can_refetch=False)] * 2).kind == "drop"


def test_an_optional_role_that_no_rank_has_is_waited_for_and_then_left_out():
    entries = have(), missing("cfg_text", required=False)
    assert rule([ballot(*entries)] * 2).missing == ((0, "cfg_text"), (1, "cfg_text"))
    ruling = rule([ballot(*entries, can_refetch=False)] * 2)
    assert (ruling.kind, ruling.usable) == ("keep", ("primary",))


def test_an_optional_role_that_its_senders_called_off_is_left_out_at_once():
    ruling = rule([ballot(have(), failed("cfg_text", required=False))] * 2)
    assert (ruling.kind, ruling.usable) == ("keep", ("primary",))


def test_d02_a_split_over_an_optional_role_is_fetched_again_and_then_left_out_everywhere():
    split = [have("cfg_text", required=False), missing("cfg_text", required=False)]
    first = rule([ballot(have(), entry) for entry in split])
    assert (first.kind, first.missing) == ("refetch", ((1, "cfg_text"),))
    last = rule([ballot(have(), entry, can_refetch=False) for entry in split])
    assert (last.kind, last.usable) == ("keep", ("primary",))
    assert last.causes[0][:2] == (1, "cfg_text")


def test_d06_a_split_over_a_required_companion_drops_the_request():
    split = [have("cfg_text"), missing("cfg_text")]
    assert rule([ballot(have(), entry, can_refetch=False) for entry in split]).kind == "drop"


def test_x12_ranks_that_hold_different_tokens_do_not_agree():
    ruling = rule([ballot(have(tokens=3)), ballot(have(tokens=99))])
    assert ruling.kind == "drop"
    assert spell_causes(ruling.causes) == "rank 1 lacks primary: differs: tokens 99 here, 3 on rank 0"


def test_a_fact_that_only_one_rank_states_is_a_difference():
    bare = RoleBallot("primary", "have", True)
    assert "tokens not stated here, 3 on rank 0" in spell_causes(rule([ballot(have()), ballot(bare)]).causes)


@pytest.mark.parametrize(
    "odd",
    ["tokens 3", "[3]", '{"tokens":3}', '{"tokens":"\\udcff"}', '{"tokens":' * 5000, '{"tokens": "3"}', ""],
)
def test_facts_that_no_rank_of_ours_spells_are_a_difference_in_words_that_can_be_sent(odd):
    ruling = rule([ballot(have(tokens=3)), ballot(RoleBallot("primary", "have", True, facts=odd))])
    assert ruling.kind == "drop"
    words = spell_causes(ruling.causes)
    assert words.startswith("rank 1 lacks primary: differs: ")
    words.encode()


def test_facts_of_any_text_can_be_sent_and_read_in_any_order():
    facts = {"tokens": "3", "cafe\u0301": "\U0001f600 \u20ac", "": ""}
    spelled = spell_facts(facts)
    assert read_facts(spelled) == facts
    assert spell_facts(dict(reversed(facts.items()))) == spelled
    assert spell_facts({"name": "\udcff"}).encode() != spell_facts({"name": "\\udcff"}).encode()


def test_ranks_that_vote_on_different_roles_drop():
    ruling = rule([ballot(have()), ballot(have(), have("cfg_text"))])
    assert ruling.kind == "drop"
    assert spell_causes(ruling.causes) == (
        "rank 1: votes on cfg_text (required), primary (required), rank 0 on primary (required)"
    )


def test_ranks_that_declare_a_role_differently_drop():
    assert rule([ballot(have()), ballot(have(required=False))]).kind == "drop"


@pytest.mark.parametrize("ballots", [[], [ballot(have()), ballot(have(), number=1)]])
def test_ballots_of_no_round_or_of_two_are_a_misuse(ballots):
    with pytest.raises(LocalProtocolError, match="ballots of one round"):
        rule(ballots)


standings = st.sampled_from(["have", "missing", "failed"])
entries = st.builds(
    lambda standing, fact: RoleBallot(
        "r", standing, True, facts=spell_facts({"f": fact}) if standing == "have" else ""
    ),
    standings,
    st.sampled_from("ab"),
)


ballots_of_one_role = st.builds(lambda entry, time: Ballot(0, time, (entry,)), entries, st.booleans())


@given(st.lists(ballots_of_one_role, min_size=1, max_size=5))
def test_keep_means_that_every_rank_has_the_role_with_the_same_facts(ballots):
    ruling = rule(ballots)
    alike = all(entry.roles[0] == ballots[0].roles[0] for entry in ballots)
    assert (ruling.kind == "keep") == (alike and ballots[0].roles[0].standing == "have")
    if ruling.kind == "refetch":
        assert ruling.missing
        assert all(entry.can_refetch for entry in ballots)
        assert all(ballots[rank].roles[0].standing == "missing" for rank, _ in ruling.missing)
