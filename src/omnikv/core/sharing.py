"""Which guidance branches of a request each rank of a guidance (CFG) group works on.

A producer either splits its KV by branch, and rank n gets the n-th, or keeps one cache for all of them, whose parts
serve as prefixes. A group of two can share such a cache: the branch without the condition is a prefix of the one with
it. In a larger group there is no telling which part a rank would need, so it is refused before anything is fetched
(D07); a rank that silently went without KV would give a wrong picture.
"""

from __future__ import annotations

from collections.abc import Sequence

from omnikv.errors import TopologyError


def roles_of_guidance_ranks(roles: Sequence[str], cfg_size: int) -> tuple[tuple[str, ...], ...]:
    """The roles of each rank of a guidance group of `cfg_size`, out of the `roles` that a producer sends, in order.

    One rank alone gets them all; several get one each, or, in a group of two, both the only one.

    Raises:
        TopologyError: no roles, one named twice, or a number of them that does not go with `cfg_size`.
    """
    if cfg_size < 1:
        raise TopologyError(f"a guidance group has at least one rank, got {cfg_size}")
    if not roles or len(set(roles)) != len(roles):
        raise TopologyError(f"name each role that is sent once and at least one, got {list(roles)}")
    if cfg_size == 1:
        return (tuple(roles),)
    if len(roles) == 1 and cfg_size == 2:
        return (tuple(roles), tuple(roles))
    if len(roles) < cfg_size:
        without = list(range(len(roles), cfg_size))
        raise TopologyError(
            f"rank{'s' * (len(without) > 1)} {', '.join(map(str, without))} of the guidance group of {cfg_size} would "
            f"run without KV: the producer sends {', '.join(roles)} alone; send one branch a rank, or use a group "
            "of 2, whose follower gets the main cache"
        )
    if len(roles) > cfg_size:
        raise TopologyError(
            f"nobody in a guidance group of {cfg_size} would use {', '.join(roles[cfg_size:])}: the producer sends "
            f"{len(roles)} branches; send one a rank, or let one rank run them all"
        )
    return tuple((role,) for role in roles)
