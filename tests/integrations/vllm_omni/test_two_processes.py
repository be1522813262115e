"""Two processes that run no engine hand KV over through the published manager and our shared memory."""

from __future__ import annotations

import subprocess
import sys
import uuid
from types import SimpleNamespace

import pytest

from omnikv.integrations.vllm_omni.manager import OmniKVCacheConfig, OmniKVTransferManager

SENDER = """
import sys, torch
from omnikv.integrations.vllm_omni.manager import OmniKVCacheConfig, OmniKVTransferManager

torch.set_num_threads(1)
manager = OmniKVTransferManager(OmniKVCacheConfig(
    connector_config={"type": "shm", "namespace": sys.argv[1]}, from_stage="0", to_stage="1", need_send_cache=True))
cache = torch.arange(2 * 4 * 4 * 2 * 8, dtype=torch.float32).view(2, 4, 4, 2, 8)
finished = {"good": {"block_ids": [2, 0], "seq_len": 6}, "bad": {"block_ids": [99], "seq_len": 1}}
print(manager.handle_finished_requests_kv_transfer(finished, [cache], 4, "float32"), flush=True)
sys.stdin.readline()
manager.close()
"""


@pytest.fixture
def sender():
    namespace = f"two-processes-{uuid.uuid4().hex[:12]}"
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", SENDER, namespace],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"OMP_NUM_THREADS": "1"},
    )
    yield SimpleNamespace(process=process, namespace=namespace)
    process.kill()
    process.communicate()


@pytest.fixture
def receiver(sender):
    manager = OmniKVTransferManager(
        OmniKVCacheConfig(
            connector_config={"type": "shm", "namespace": sender.namespace},
            stage_id=1,
            need_recv_cache=True,
            recv_timeout=60,
        )
    )
    yield manager
    manager.close()


def request(request_id):
    return SimpleNamespace(request_id=request_id, sampling_params=SimpleNamespace())


def test_kv_arrives_and_a_request_that_could_not_be_sent_fails_at_once(sender, receiver, caplog):
    req = request("good")
    assert receiver.receive_multi_kv_cache_distributed(req)
    # Block 2 of the keys begins at 2 * 4 * 2 * 8; block 0 follows.
    assert req.past_key_values.key_cache[0][[0, 4], 0, 0].tolist() == [128.0, 0.0]
    assert req.past_key_values.value_cache[0].shape == (6, 2, 8)
    assert sender.process.stdout.readline() == "['good', 'bad']\n"
    assert receiver.receive_multi_kv_cache_distributed(request("bad")) is False
    assert "block ids [99]" in caplog.text
