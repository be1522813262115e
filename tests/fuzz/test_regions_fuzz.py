"""A peer that lies about its regions under a seal that fits: its part is what the route says, or it is refused."""

from __future__ import annotations

import json
import re

import pytest
import torch
import xxhash
from boxed_caches import Held, boxed_cache, carry_piece
from hypothesis import given, settings
from hypothesis import strategies as st

from omnikv import Edge, Parallel, PayloadId, Route
from omnikv.core.wire import DIGEST_KEY, PREFIX_NBYTES, UNSEALED, seal
from omnikv.core.wire_spans import ALIGNMENT
from omnikv.errors import OmniKVError
from omnikv.handoff.assemble import assemble
from omnikv.handoff.part import read_part

EDGE = Edge(from_stage="prefill", to_stage="decode")
TOKENS = 23
ROUTES = [
    Route.parallel(EDGE, num_kv_heads=3, num_layers=3, source=source, target=target)
    for source, target in [
        (Parallel(cp=3, cp_block=1), Parallel(cp=2, cp_block=4)),
        (Parallel(pp=2, tp=2), Parallel(cp=2, cp_zigzag=True)),
        (Parallel(tp=3), Parallel(tp=2)),
    ]
]
NUMBER = re.compile(r"-?\d+")
VALUES = ["0", "1", "2", "3", "4", "5", "22", "24", "-1", "1.0", "true", "null", "[]", '"0"', "[[0,1],[0],[]]"]
VALUES += ["4611686018427387904", "9223372036854775807", "9223372036854775808", "99999999999999999999"]


def parts_of_target_0(route):
    caches = [boxed_cache(boxes, TOKENS, 3) for boxes in route.source_boxes]
    pieces = route.pieces_to(0)
    return pieces, [carry_piece(route, piece, caches[piece.source_rank], TOKENS)[0] for piece in pieces]


WHOLE = [parts_of_target_0(route) for route in ROUTES]


def resealed(payload, change):
    """The payload with what it says of itself changed, and a checksum of its head that fits."""
    start = PREFIX_NBYTES + int.from_bytes(payload[:PREFIX_NBYTES], "big")
    fields = json.loads(payload[PREFIX_NBYTES:start])
    del fields[DIGEST_KEY]
    spelled = json.dumps(fields["omnikv"], separators=(",", ":"))
    fields["omnikv"] = 0
    text = json.dumps(fields, separators=(",", ":")).replace('"omnikv":0}', f'"omnikv":{change(spelled)}')
    text += f',"{DIGEST_KEY}":"xxh3_128.header.{UNSEALED}"}}'
    text = text.ljust(-(-(PREFIX_NBYTES + len(text)) // ALIGNMENT) * ALIGNMENT - PREFIX_NBYTES)
    head = len(text).to_bytes(PREFIX_NBYTES, "big") + text.encode()
    return seal(head, xxhash.xxh3_128(head).hexdigest()) + payload[start:]


@st.composite
def lies(draw, spelled):
    """One to three numbers of the text replaced, or two of them exchanged."""
    for _ in range(draw(st.integers(1, 3))):
        found = list(NUMBER.finditer(spelled))
        at = draw(st.sampled_from(found))
        new = draw(st.sampled_from(VALUES)) if draw(st.booleans()) else draw(st.sampled_from(found))[0]
        spelled = spelled[: at.start()] + new + spelled[at.end() :]
    return spelled


def received(route, pieces, parts, at, payload):
    lease = Held(len(payload))
    lease.buffer[:] = payload
    piece = pieces[at]
    identity = PayloadId(edge=EDGE, transfer_id="req", source_rank=piece.source_rank, target_rank=0)
    read = [read_part(identity, piece, lease, 0.0) if place == at else part for place, part in enumerate(parts)]
    return assemble(read, route.target_boxes[0], "req")


@pytest.mark.parametrize("number", range(len(ROUTES)))
def test_a_payload_that_is_only_sealed_anew_is_taken(number):
    route, (pieces, parts) = ROUTES[number], WHOLE[number]
    same = resealed(bytes(parts[0].lease.buffer), lambda spelled: spelled)
    assert received(route, pieces, parts, 0, same).num_tokens == TOKENS


@pytest.mark.parametrize("number", range(len(ROUTES)))
@settings(deadline=None, max_examples=250, derandomize=True)
@given(st.data())
def test_d20_what_a_part_says_of_its_regions_is_the_truth_or_the_request_fails(number, data):
    route, (pieces, parts) = ROUTES[number], WHOLE[number]
    at = data.draw(st.integers(0, len(parts) - 1))
    payload = resealed(bytes(parts[at].lease.buffer), lambda spelled: data.draw(lies(spelled)))
    try:
        kv = received(route, pieces, parts, at, payload)
    except OmniKVError:
        return
    assert kv.num_tokens == TOKENS
    for mine, theirs in zip(kv.layers, boxed_cache(route.target_boxes[0], TOKENS, 3), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))
