"""Lent payloads: made up of their spans, they are the very bytes that the plan would have written."""

import ctypes

import pytest
import torch
from kv_layouts import make_cache, random_bits

from omnikv.core.layout import Layout
from omnikv.core.lending import MAX_SPANS
from omnikv.errors import ConfigError
from omnikv.tensors.blocks import PagedKV
from omnikv.tensors.kv import DenseSource, LayerSource
from omnikv.tensors.lent import LentPayload
from omnikv.tensors.pack import plan_payload

SLOTS, HEADS, DIM = 16, 4, 64
SHUFFLED = [7, 3, 4, 11, 0, 9]
TOKENS = 5 * SLOTS + 3


def _room(nbytes):
    buffer = torch.zeros(nbytes + 16, dtype=torch.uint8).numpy()
    return memoryview(buffer)[-buffer.ctypes.data % 16 :][:nbytes]


def _both(sources):
    """The bytes as they are written, and as they are lent; and the loan."""
    plan = plan_payload(request_id="r", layers=sources, checksum=False)
    whole = _room(plan.nbytes)
    plan.write_into(whole)
    lent = LentPayload(plan)
    room = _room(lent.nbytes)
    room[:] = b"\xa5" * lent.nbytes
    lent.write_into(room)
    parts = [
        ctypes.string_at(span.start, span.nbytes)
        if span.is_lent
        else bytes(room[span.start : span.start + span.nbytes])
        for span in lent.loan.spans
    ]
    return bytes(whole), b"".join(parts), lent


def _paged(layout, ids=SHUFFLED, tokens=TOKENS, dtype=torch.bfloat16, blocks=12, dim=DIM):
    make = random_bits(dtype, 1)
    caches = [make_cache(layout, blocks, SLOTS, HEADS, dim, make) for _ in range(2)]
    return PagedKV(caches, ids, tokens, layout)


def _lent_nbytes(lent):
    return sum(span.nbytes for span in lent.loan.spans if span.is_lent)


@pytest.mark.parametrize(
    "layout", [Layout.split_pair(SLOTS), Layout.stacked(SLOTS, dim=0), Layout.stacked(SLOTS, dim=1)]
)
def test_shuffled_blocks_are_lent_run_by_run_and_only_the_head_is_written(layout):
    whole, made_up, lent = _both(_paged(layout).layer_sources())
    assert made_up == whole
    assert _lent_nbytes(lent) == 4 * TOKENS * HEADS * DIM * 2
    assert lent.nbytes < 4096


def test_neighbouring_blocks_are_one_run():
    whole, made_up, lent = _both(_paged(Layout.split_pair(SLOTS), ids=[2, 3, 4, 5], tokens=60).layer_sources())
    assert made_up == whole
    assert sum(span.is_lent for span in lent.loan.spans) == 4


@pytest.mark.parametrize("layout", [Layout.packed(SLOTS), Layout.stacked(SLOTS, dim=0, heads_first=True)])
def test_blocks_that_lie_in_another_order_are_written(layout):
    whole, made_up, lent = _both(_paged(layout).layer_sources())
    assert made_up == whole
    assert not _lent_nbytes(lent)
    assert not lent.loan.memory


def test_some_heads_and_dense_tensors_are_written_beside_what_is_lent():
    paged = _paged(Layout.split_pair(SLOTS))
    dense = torch.arange(TOKENS * HEADS * DIM, dtype=torch.float32).view(TOKENS, HEADS, DIM)
    mixed = [
        paged.layer_sources((1, 2))[0],
        LayerSource(DenseSource(dense), DenseSource(dense)),
        paged.layer_sources()[1],
    ]
    whole, made_up, lent = _both(mixed)
    assert made_up == whole
    assert _lent_nbytes(lent) == 2 * TOKENS * HEADS * DIM * 2


def test_gaps_between_tensors_are_zeros_as_always():
    whole, made_up, lent = _both(_paged(Layout.split_pair(SLOTS), dtype=torch.uint8, tokens=81, dim=65).layer_sources())
    assert made_up == whole
    assert _lent_nbytes(lent) == 4 * 81 * HEADS * 65


def test_what_is_cut_too_finely_is_written_and_a_message_holds_the_spans():
    thin = _paged(Layout.split_pair(SLOTS), dim=8)
    whole, made_up, lent = _both(thin.layer_sources())
    assert made_up == whole
    assert not _lent_nbytes(lent)
    ids = list(range(0, 4000, 2))
    many = _paged(Layout.split_pair(SLOTS), ids=ids, tokens=len(ids) * SLOTS, blocks=4000, dtype=torch.uint8)
    whole, made_up, lent = _both(many.layer_sources())
    assert made_up == whole
    assert len(lent.loan.spans) <= MAX_SPANS
    assert _lent_nbytes(lent) == len(ids) * SLOTS * HEADS * DIM


def test_memory_is_known_to_be_gone_when_its_tensor_is():
    layout = Layout.split_pair(SLOTS)
    caches = [make_cache(layout, 12, SLOTS, HEADS, DIM, random_bits(torch.bfloat16, 1))]
    plan = plan_payload(request_id="r", layers=PagedKV(caches, [5, 1], 20, layout).layer_sources(), checksum=False)
    memory = LentPayload(plan).loan.memory
    assert [(one.address, one.nbytes) for one in memory] == [(one.data_ptr(), one.nbytes) for one in caches[0]]
    is_gone = memory[0].is_gone
    assert not is_gone()
    del plan, memory, caches
    assert is_gone()


def test_a_checksum_over_what_nobody_reads_is_refused():
    plan = plan_payload(request_id="r", layers=_paged(Layout.split_pair(SLOTS)).layer_sources(), checksum=True)
    with pytest.raises(ConfigError, match="can have no checksum"):
        LentPayload(plan)
