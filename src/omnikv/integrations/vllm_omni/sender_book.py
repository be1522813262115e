"""What a receiver knows of where its sender listens, and what to do with what an orchestrator tells it."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from omnikv.core.senders import SenderAddress, find_entry, is_assumed, read_address
from omnikv.errors import ConfigError

logger = logging.getLogger("omnikv.vllm_omni")

Stage = str | int | None


class SenderBook:
    """The latest usable address of the source stage's rank 0, or why the latest info could not be used.

    Sender info that names no usable sender is a failed receive, not a long wait: it is remembered until better info
    comes, and `for_receive` raises it (D12).
    """

    def __init__(self, source_stage: Stage, counters: Counter[str]) -> None:
        self._source_stage = source_stage
        self._counters = counters
        self._address: SenderAddress | None = None
        self._problem: ConfigError | None = None

    @property
    def host(self) -> str | None:
        return self._address.host if self._address is not None else None

    @property
    def base_port(self) -> int | None:
        return self._address.base_port if self._address is not None else None

    def update(self, sender_info: Any, stage: Stage = None) -> SenderAddress | None:
        """The address in `sender_info`, remembered from now on; None, logged and counted, when it holds none."""
        try:
            self._address = self._read(sender_info, stage)
        except ConfigError as error:
            self._log_once(error)
            self._problem = error
            return None
        self._problem = None
        return self._address

    def resolve(self, sender_info: Any, stage: Stage = None) -> dict[str, Any] | None:
        """The source stage's own entry of a sender table, or None, logged, when it has none. Nothing is remembered."""
        if not sender_info:
            return None
        try:
            return find_entry(sender_info, self._source_stage if stage is None else stage)
        except ConfigError as error:
            self._log_once(error)
            return None

    def for_receive(self, sender_info: Any) -> SenderAddress | None:
        """Where to ask for a request: the sender that comes with it, else the remembered one, if any.

        Raises:
            ConfigError: the request's own sender info, or the latest that was told, holds no usable sender.
        """
        if sender_info is not None:
            address = self._read(sender_info, None)
            if address.base_port is None:
                raise ConfigError(f"the request's sender info has no zmq_port, only host {address.host!r}")
            return address
        if self._problem is not None:
            raise ConfigError(str(self._problem)) from self._problem
        return self._address

    def _read(self, sender_info: Any, stage: Stage) -> SenderAddress:
        stage = self._source_stage if stage is None else stage
        address = read_address(find_entry(sender_info, stage))
        if is_assumed(sender_info, stage):
            self._counters["sender_assumed"] += 1
            if self._counters["sender_assumed"] == 1:
                logger.warning("sender info does not name source stage %r; taking its only entry, %s", stage, address)
        return address

    def _log_once(self, error: ConfigError) -> None:
        self._counters["sender_unknown"] += 1
        if str(error) != str(self._problem):
            logger.error("%s", error)
