"""What an end of an edge may say of itself."""

import math

import pytest

from omnikv import Edge
from omnikv.errors import ConfigError
from omnikv.transports.base import Endpoint

EDGE = Edge(from_stage="prefill", to_stage="decode")


@pytest.mark.parametrize("ttl_s", [0, -1.0, math.nan, "5", None, True])
def test_a_time_to_live_that_is_none_is_refused(ttl_s):
    with pytest.raises(ConfigError, match="payload_ttl_s must be a number of seconds above 0"):
        Endpoint(edge=EDGE, side="source", rank=0, peer_ranks=(0,), payload_ttl_s=ttl_s)


@pytest.mark.parametrize("ttl_s", [1, 0.5, math.inf])
def test_a_time_to_live_may_be_endless(ttl_s):
    assert Endpoint(edge=EDGE, side="source", rank=0, peer_ranks=(0,), payload_ttl_s=ttl_s).payload_ttl_s == ttl_s
