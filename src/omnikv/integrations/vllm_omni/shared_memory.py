"""The published connector over POSIX shared memory, as released engines write and read it on one host.

A payload is a segment whose name is its key, with a lock file beside it that its writer holds while it writes. Whoever
reads it takes it away. Nobody but the key says whose it is, so pipelines on one host must not use the same keys; our
own transport `shm` has namespaces, leases and notices instead.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from omnikv.errors import ConfigError, TransportError
from omnikv.integrations.vllm_omni.object_wire import decode_object, encode_object

_MEMORY = Path("/dev/shm")
_NAME = "SharedMemoryConnector"
_MAX_KEY_NBYTES = 200
_SWEPT_A_PUT = 64


class SharedMemoryConnector:
    """Puts and gets objects under their keys. Safe to use from several threads; `close` removes what nobody read."""

    supports_raw_data = False

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        """`config` is what a configuration file says of it; nothing in it changes what this one does."""
        self.config = dict(config or {})
        self.stage_id = self.config.get("stage_id", -1)
        self._pending: dict[str, None] = {}
        self._lock = threading.Lock()
        self._counters: Counter[str] = Counter(puts=0, gets=0, bytes_transferred=0)

    def put(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> tuple[bool, int, dict[str, Any]]:
        """`(True, nbytes, metadata)` once the object can be read under its key; one that was there is replaced.

        Raises:
            ConfigError: the key cannot name a segment, or something in `data` cannot be sent.
            TransportError: the system gives no memory for it.
        """
        segment, lock_file = _places(put_key)
        payload = encode_object(data)
        self.reap_consumed()
        try:
            with lock_file.open("ab+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                segment.unlink(missing_ok=True)
                fd = os.open(segment, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o600)
                with open(fd, "wb") as memory:
                    # A full file system must fail here, not kill a reader later.
                    os.posix_fallocate(fd, 0, len(payload))
                    memory.write(payload)
        except OSError as error:
            segment.unlink(missing_ok=True)
            raise TransportError(
                f"{_NAME}: no shared memory for {len(payload)} bytes under {put_key!r} ({error.strerror}): "
                f"{_MEMORY} is full, or not to be written",
                transport=_NAME,
                key=put_key,
            ) from error
        with self._lock:
            self._pending[put_key] = None
        self._count("puts", len(payload))
        return True, len(payload), {"shm": {"name": put_key, "size": len(payload)}, "size": len(payload)}

    def get(
        self, from_stage: str, to_stage: str, get_key: str, metadata: Mapping[str, Any] | None = None
    ) -> tuple[Any, int] | None:
        """The object and its size in bytes, taken away, or None while there is none, or it is being written.

        `metadata` may be what `put` returned, or a mapping from keys to that; anything else is not read.

        Raises:
            ConfigError: the key cannot name a segment.
            WireError: there was something under the key that no connector wrote.
        """
        told = metadata.get(get_key, metadata) if isinstance(metadata, Mapping) else None
        handle = told.get("shm") if isinstance(told, Mapping) else None
        name, size = (handle["name"], int(handle["size"])) if isinstance(handle, Mapping) else (get_key, None)
        data = _take_away(name, size)
        if data is None:
            return None
        with self._lock:
            self._pending.pop(name, None)
        self._count("gets", len(data))
        return decode_object(data, get_key), len(data)

    def get_with_deadline(
        self,
        from_stage: str,
        to_stage: str,
        get_key: str,
        metadata: Mapping[str, Any] | None = None,
        *,
        deadline: float,
    ) -> tuple[Any, int] | None:
        """As `get`, which never waits."""
        return self.get(from_stage, to_stage, get_key, metadata)

    def reap_consumed(self) -> None:
        """Nothing; forgets some of the keys that their readers have taken away."""
        with self._lock:
            for key in list(self._pending)[:_SWEPT_A_PUT]:
                del self._pending[key]
                if (_MEMORY / key).exists():
                    self._pending[key] = None

    def cleanup(self, request_id: str) -> None:
        """Nothing; takes away what was put under exactly this key."""
        with self._lock:
            self._pending.pop(request_id, None)
        for place in _places(request_id):
            place.unlink(missing_ok=True)

    def health(self) -> dict[str, Any]:
        """The published health: a status and counters."""
        with self._lock:
            return {"status": "healthy", **self._counters}

    def close(self) -> None:
        """Take away what was put here and not read. Idempotent."""
        with self._lock:
            pending = list(self._pending)
        for key in pending:
            self.cleanup(key)

    def _count(self, what: str, nbytes: int) -> None:
        with self._lock:
            self._counters[what] += 1
            self._counters["bytes_transferred"] += nbytes


def _places(key: str) -> tuple[Path, Path]:
    """The segment of a key, and its lock file, as released engines name them.

    Raises:
        ConfigError: no file can have that name.
    """
    if not key or "/" in key or "\0" in key or key in (".", "..") or len(key.encode()) > _MAX_KEY_NBYTES:
        raise ConfigError(
            f"{_NAME}: a key names a file, so it has no slash and at most {_MAX_KEY_NBYTES} bytes: {key!r}"
        )
    return _MEMORY / key, _MEMORY / f"shm_{key}_lockfile.lock"


def _take_away(name: str, size: int | None) -> bytes | None:
    segment, lock_file = _places(name)
    try:
        with lock_file.open("rb+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with open(os.open(segment, os.O_RDONLY | os.O_NOFOLLOW), "rb") as memory:
                data = memory.read() if size is None else memory.read(size)
            if not data:
                return None
            segment.unlink()
            with suppress(FileNotFoundError):
                lock_file.unlink()
            return data
    except (FileNotFoundError, BlockingIOError):
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EACCES, errno.EPERM):
            raise TransportError(
                f"{_NAME}: {segment} is not this user's own segment ({error.strerror})", transport=_NAME, key=name
            ) from error
        raise
