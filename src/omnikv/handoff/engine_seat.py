"""This rank's seats in the votes of an engine's groups: what carries ballots over a group that an engine set up.

A group of an engine's always has its object methods. One that is a real process group has a `cpu_group` of
`torch.distributed` besides, and only such a group is known to hold processes of one engine that all run this code: it
gets a channel, formed once, at the first vote, when every rank of it is there. Ranks on several hosts need for it an
address of rank 0 that all of them reach; without one they vote over the object methods, and all learn that alike.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

import torch.distributed as dist

from omnikv.errors import ConfigError, ConnectError, VerdictInDoubt
from omnikv.groups.base import Agreement, Group
from omnikv.groups.channel import Channel
from omnikv.groups.exchange import ExchangeAgreement
from omnikv.groups.torch_dist import EngineGroup, TorchDistGroup

logger = logging.getLogger("omnikv.agree")

_ANY_LOOPBACK = ("127.0.0.1", 0)
VotesOver = Literal["auto", "objects", "channel"]


def is_process_group(group: Any) -> bool:
    """Whether an engine's group is backed by a real process group for objects on the CPU."""
    return dist.is_available() and isinstance(getattr(group, "cpu_group", None), dist.ProcessGroup)


class Seats:
    """The seats of one rank, by group; close it to give them up.

    `facts` are settings that all ranks share. `channel_address` is a host and port (0: any free one) of this rank's
    own, where it listens for the others if it is rank 0 and they run on other hosts.
    """

    def __init__(
        self, over: VotesOver, *, facts: Mapping[str, str], channel_address: tuple[str, int] | None = None
    ) -> None:
        self._over = over
        self._facts = dict(facts)
        self._address = channel_address or _ANY_LOOPBACK
        self._by_group: dict[int, tuple[Any, Agreement]] = {}

    def of(self, group: Any, *, deadline: float) -> Agreement:
        """The seat in this group, taken when first asked for; every rank of it must ask for the same requests.

        Raises:
            ConfigError: votes were to go over a channel, and this group cannot have one.
            VerdictInDoubt: the seat could not be taken by `deadline` (monotonic seconds); peers may hold theirs.
        """
        # The group is kept beside its seat, so that its id is not used again.
        if id(group) not in self._by_group:
            self._by_group[id(group)] = (group, self._take(group, deadline))
        return self._by_group[id(group)][1]

    def close(self) -> None:
        """Give up every seat. Idempotent."""
        seats, self._by_group = self._by_group, {}
        for _, seat in seats.values():
            if isinstance(seat, Channel):
                seat.close()

    def _take(self, group: Any, deadline: float) -> Agreement:
        if self._over == "channel" and not is_process_group(group):
            raise ConfigError(
                f"votes cannot go over a channel: {type(group).__name__} has no cpu_group of torch.distributed; set "
                "kv_agreement_over to 'objects' or 'auto'"
            )
        if self._over != "objects" and is_process_group(group):
            try:
                return Channel.form(_forming_group(group), facts=self._facts, deadline=deadline, address=self._address)
            except ConfigError as error:  # On every rank alike.
                if self._over == "channel":
                    raise
                logger.warning(
                    "votes go over the engine's group, not over a channel: %s (kv_channel_address is the setting)",
                    error,
                )
            except ConnectError as error:
                raise VerdictInDoubt(f"this rank has no seat in the votes of its group: {error}") from error
        return ExchangeAgreement(EngineGroup(group), facts=repr(sorted(self._facts.items())))


def _forming_group(group: Any) -> Group:
    try:
        return TorchDistGroup(group.cpu_group)
    except ConfigError:  # Its backend takes no tensors on the CPU; the engine has a way of its own then.
        return EngineGroup(group)
