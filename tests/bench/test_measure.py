"""Spreads and memory readings."""

import mmap

import pytest
import torch

from omnikv.bench import measure
from omnikv.bench.measure import ExtraMemory, Spread, WarmCopy, reset_peak
from omnikv.errors import ConfigError

MIB = 1 << 20


def test_a_spread_is_the_median_with_least_and_most():
    assert Spread.of([5.0, 1.0, 3.0]) == Spread(median=3.0, least=1.0, most=5.0)


def test_a_warm_copy_copies_every_byte():
    copy = WarmCopy(1000)
    assert copy.time_ms() > 0
    assert torch.equal(copy.source, copy.target)


def test_private_memory_counts_its_peak_even_when_it_is_gone_again():
    base = reset_peak()
    block = torch.ones(64 * MIB, dtype=torch.uint8)
    del block
    extra = ExtraMemory.since(base)
    assert extra.private >= 60 * MIB
    assert extra.shared < 4 * MIB


def test_shared_memory_that_was_touched_counts_as_shared_and_not_as_private():
    base = reset_peak()
    with mmap.mmap(-1, 64 * MIB) as shared:
        for start in range(0, len(shared), 4096):
            shared[start] = 1
        extra = ExtraMemory.since(base)
    assert extra.shared >= 60 * MIB
    assert extra.private < 16 * MIB


def test_a_kernel_that_cannot_reset_the_peak_is_a_plain_error(monkeypatch, tmp_path):
    monkeypatch.setattr(measure, "_CLEAR_REFS", tmp_path / "absent" / "clear_refs")
    with pytest.raises(ConfigError, match="peak memory cannot be measured here"):
        reset_peak()
