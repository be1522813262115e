"""Ctrl-C while KV is let go of: what had not ended is ended by the next try, and no sender keeps it for ever."""

import pytest
from stages import assert_same, full_cache, send_everywhere, stages

from omnikv import Route


def interrupted_once(end):
    calls = []

    def call():
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        end()

    return call


@pytest.mark.parametrize("end", ["close", "give_back"])
def test_kv_whose_end_was_interrupted_is_ended_whole_by_the_next_try(transport, namespace, monkeypatch, end):
    layers = full_cache(num_heads=2)
    route = Route.tp("a", "b", num_kv_heads=2, from_tp=2, to_tp=1, namespace=namespace)
    with stages(route, transport) as (senders, [receiver]):
        send_everywhere(senders, layers)
        kv = receiver.receive("req", timeout_s=60)
        for name in ("acknowledge", "release"):
            monkeypatch.setattr(kv._leases[0], name, interrupted_once(getattr(kv._leases[0], name)))
        with pytest.raises(KeyboardInterrupt):
            getattr(kv, end)()
        getattr(kv, end)()
        if end == "give_back":
            with receiver.receive("req", timeout_s=60) as again:
                assert_same(again.layers, layers)
        assert [sender.drain(timeout_s=60) for sender in senders] == [0, 0]
