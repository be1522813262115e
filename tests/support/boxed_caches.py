"""Caches whose every value says which layer, head and token it is, on ranks that hold boxes; carried without I/O."""

from __future__ import annotations

import torch

from omnikv import LayerKV, PayloadId
from omnikv.core.boxes import EVERY_LAYER
from omnikv.handoff.assemble import assemble
from omnikv.handoff.cut import own_layers
from omnikv.handoff.part import read_part
from omnikv.handoff.send import plan_piece

HEAD_DIM = 2
POISON = float("nan")


def positions(box, num_tokens):
    """The global positions of a box's rows, in the order in which a rank holds them."""
    return [at for stripe in box.tokens.stripes(num_tokens) for run in stripe.runs() for at in range(*run)]


def value_of(layer, heads, rows, side):
    """`[rows, heads, HEAD_DIM]`, exact in float64: no two places of a request have the same value."""
    place = torch.tensor(rows, dtype=torch.float64).view(-1, 1, 1) * 64 + torch.tensor(heads).view(1, -1, 1)
    return (place * 64 + layer) * 4 + side * 2 + torch.arange(HEAD_DIM).view(1, 1, -1)


def boxed_cache(boxes, num_tokens, num_layers=2):
    """What a rank with these boxes holds; `num_layers` where they leave the layers open."""
    layers = []
    for box in boxes:
        rows = positions(box, num_tokens)
        stop = num_layers if box.layers.stop == EVERY_LAYER.stop else box.layers.stop
        layers += [
            LayerKV(*(fenced(value_of(layer, box.heads, rows, side)) for side in (0, 1)))
            for layer in range(box.layers.start, stop)
        ]
    return layers


def fenced(tensor):
    """The tensor as a view with poison on every side of it: whatever is read beyond its edges is seen."""
    room = torch.full([size + 2 for size in tensor.shape], POISON, dtype=tensor.dtype)
    view = room[tuple(slice(1, -1) for _ in tensor.shape)]
    view.copy_(tensor)
    return view


class Held:
    """A lease on a buffer that nobody else has."""

    def __init__(self, nbytes):
        self.buffer = memoryview(bytearray(nbytes))
        self.ended = None

    def acknowledge(self):
        self.ended = "consumed"

    def release(self):
        self.ended = self.ended or "released"


def carry(route, caches, num_tokens, *, lose=lambda piece: False):
    """What each target rank gets from the source ranks' caches, and the bytes of tensors that travelled."""
    received, nbytes = [], 0
    for rank in range(route.num_target_ranks):
        arrived = []
        for piece in route.pieces_to(rank):
            if lose(piece):
                continue
            part, plan = carry_piece(route, piece, caches[piece.source_rank], num_tokens)
            nbytes += plan.header.data_nbytes
            arrived.append(part)
        received.append(assemble(arrived, route.target_boxes[rank], "req"))
    return received, nbytes


def carry_piece(route, piece, cache, num_tokens):
    own = own_layers(cache, route.source_boxes[piece.source_rank], num_tokens)
    ranks = {"source_rank": piece.source_rank, "target_rank": piece.target_rank}
    identity = PayloadId(edge=route.edge, transfer_id="req", **ranks)
    plan = plan_piece(identity, piece, own, plain=route.is_plain, metadata={}, checksum=False)
    lease = Held(plan.nbytes)
    plan.write_into(lease.buffer)
    return read_part(identity, piece, lease, 0.0), plan
