"""Handing KV on from the rank that received it to the ranks that did not, over an engine's own group objects.

    LOCAL                 fetched for itself: nothing to do
    LEADER, tensor-par.   scatters one payload to each rank of its guidance (CFG) group, then broadcasts its own over
                          its sequence-parallel (SP) group
    FOLLOWER, tensor-par. the first rank of an SP group gets its payload from the CFG leader; all take the SP broadcast
    no tensor parallelism one leader broadcasts everything over the stage's world

Which calls a rank makes depends on its layout alone, never on whether the KV came: a leader without KV sends None, so
that no follower is left waiting.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from omnikv.core.receive_role import ReceiveLayout
from omnikv.core.roles import Payload, branch_payloads, collect_payload, ranks_without_kv
from omnikv.tensors.place import detach_from_buffers

logger = logging.getLogger("omnikv.distribute")


def hand_on(
    req: Any, layout: ReceiveLayout, *, received: bool, request_id: str | None, counters: Counter[str]
) -> Payload | None:
    """What this rank must apply to its request, after every rank of the layout has made its calls; None for nothing.

    A leader is given back its own payload, a follower what it was sent, on the CPU.
    """
    if layout.is_local:
        return None
    if not (layout.tp_active and (layout.cfg_active or layout.sp_active)):
        own = collect_payload(req) if layout.is_leader and received else None
        return _broadcast(layout.world, own, is_source=layout.is_leader) or None
    payload: Payload | None = None
    if layout.is_leader:
        payload = _lead(req, layout, received=received, request_id=request_id, counters=counters)
    elif layout.cfg_active and layout.sp_rank == 0:
        payload = layout.cfg_group.recv_object(src=0)
    if layout.sp_active and layout.sp_group is not None:
        payload = _broadcast(layout.sp_group, payload, is_source=layout.sp_rank == 0)
    return payload or None


def _lead(
    req: Any, layout: ReceiveLayout, *, received: bool, request_id: str | None, counters: Counter[str]
) -> Payload | None:
    if not layout.cfg_active:
        return collect_payload(req) if received else None
    payloads = _split(req, layout.cfg_size, request_id) if received else [None] * layout.cfg_size
    for rank in ranks_without_kv(payloads):
        counters["cfg_ranks_without_kv"] += 1
        logger.error(
            "rank %d of the guidance group of %d gets no KV for request %s: the producer split it into %d branches; "
            "send one branch a rank, or use a group of 2, which shares the main KV",
            rank, layout.cfg_size, request_id, sum(payload is not None for payload in payloads) - 1,
        )  # fmt: skip
    for rank in range(1, layout.cfg_size):
        if not _send(layout.cfg_group, payloads[rank], rank, request_id):
            counters["cfg_scatter_failed"] += 1
    return payloads[0]


def _split(req: Any, cfg_size: int, request_id: str | None) -> list[Payload | None]:
    try:
        return branch_payloads(req, cfg_size)
    # edge: the request is an engine's object; the followers wait for a message whatever is wrong with it.
    except Exception:
        logger.exception("KV of request %s could not be split by guidance branch; no rank gets it", request_id)
        return [None] * cfg_size


def _send(group: Any, payload: Payload | None, rank: int, request_id: str | None) -> bool:
    try:
        group.send_object(detach_from_buffers(payload), dst=rank)
    # edge: the group is an engine's, and one follower that cannot be served must not keep the others waiting.
    except Exception:
        logger.exception("KV of request %s could not be sent to guidance rank %d, which gets none", request_id, rank)
        _send_nothing(group, rank)
        return False
    return True


def _send_nothing(group: Any, rank: int) -> None:
    try:
        group.send_object(None, dst=rank)
    # edge: the same group failed a moment ago.
    except Exception:
        logger.exception("guidance rank %d could not even be told that there is no KV", rank)


def _broadcast(group: Any, payload: Payload | None, *, is_source: bool) -> Payload | None:
    if is_source:
        group.broadcast_object(detach_from_buffers(payload), src=0)
        return payload
    received: Payload | None = group.broadcast_object(None, src=0)
    return received
