"""Requests of an engine received by several ranks at once, for tests that speak through the published names."""

from __future__ import annotations

import threading


def run_together(calls):
    """What each call gives, or the error that it raises; every one runs in a thread of its own."""
    outcomes = {}

    def run(number, call):
        try:
            outcomes[number] = call()
        except Exception as error:  # noqa: BLE001
            outcomes[number] = error

    threads = [threading.Thread(target=run, args=(number, call)) for number, call in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outcomes[number] for number in range(len(calls))]


def receive_together(receivers, requests, collector=None):
    """What each rank's receive says, or the error that it raises."""
    return run_together(
        [
            lambda receiver=receiver, req=req: receiver.receive_multi_kv_cache_distributed(req, collector)
            for receiver, req in zip(receivers, requests, strict=True)
        ]
    )


def shelve(connector, packed, tp_ranks, *request_ids, **more):
    """Puts what these tensor-parallel ranks of a stage of as many would be sent."""
    for request_id in request_ids or ("r1",):
        for rank in tp_ranks:
            connector.kept["0", "1", f"{request_id}_0_0_{rank}_{rank}"] = packed([rank], request_id=request_id, **more)


def collect(request_id, companion_ids, manager, device):
    """Collects companions as the models of engines do."""
    found = {}
    for role, companion_id in companion_ids.items():
        data, _ = manager.receive_kv_cache_for_request(companion_id, device)
        if data:
            found[f"{role}_past_key_values"] = data["layer_blocks"]
    return found
