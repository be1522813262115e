"""A part of a request is taken for what it shows itself to be, never for what the route would have liked."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
import xxhash
from boxed_caches import Held, boxed_cache, carry, carry_piece, positions, value_of

from omnikv import Edge, Layout, PagedKV, Parallel, PayloadId, Route
from omnikv.core.boxes import Region, Span
from omnikv.core.plan import Piece
from omnikv.core.tokens import Stripe
from omnikv.core.wire import PREFIX_NBYTES, UNSEALED, Extension, Header, encode_head, seal
from omnikv.core.wire_spans import lay_out
from omnikv.errors import ConfigError, ReceiveTimeout, RemoteProtocolError, WireError
from omnikv.handoff import part as part_module
from omnikv.handoff.assemble import assemble
from omnikv.handoff.cut import own_layers
from omnikv.handoff.part import _kept_content_of, prepare_part, read_part
from omnikv.handoff.receive import RoleFetch
from omnikv.handoff.send import plan_piece
from omnikv.tensors.kv import DenseSource, LayerSource
from omnikv.tensors.pack import KVCacheTransferData, plan_payload

EDGE = Edge(from_stage="prefill", to_stage="decode")
TOKENS = 12


def route_of(source, target, num_layers=2):
    return Route.parallel(EDGE, num_kv_heads=2, num_layers=num_layers, source=source, target=target)


ROUTE = route_of(Parallel(pp=2), Parallel(cp=2))
ROUTE_OF_ONE = Route.tp("prefill", "decode", num_kv_heads=2, from_tp=1, to_tp=1)


def sealed(piece, layers, **stated):
    """A payload of these layers under a head that states what it is told to."""
    boxes = ROUTE.source_boxes[piece.source_rank]
    own = own_layers(boxed_cache(boxes, TOKENS), boxes, TOKENS)
    identity = PayloadId(edge=EDGE, transfer_id="req", source_rank=piece.source_rank, target_rank=piece.target_rank)
    header = plan_piece(identity, piece, own, plain=False, metadata={}, checksum=False).header
    plan = plan_payload(
        request_id="req",
        layers=[LayerSource(DenseSource(key), DenseSource(value)) for key, value in layers],
        metadata={},
        extension=replace(header.extension, **stated),
        checksum=True,
    )
    lease = Held(plan.nbytes)
    plan.write_into(lease.buffer)
    return identity, lease


def layer(heads=2, rows=6):
    return torch.zeros(rows, heads, 2), torch.zeros(rows, heads, 2)


@pytest.mark.parametrize(
    ("layers", "stated", "message"),
    [
        ([layer()], {"regions": ()}, r"sent layers 0-0 heads \[0, 1\] tokens"),
        ([layer()], {"num_tokens": 14}, r"sent layers 0-0 .* \[\(0, 6, 6, 1\)\], the route says .* \[\(0, 7, 7, 1\)\]"),
        ([layer()], {"num_tokens": None}, "names regions without the number of tokens"),
        ([layer()], {"heads": (1, 0)}, r"sent heads \[1, 0\], the route says \[0, 1\]"),
        ([layer()] * 2, {}, "sent 2 layers for the 1 that it names"),
        ([layer(rows=5)], {}, r"layer 0 key has shape \[5, 2, 2\], expected \[6, 2, head_dim\]"),
        ([layer(heads=1)], {}, r"layer 0 key has shape \[6, 1, 2\], expected \[6, 2, head_dim\]"),
        ([(torch.zeros(6, 2), torch.zeros(6, 2))], {}, r"layer 0 key has shape \[6, 2\], expected"),
    ],
)
def test_a_part_that_is_not_what_the_route_says_is_refused(layers, stated, message):
    [piece, *_] = ROUTE.pieces_to(0)
    identity, lease = sealed(piece, layers, **stated)
    with pytest.raises(RemoteProtocolError, match=f"source rank 0.*{message}"):
        read_part(identity, piece, lease, 0.0)


def test_a_part_is_judged_by_itself_though_another_of_its_shape_was_right():
    [piece, *_] = ROUTE.pieces_to(0)
    good, lease = sealed(piece, [layer()])
    assert read_part(good, piece, lease, 0.0).num_tokens == TOKENS
    bad, lease = sealed(piece, [layer()], num_tokens=14)
    for _ in range(2):
        with pytest.raises(RemoteProtocolError, match="the route says"):
            read_part(bad, piece, lease, 0.0)
    again, lease = sealed(piece, [layer()])
    assert read_part(again, piece, lease, 0.0).num_tokens == TOKENS


def test_d35_a_set_without_one_of_its_parts_is_refused_though_it_was_whole_before():
    pieces = ROUTE.pieces_to(0)
    caches = [boxed_cache(boxes, TOKENS) for boxes in ROUTE.source_boxes]
    parts = [carry_piece(ROUTE, piece, cache, TOKENS)[0] for piece, cache in zip(pieces, caches, strict=True)]
    assert len(assemble(parts, ROUTE.target_boxes[0], "req").layers) == 2
    for part in parts:
        with pytest.raises(RemoteProtocolError, match="did not arrive whole"):
            assemble([part], ROUTE.target_boxes[0], "req")


def test_regions_that_name_more_than_came_are_refused_however_large():
    [piece, *_] = ROUTE.pieces_to(0)
    huge = Piece(source_rank=0, target_rank=0, boxes=(replace(piece.boxes[0], layers=Span(0, 1 << 50)),))
    [region] = decode_regions(piece)
    identity, lease = sealed(piece, [layer()], regions=(region._replace(layers=Span(0, 1 << 50)),))
    with pytest.raises(RemoteProtocolError, match="sent 1 layers for the 1125899906842624 that it names"):
        read_part(identity, huge, lease, 0.0)


@pytest.mark.parametrize(
    "stated",
    [
        {"heads": tuple(range(10_000))},
        {"regions": (Region(Span(0, 1), (0,), ()),) * 10_000},
        {"regions": (Region(Span(0, 1), tuple(range(10_000)), ()),)},
        {"regions": (Region(Span(0, 1), (0, 1), (Stripe.of(0, 1),) * 10_000),)},
    ],
)
def test_a_part_that_says_very_much_is_refused_in_few_words(stated):
    [piece, *_] = ROUTE.pieces_to(0)
    identity, lease = sealed(piece, [layer()], **stated)
    kept = _kept_content_of.cache_info().misses
    with pytest.raises(RemoteProtocolError, match="source rank 0 sent") as caught:
        read_part(identity, piece, lease, 0.0)
    assert len(str(caught.value)) < 1000
    # Nor is it kept for the next of its shape: a few of them would fill the memory.
    assert kept == _kept_content_of.cache_info().misses


def decode_regions(piece):
    caches = boxed_cache(ROUTE.source_boxes[piece.source_rank], TOKENS)
    part, _ = carry_piece(ROUTE, piece, caches, TOKENS)
    return part.regions


def test_d35_a_part_that_is_damaged_leaves_nothing_that_could_be_used():
    pieces = ROUTE.pieces_to(0)
    caches = [boxed_cache(boxes, TOKENS) for boxes in ROUTE.source_boxes]
    first, _ = carry_piece(ROUTE, pieces[0], caches[0], TOKENS)
    identity, lease = sealed(pieces[1], [layer()])
    lease.buffer[-1] ^= 1
    with pytest.raises(WireError):
        read_part(identity, pieces[1], lease, 0.0)
    with pytest.raises(RemoteProtocolError, match="did not arrive whole: no source holds heads 0, 1 of layer 1"):
        assemble([first], ROUTE.target_boxes[0], "req")


def test_parts_of_requests_of_different_length_do_not_become_one():
    caches = [boxed_cache(boxes, TOKENS) for boxes in ROUTE.source_boxes]
    pieces = ROUTE.pieces_to(0)
    first, _ = carry_piece(ROUTE, pieces[0], caches[0], TOKENS)
    other, _ = carry_piece(ROUTE, pieces[1], boxed_cache(ROUTE.source_boxes[1], 14), 14)
    with pytest.raises(RemoteProtocolError, match="differ in 14 against 12 tokens of the request"):
        assemble([first, other], ROUTE.target_boxes[0], "req")


def test_x04_one_layer_from_parts_of_different_dtype_is_refused_by_name():
    route = route_of(Parallel(cp=2), Parallel())
    caches = [boxed_cache(boxes, TOKENS) for boxes in route.source_boxes]
    caches[1][1] = tuple(tensor.float() for tensor in caches[1][1])
    with pytest.raises(RemoteProtocolError, match=r"layer 1: .*float32 against .*float64"):
        carry(route, caches, TOKENS)


def test_a_paged_cache_gives_a_share_of_its_tokens():
    route = route_of(Parallel(), Parallel(cp=2, cp_block=2, tp=2), num_layers=1)
    key, value = (value_of(0, (0, 1), range(11), side) for side in (0, 1))
    pool = torch.full((2, 4, 4, 2, 2), -1.0, dtype=torch.float64)
    for side, tensor in enumerate((key, value)):
        pool[side, [2, 0, 3]] = torch.cat([tensor, tensor[:1]]).view(3, 4, 2, 2)
    paged = PagedKV([pool], block_ids=[2, 0, 3], num_tokens=11, layout=Layout.stacked(4, dim=0))
    received, _ = carry(route, [paged], 11)
    for boxes, kv in zip(route.target_boxes, received, strict=True):
        rows = positions(boxes[0], 11)
        assert torch.equal(kv.layers[0].key, value_of(0, boxes[0].heads, rows, 0))
        assert torch.equal(kv.layers[0].value, value_of(0, boxes[0].heads, rows, 1))


@pytest.mark.parametrize(
    ("layers", "num_tokens", "message"),
    [
        (3, 12, "there are 3 layers, but the route states 2 for this rank"),
        (2, None, "cannot tell how many there are; pass num_tokens="),
        (2, 11, r"layer 0 has 6 tokens, but the route states .* of the request's 11, which is 5"),
        (2, -1, "num_tokens must be the request's number of tokens, got -1"),
    ],
)
def test_layers_that_are_not_this_ranks_share_are_refused_before_anything_moves(layers, num_tokens, message):
    boxes = route_of(Parallel(cp=2), Parallel()).source_boxes[1]
    cache = boxed_cache(boxes, TOKENS)
    with pytest.raises(ConfigError, match=message):
        own_layers((cache * 2)[:layers], boxes, num_tokens)


@pytest.mark.parametrize(("rows", "num_tokens"), [([5, 5], 4), ([5, 5], 99), ([3, 5], 3)])
def test_a_number_of_tokens_that_no_layer_of_a_plain_route_has_is_refused(rows, num_tokens):
    [boxes] = Route.tp("a", "b", num_kv_heads=2, from_tp=1, to_tp=1).source_boxes
    with pytest.raises(ConfigError, match=f"num_tokens is {num_tokens}, but the layers hold 5 tokens"):
        own_layers([layer(rows=count) for count in rows], boxes, num_tokens)


def test_windows_that_nobody_declared_are_handed_on_and_are_not_taken_for_the_request():
    route = Route.tp("a", "b", num_kv_heads=2, from_tp=1, to_tp=1)
    [kv], _ = carry(route, [[layer(rows=3), layer(rows=5)]], None)
    assert [one.key.shape[0] for one in kv.layers] == [3, 5]
    assert kv.num_tokens == 5


def test_where_the_layers_are_known_each_has_all_tokens_though_no_regions_are_named():
    route = route_of(Parallel(), Parallel())
    with pytest.raises(ConfigError, match=r"layer 0 has 3 tokens, but the route states .* of the request's 5"):
        carry(route, [[layer(rows=3), layer(rows=5)]], None)
    [piece] = route.pieces()
    identity, lease = sealed(piece, [layer(rows=3), layer(rows=5)], regions=(), heads=(0, 1))
    with pytest.raises(RemoteProtocolError, match=r"layer 0 key has shape \[3, 2, 2\], expected \[5, 2, head_dim\]"):
        read_part(identity, piece, lease, 0.0)


def test_a_payload_of_fewer_layers_than_the_route_says_is_refused_though_it_names_none():
    route = route_of(Parallel(), Parallel())
    [piece] = route.pieces()
    identity, lease = sealed(piece, [layer()], regions=(), heads=(0, 1))
    with pytest.raises(RemoteProtocolError, match=r"source rank 0 sent layers 0-0 .*, the route says layers 0-1"):
        read_part(identity, piece, lease, 0.0)


def test_without_regions_the_tokens_are_counted_and_not_believed():
    route = Route.tp("a", "b", num_kv_heads=2, from_tp=1, to_tp=1)
    [piece] = route.pieces()
    identity, lease = sealed(piece, [layer(rows=5)], regions=(), num_tokens=99)
    part = read_part(identity, piece, lease, 0.0)
    assert assemble([part], route.target_boxes[0], "req").num_tokens == 5


def test_a_value_of_fewer_tokens_than_its_key_is_refused_though_its_head_is_sealed():
    route = Route.tp("a", "b", num_kv_heads=2, from_tp=1, to_tp=1)
    [piece] = route.pieces()
    spans, nbytes = lay_out([("key", 0, "float32", (5, 2, 2)), ("value", 0, "float32", (3, 2, 2))])
    extension = Extension(source_rank=0, target_rank=0, role="primary", attempt=0, heads=(0, 1))
    head = encode_head(Header(request_id="req", num_layers=1, spans=spans, data_nbytes=nbytes, extension=extension))
    lease = Held(len(head) + nbytes)
    lease.buffer[: len(head)] = seal(head, xxhash.xxh3_128(head).hexdigest())
    identity = PayloadId(edge=route.edge, transfer_id="req", source_rank=0, target_rank=0)
    with pytest.raises(RemoteProtocolError, match=r"layer 0 value has shape \[3, 2, 2\], expected \[5, 2, head_dim\]"):
        read_part(identity, piece, lease, 0.0)


def test_a_part_does_not_pass_for_a_whole_cache_under_the_published_fields():
    [piece, *_] = ROUTE.pieces_to(0)
    _, lease = sealed(piece, [layer()])
    with pytest.raises(WireError, match=r"holds regions of a cache.*receive it with KVReceiver"):
        KVCacheTransferData.from_bytes(lease.buffer)


class TestAPartThatIsPreparedWhileItIsWritten:
    """Only its head is known at first; `begun` is such a part, with what writes it."""

    @pytest.fixture
    def begun(self):
        [piece] = ROUTE_OF_ONE.pieces()
        return self.planned(piece, [(torch.randn(5, 2, 2), torch.randn(5, 2, 2)) for _ in range(3)])

    def planned(self, piece, layers, *, checksum=False, name="req"):
        identity = PayloadId(edge=EDGE, transfer_id=name, source_rank=0, target_rank=0)
        own = own_layers(layers, ROUTE_OF_ONE.source_boxes[0])
        plan = plan_piece(identity, piece, own, plain=True, metadata={}, checksum=checksum)
        lease = Held(plan.nbytes)
        return piece, layers, identity, plan, lease

    def assert_holds(self, read, layers):
        for pair, expected in zip(read.pairs, layers, strict=True):
            assert torch.equal(pair.key, expected[0])
            assert torch.equal(pair.value, expected[1])

    def test_it_is_not_read_again_and_holds_what_was_written_since(self, begun, monkeypatch):
        piece, layers, identity, plan, lease = begun
        prepared = prepare_part(identity, piece, lease.buffer, plan.head)
        assert prepared is not None
        plan.write_into(lease.buffer)
        monkeypatch.setattr(part_module, "decode_payload", None)
        self.assert_holds(read_part(identity, piece, lease, 0.0, prepared), layers)

    def test_another_head_in_the_same_memory_is_read_anew(self, begun):
        piece, _, identity, plan, lease = begun
        prepared = prepare_part(identity, piece, lease.buffer, plan.head)
        layers = [(torch.randn(5, 2, 1), torch.randn(5, 2, 1)) for _ in range(3)]
        _, _, _, other, _ = self.planned(piece, layers)
        lease.buffer = lease.buffer[: other.nbytes]
        other.write_into(lease.buffer)
        self.assert_holds(read_part(identity, piece, lease, 0.0, prepared), layers)

    def test_the_same_head_in_other_memory_is_read_anew(self, begun):
        piece, layers, identity, plan, lease = begun
        prepared = prepare_part(identity, piece, lease.buffer, plan.head)
        other = Held(plan.nbytes)
        plan.write_into(other.buffer)
        self.assert_holds(read_part(identity, piece, other, 0.0, prepared), layers)

    @pytest.mark.parametrize("flaw", ["no head", "checksum", "another request", "not aligned", "cut short"])
    def test_what_cannot_be_prepared_is_left_for_when_it_is_there(self, begun, flaw):
        piece, layers, identity, plan, lease = begun
        head, memory = plan.head, lease.buffer
        if flaw == "no head":
            head = b""
        elif flaw == "checksum":
            *_, plan, lease = self.planned(piece, layers, checksum=True)
            assert plan.head == b""
            plan.write_into(lease.buffer)
            memory, head = lease.buffer, bytes(lease.buffer[: plan.nbytes - plan.header.data_nbytes])
        elif flaw == "another request":
            *_, plan, _ = self.planned(piece, layers, name="other")
            head = plan.head
        elif flaw == "not aligned":
            memory = memoryview(bytearray(plan.nbytes + 1))[1:]
        else:
            head = head[:-1]
        assert prepare_part(identity, piece, memory, head) is None

    def test_a_head_with_more_behind_it_is_taken_to_its_end(self, begun):
        piece, layers, identity, plan, lease = begun
        prepared = prepare_part(identity, piece, lease.buffer, plan.head + b"more")
        plan.write_into(lease.buffer)
        assert prepared.fits(lease.buffer)
        self.assert_holds(read_part(identity, piece, lease, 0.0, prepared), layers)

    def test_a_head_that_is_shorter_than_it_says_is_no_head(self, begun):
        piece, _, identity, plan, _ = begun
        longer = len(plan.head) + 64
        head = (longer - PREFIX_NBYTES).to_bytes(PREFIX_NBYTES, "big") + plan.head[PREFIX_NBYTES:]
        head = seal(head, xxhash.xxh3_128(seal(head, UNSEALED)).hexdigest())
        assert prepare_part(identity, piece, Held(plan.nbytes).buffer, head) is None

    def test_the_same_head_before_less_data_is_read_anew(self, begun):
        piece, _, identity, plan, lease = begun
        prepared = prepare_part(identity, piece, lease.buffer, plan.head)
        plan.write_into(lease.buffer)
        lease.buffer = lease.buffer[:-1]
        with pytest.raises(WireError):
            read_part(identity, piece, lease, 0.0, prepared)

    @pytest.mark.parametrize("more", [b"", b',"ck":"xxh3_128.header.' + b"0" * 32 + b'"}'])
    def test_data_that_is_not_written_is_not_hashed(self, begun, more, monkeypatch):
        piece, layers, identity, _, _ = begun
        *_, plan, lease = self.planned(piece, layers, checksum=True)
        plan.write_into(lease.buffer)
        head = bytes(lease.buffer[: plan.nbytes - plan.header.data_nbytes])
        monkeypatch.setattr(part_module, "decode_payload", None)
        assert prepare_part(identity, piece, lease.buffer, head + more) is None

    def test_it_is_not_kept_alive_where_it_does_not_come(self, begun):
        piece, _, identity, plan, lease = begun
        fetch = RoleFetch("primary", [(identity, piece)], ROUTE_OF_ONE.target_boxes[0])
        fetch.prepare(identity, lease.buffer, plan.head)
        view = weakref.ref(fetch._prepared[identity].read.pairs[0].key)
        with pytest.raises(ReceiveTimeout) as caught:
            fetch.require()
        assert caught.value.__traceback__ is not None
        assert view() is None
