"""Messages between peers, as msgspec structs: what goes over a control channel and nothing else.

Every struct is frozen and refuses unknown fields of the wrong type when decoded; none can carry code.
"""

from __future__ import annotations

import msgspec


class QueryRequest(msgspec.Struct, frozen=True):
    """Asks a sender what it holds under a published key; a map on the wire, as released engines send it."""

    request_id: str


class QueryResponse(msgspec.Struct, frozen=True):
    """What a sender holds under a key: its size in bytes, and whether it is a raw payload (`is_fast_path`)."""

    request_id: str
    data_size: int
    is_fast_path: bool


# Said instead of a QueryResponse when the sender holds nothing under the key.
INFO_NOT_FOUND = b"info_not_found"
# Opens a QueryRequest, so that a listener can tell it from a pull request (vllm-omni's mooncake connector).
QUERY_INFO = b"query_info"
