"""The benchmark's KV: as large as asked for, and any wrong value in it is found."""

import torch

from omnikv.bench.workload import MIB, Workload
from omnikv.tensors.kv import LayerKV

SMALL = Workload(size_mib=1, num_layers=2, num_heads=2, head_dim=16, block_size=16)


def _received():
    layers = []
    for layer in SMALL.paged(SMALL.build_caches()).layer_sources():
        tensors = [torch.empty(source.shape, dtype=source.dtype) for source in layer]
        for source, tensor in zip(layer, tensors, strict=True):
            source.write_into(tensor)
        layers.append(LayerKV(*tensors))
    return layers


def test_a_request_has_as_many_bytes_as_its_size_says():
    workload = Workload(size_mib=256)
    assert workload.num_tokens == 2048
    assert workload.num_blocks == 128
    assert workload.num_tokens * 32 * 2 * 8 * 128 * 2 == 256 * MIB


def test_the_blocks_are_shuffled_and_the_same_in_every_process():
    ids = Workload(size_mib=256).block_ids()
    assert ids == Workload(size_mib=256).block_ids()
    assert list(ids) != sorted(ids)
    assert len(set(ids)) == len(ids)


def test_what_was_gathered_from_the_caches_matches():
    assert SMALL.matches(_received())


def test_one_wrong_value_two_swapped_tokens_and_two_swapped_layers_are_found():
    layers = _received()
    layers[1].value[3, 1, 5].neg_()
    assert not SMALL.matches(layers)
    layers = _received()
    layers[0].key[[0, 1]] = layers[0].key[[1, 0]]
    assert not SMALL.matches(layers)
    assert not SMALL.matches(_received()[::-1])


def test_a_missing_layer_token_or_another_dtype_is_found():
    layers = _received()
    assert not SMALL.matches(layers[:1])
    assert not SMALL.matches([LayerKV(key[:-1], value) for key, value in layers])
    assert not SMALL.matches([LayerKV(key.view(torch.int16), value) for key, value in layers])


def test_requests_that_differ_in_length_are_whole_first_and_then_shorter_each_by_another_number():
    workload = Workload(size_mib=64)
    lengths = [workload.shorter(number) for number in range(64)]
    assert lengths[0] == workload.num_tokens
    assert len(set(lengths)) == 64
    assert min(lengths) > workload.num_tokens * 7 // 8 - 1
    assert [Workload(tokens=3).shorter(number) for number in range(3)] == [3, 3, 3]
    shorter = SMALL.paged(SMALL.build_caches(), SMALL.shorter(1))
    assert shorter.num_tokens < SMALL.num_tokens


def test_a_request_may_be_given_in_tokens():
    workload = Workload(tokens=3, pool_factor=1)
    assert (workload.num_tokens, workload.num_blocks, workload.pool_blocks) == (3, 1, 1)
    assert workload.nbytes == 3 * 32 * 2 * 8 * 128 * 2
