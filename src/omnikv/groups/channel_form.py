"""How the connections of a channel come about: what the ranks show each other, where rank 0 listens, who gets in.

Two rounds go through the group's own exchange. In the first every rank shows where it runs and its facts; all compute
the same answer from the same cards: an error that names the difference, or the kind of connection. In the second rank
0 says where it listens, with a random token. From there on the door (`omnikv.groups.channel_door`) lets in who proves
that it knows the token.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from omnikv.core.messages import CHANNEL_VERSION, ChannelCard, ChannelInvitation
from omnikv.errors import ConfigError, ConnectError
from omnikv.groups.base import Group
from omnikv.groups.channel_door import admit_all, join

TOKEN_NBYTES = 32
_CONNECTIONS_WAITING = 128
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACES = Path("/proc/self/ns")
_WILDCARDS = ("", "0.0.0.0", "::")

_encode = msgspec.msgpack.Encoder().encode
_decode_card = msgspec.msgpack.Decoder(ChannelCard).decode
_decode_invitation = msgspec.msgpack.Decoder(ChannelInvitation).decode


def connect_star(
    group: Group, facts: Mapping[str, str], deadline: float, address: tuple[str, int], over: str
) -> tuple[dict[int, socket.socket], bool]:
    """This rank's connections by rank (rank 0: to all others, others: to rank 0), and whether all share a clock.

    Raises:
        ConfigError: as every rank: facts differ, or there is no address that all can reach.
        ConnectError: the star did not come about by `deadline`.
        VerdictInDoubt: the group's exchange failed.
    """
    _check_arguments(facts, address, over)
    shown = {**facts, "channel over": over}
    if group.rank == 0:
        shown[_ADDRESS] = address[0]
    cards = _read_cards(group.exchange(_encode(_own_card(shown)), deadline=deadline))
    is_one_host = len({card.host for card in cards}) == 1
    is_local = over == "auto" and len({(card.host, card.user) for card in cards}) == 1
    if not is_one_host and _is_loopback(cards[0].facts[_ADDRESS]):
        raise ConfigError(
            "the ranks of this group run on several hosts or network namespaces: give rank 0 an address for its "
            f"channel that all of them can reach, not {cards[0].facts[_ADDRESS]}"
        )
    if group.size == 1:
        return {}, True
    connections = _lead(group, deadline, address, is_local) if group.rank == 0 else _follow(group, deadline)
    return connections, is_one_host


# Rank 0's alone, so it is not compared.
_ADDRESS = "channel address of rank 0"


def _check_arguments(facts: Mapping[str, str], address: tuple[str, int], over: str) -> None:
    wrong = [name for name, value in facts.items() if not isinstance(name, str) or not isinstance(value, str)]
    if wrong:
        raise ConfigError(f"a channel's facts are texts by name, {wrong[0]!r} is not: pass str(value)")
    if over not in ("auto", "tcp"):
        raise ConfigError(f"a channel goes over 'auto' or 'tcp', got {over!r}")
    if address[0] in _WILDCARDS:
        raise ConfigError(
            f"a channel listens at one address that the other ranks can reach, not at all of them ({address[0]!r}): "
            "give that of the interface between the ranks"
        )


def _own_card(facts: dict[str, str]) -> ChannelCard:
    try:
        boot = _BOOT_ID.read_text().strip()
        namespaces = [os.stat(_NAMESPACES / name).st_ino for name in ("net", "user")]
        times = _NAMESPACES / "time"
        host = f"{boot}/{namespaces[0]}/{os.stat(times).st_ino if times.exists() else 0}"
        user = f"{namespaces[1]}/{os.geteuid()}"
    except OSError:
        # Nothing proves that another rank runs here, so none is taken to.
        host, user = secrets.token_hex(16), str(os.geteuid())
    return ChannelCard(CHANNEL_VERSION, host, user, facts)


def _read_cards(shown: Sequence[bytes]) -> list[ChannelCard]:
    """The cards, if their versions and facts agree: a pure function of what every rank sees."""
    cards = [_read_card(rank, payload) for rank, payload in enumerate(shown)]
    versions = [str(card.version) for card in cards]
    facts = [{**card.facts, "channel protocol version": version} for card, version in zip(cards, versions, strict=True)]
    for mine in facts:
        mine.pop(_ADDRESS, None)
    differences = [
        spell_difference(name, values)
        for name in sorted({name for mine in facts for name in mine})
        if len(set(values := [mine.get(name) for mine in facts])) > 1
    ]
    if differences:
        raise ConfigError(
            f"the ranks of this group are not configured alike: {'; '.join(differences)}; give all of them the same"
        )
    if _ADDRESS not in cards[0].facts:
        raise ConfigError("rank 0 shows no address for the channel: its card comes from another rank")
    return cards


def _read_card(rank: int, payload: bytes) -> ChannelCard:
    try:
        return _decode_card(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"rank {rank} shows no card of a channel, so it is not forming one: {error}") from error


def spell_difference(name: str, values: Sequence[str | None]) -> str:
    """A fact's values by rank in plain words: "receive_timeout_s: 30.0 on rank 0, 10.0 on rank 2"."""
    ranks: dict[str | None, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    parts = [
        f"{'not given' if value is None else value} on {'rank' if len(where) == 1 else 'ranks'} {' and '.join(where)}"
        for value, where in ranks.items()
    ]
    return f"{name}: {', '.join(parts)}"


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host == "::1"


def _lead(group: Group, deadline: float, address: tuple[str, int], is_local: bool) -> dict[int, socket.socket]:
    token = secrets.token_bytes(TOKEN_NBYTES)
    listener, refused = None, ""
    try:
        listener = _listen_here() if is_local else _listen_at(address)
    except OSError as error:
        # The others wait for the invitation, so they are told before this rank raises.
        refused = (
            f"rank 0 cannot listen at {address[0]}:{address[1]} for the group's channel ({error.strerror or error}): "
            "give it another address, or port 0 for any free one"
        )
    if listener is None:
        group.exchange(_encode(ChannelInvitation(refused=refused)), deadline=deadline)
        raise ConnectError(refused, transport="channel", endpoint=f"{address[0]}:{address[1]}", rank=0)
    with listener:
        name = listener.getsockname()
        if is_local:
            invitation = ChannelInvitation(token=token, unix_name=name)
        else:
            invitation = ChannelInvitation(token=token, tcp_host=name[0], tcp_port=name[1])
        group.exchange(_encode(invitation), deadline=deadline)
        return admit_all(listener, group.size, token, deadline)


def _follow(group: Group, deadline: float) -> dict[int, socket.socket]:
    invitation = _decode_invitation(group.exchange(b"", deadline=deadline)[0])
    if invitation.refused:
        raise ConnectError(invitation.refused, transport="channel", rank=group.rank)
    if invitation.unix_name:
        target: bytes | tuple[str, int] = invitation.unix_name
        family = socket.AF_UNIX
    else:
        target = (invitation.tcp_host, invitation.tcp_port)
        family = socket.AF_INET6 if ":" in invitation.tcp_host else socket.AF_INET
    return {0: join(family, target, group.rank, invitation.token, deadline)}


def _listen_here() -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # An abstract name that nobody can guess or take first; it is gone with the listener.
    return _bind(listener, b"\0omnikv-channel-" + secrets.token_hex(16).encode())


def _listen_at(address: tuple[str, int]) -> socket.socket:
    family, _, _, _, resolved = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    return _bind(socket.socket(family, socket.SOCK_STREAM), resolved)


def _bind(listener: socket.socket, address: object) -> socket.socket:
    try:
        listener.bind(address)  # type: ignore[arg-type]
        listener.listen(_CONNECTIONS_WAITING)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
