"""Managers, requests and connectors for tests that speak through an engine's published names."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from tests.support.engine_groups import thread_world

# Where an engine's own tests patch the two lookups.
MANAGER_MODULE = "vllm_omni.distributed.omni_connectors.kv_transfer_manager"


class OneShotConnector:
    """Keeps puts by edge and key and gives each out once, as released engines' connectors do."""

    supports_raw_data = False

    def __init__(self):
        self.kept, self.asked, self.puts, self.closed = {}, [], 0, 0

    def put(self, from_stage, to_stage, put_key, data):
        self.puts += 1
        self.kept[from_stage, to_stage, put_key] = data
        return True, len(data), {}

    def get(self, from_stage, to_stage, get_key, metadata=None):
        self.asked.append((get_key, metadata))
        data = self.kept.pop((from_stage, to_stage, get_key), None)
        return None if data is None else (data, len(data))

    def close(self):
        self.closed += 1


@pytest.fixture
def make_manager():
    """Builds managers of a rank, with the tensor-parallel lookups patched, and closes them."""
    made = []

    def make(*, rank=0, tp=1, connector=None, async_prefetch=False, **config):
        from vllm_omni.distributed.omni_connectors.kv_transfer_manager import OmniKVCacheConfig, OmniKVTransferManager

        with (
            patch(f"{MANAGER_MODULE}.get_local_tp_rank", return_value=rank),
            patch(f"{MANAGER_MODULE}.get_tp_world_size", return_value=tp),
        ):
            manager = OmniKVTransferManager(OmniKVCacheConfig(**config), async_prefetch=async_prefetch)
        if connector is not None:
            manager._connector = connector
        made.append(manager)
        return manager

    yield make
    for manager in made:
        manager.close()


@pytest.fixture
def make_receiver(make_manager):
    def make(**more):
        return make_manager(**{"stage_id": 1, "need_recv_cache": True, "recv_timeout": 0.0, **more})

    return make


@pytest.fixture
def make_sender(make_manager):
    def make(**more):
        return make_manager(**{"from_stage": "0", "to_stage": "1", "need_send_cache": True, **more})

    return make


@pytest.fixture
def world(make_receiver, connector):
    """The receivers of a world of these sizes, one connector between all of them."""

    def make(*, connectors=None, more=None, **sizes):
        receivers = []
        tp = sizes.get("tp", 1)
        for rank, layout in enumerate(thread_world(**sizes)):
            mine = {"rank": layout.tp_group.rank_in_group, "connector": connectors[rank] if connectors else connector}
            receiver = make_receiver(**{**mine, "from_tp": tp, "to_tp": tp, **(more or {})})
            receiver._topo_config = layout
            receivers.append(receiver)
        return receivers

    return make


@pytest.fixture
def connector():
    return OneShotConnector()


@pytest.fixture
def request_of():
    """Builds a request with sampling parameters."""

    def make(request_id="r1", **sampling_params):
        return SimpleNamespace(request_id=request_id, sampling_params=SimpleNamespace(**sampling_params))

    return make


@pytest.fixture
def packed():
    """Builds a packed payload whose keys are its head ids, and whose values are those plus 100."""

    def pack(heads=(7,), request_id="r1", tokens=3, metadata=None):
        from vllm_omni.distributed.omni_connectors.kv_transfer_manager import KVCacheTransferData

        key = torch.tensor(heads, dtype=torch.float32).view(1, -1, 1).expand(tokens, len(heads), 4).contiguous()
        blocks = {"key_cache": [key], "value_cache": [key + 100]}
        return KVCacheTransferData(request_id, blocks, [0], metadata or {"seq_len": tokens}).to_bytes()

    return pack


@pytest.fixture
def heads_of():
    """The head ids in a payload or KV object made by `packed`."""

    def read(kv):
        keys = kv["layer_blocks"]["key_cache"] if isinstance(kv, dict) else kv.key_cache
        return keys[0][0, :, 0].tolist()

    return read
