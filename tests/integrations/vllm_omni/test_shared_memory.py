"""The published connector over POSIX shared memory, between connectors of one host."""

from __future__ import annotations

import fcntl
import uuid
from pathlib import Path

import pytest
import torch

from omnikv.errors import ConfigError, TransportError, WireError
from omnikv.integrations.vllm_omni.shared_memory import SharedMemoryConnector

MEMORY = Path("/dev/shm")


@pytest.fixture
def key():
    return f"omnikv-test-{uuid.uuid4().hex}"


@pytest.fixture
def sender():
    connector = SharedMemoryConnector({"shm_threshold_bytes": 65536})
    yield connector
    connector.close()


@pytest.fixture
def receiver():
    connector = SharedMemoryConnector()
    yield connector
    connector.close()


def files_of(key):
    return sorted(path.name for path in MEMORY.glob(f"*{key}*"))


def test_an_object_is_read_once_under_its_key_and_leaves_nothing(sender, receiver, key):
    sent = {"data": torch.arange(10), "kind": "kv"}
    done, nbytes, metadata = sender.put("0", "1", key, sent)
    assert done
    assert metadata == {"shm": {"name": key, "size": nbytes}, "size": nbytes}
    got, size = receiver.get("0", "1", key)
    assert size == nbytes
    assert torch.equal(got["data"], sent["data"])
    assert receiver.get("0", "1", key) is None
    assert files_of(key) == []
    assert receiver.health()["gets"] == sender.health()["puts"] == 1


@pytest.mark.parametrize("told", ["what put said", "by key", "of another transport"])
def test_metadata_in_its_published_forms_leads_to_the_payload(sender, receiver, key, told):
    _, _, said = sender.put("0", "1", key, b"payload")
    metadata = {"what put said": said, "by key": {key: said}, "of another transport": {"source_host": "h"}}[told]
    assert receiver.get("0", "1", key, metadata)[0] == b"payload"


def test_a_payload_under_a_used_key_replaces_the_old_one(sender, receiver, key):
    sender.put("0", "1", key, b"old")
    sender.put("0", "1", key, b"new")
    assert receiver.get("0", "1", key)[0] == b"new"


def test_a_payload_that_is_being_written_is_not_there_yet(sender, receiver, key):
    sender.put("0", "1", key, b"payload")
    with (MEMORY / f"shm_{key}_lockfile.lock").open("rb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert receiver.get("0", "1", key) is None
    assert receiver.get("0", "1", key)[0] == b"payload"


def test_cleanup_takes_exactly_that_key_away_and_close_the_rest(sender, receiver, key):
    for name in (key, f"{key}-more", f"{key}-other"):
        sender.put("0", "1", name, b"payload")
    sender.cleanup(key)
    assert receiver.get("0", "1", key) is None
    assert receiver.get("0", "1", f"{key}-more")[0] == b"payload"
    sender.close()
    sender.close()
    assert files_of(key) == []


@pytest.mark.parametrize("bad", ["", "../escape", "a/b", "..", "k" * 201])
def test_a_key_that_names_no_segment_is_refused(sender, receiver, bad):
    with pytest.raises(ConfigError, match="a key names a file"):
        sender.put("0", "1", bad, b"x")
    with pytest.raises(ConfigError, match="a key names a file"):
        receiver.get("0", "1", bad)


def test_a_segment_that_is_a_link_to_something_else_is_not_followed(sender, receiver, key, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"not yours")
    sender.put("0", "1", key, b"x")
    (MEMORY / key).unlink()
    (MEMORY / key).symlink_to(secret)
    with pytest.raises(TransportError, match="not this user's own segment"):
        receiver.get("0", "1", key)
    assert secret.read_bytes() == b"not yours"


def test_what_no_connector_wrote_is_an_error_and_is_gone(sender, receiver, key):
    sender.put("0", "1", key, b"x")
    (MEMORY / key).write_bytes(b"\xc1")
    with pytest.raises(WireError):
        receiver.get("0", "1", key)
    assert receiver.get("0", "1", key) is None
