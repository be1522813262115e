"""Each guidance rank knows its branch, and none is left without KV in silence."""

import pytest

from omnikv.core.sharing import roles_of_guidance_ranks
from omnikv.errors import TopologyError

THREE = ("primary", "cfg_text", "cfg_img")


def test_one_rank_alone_runs_every_branch():
    assert roles_of_guidance_ranks(THREE, 1) == (THREE,)


def test_each_rank_of_a_group_runs_its_own_branch():
    assert roles_of_guidance_ranks(THREE, 3) == (("primary",), ("cfg_text",), ("cfg_img",))
    assert roles_of_guidance_ranks(THREE[:2], 2) == (("primary",), ("cfg_text",))


def test_d07_the_follower_of_a_group_of_two_gets_a_shared_main_cache():
    assert roles_of_guidance_ranks(("primary",), 2) == (("primary",), ("primary",))


@pytest.mark.parametrize(
    ("roles", "cfg_size", "words"),
    [
        (("primary",), 3, r"ranks 1, 2 of the guidance group of 3 would run without KV: .* primary alone"),
        (THREE[:2], 3, r"rank 2 of the guidance group of 3 would run without KV"),
        (THREE, 2, r"nobody in a guidance group of 2 would use cfg_img"),
        ((), 1, r"at least one, got \[\]"),
        (("primary", "primary"), 2, r"each role that is sent once"),
        (THREE, 0, r"at least one rank, got 0"),
    ],
)
def test_d07_ranks_and_branches_that_do_not_go_together_are_refused_in_words(roles, cfg_size, words):
    with pytest.raises(TopologyError, match=words):
        roles_of_guidance_ranks(roles, cfg_size)
