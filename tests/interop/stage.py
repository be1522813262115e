"""All ranks of one stage in one process, with the released engine's manager or with ours: obeys JSON lines.

`stage.py released` or `stage.py omnikv`. A command opens the ranks of one side, sends a request's KV from all of them,
or receives it in all of them and says which bytes differ from what was to come. What a request's KV holds follows from
its shape alone, so both processes know it.
"""

import json
import os
import sys
import traceback

import torch

LAYERS, TOKENS, HEADS, HEAD_DIM, BLOCK = 3, 37, 8, 16, 5
BLOCKS = -(-TOKENS // BLOCK)


def manager_module(kind):
    if kind == "omnikv":
        from omnikv.integrations.vllm_omni import manager

        return manager
    if not torch.accelerator.is_available():
        # The released connector pins its pool of host memory, which torch refuses to do without an accelerator.
        torch.Tensor.pin_memory = lambda tensor, *_: tensor
    from vllm_omni.distributed.omni_connectors import kv_transfer_manager

    return kv_transfer_manager


def whole_cache(request_id, layer, which):
    """[tokens, heads, head_dim] of one layer's keys (0) or values (1); every element of its own."""
    generator = torch.Generator().manual_seed(hash_of(request_id) + 2 * layer + which)
    return torch.randn(TOKENS, HEADS, HEAD_DIM, generator=generator, dtype=torch.float32).to(torch.bfloat16)


def hash_of(request_id):
    return sum(byte * 31**place for place, byte in enumerate(request_id.encode())) % (1 << 31)


def heads_of(rank, tp):
    return slice(rank * HEADS // tp, (rank + 1) * HEADS // tp)


def paged(flat):
    """The tokens in blocks, block 0 unused, in the order in which a request's block ids give them back."""
    pages = torch.zeros(BLOCKS + 1, BLOCK, *flat.shape[1:], dtype=flat.dtype)
    pages[1:].flatten(0, 1)[:TOKENS] = flat
    return pages


class Stage:
    def __init__(self, kind):
        self.module = manager_module(kind)
        self.ranks = []

    def open(self, side, connector, from_tp, to_tp):
        self.side, self.tp = side, from_tp if side == "send" else to_tp
        for rank in range(self.tp):
            os.environ["LOCAL_RANK"] = str(rank)
            ours = {"stage_id": 0} if side == "send" else {"stage_id": 1, "engine_input_source": [0]}
            config = self.module.OmniKVCacheConfig(
                connector_config=dict(connector),
                from_stage="0",
                to_stage="1",
                need_send_cache=side == "send",
                need_recv_cache=side == "receive",
                recv_timeout=60.0,
                from_tp=from_tp,
                to_tp=to_tp,
                **ours,
            )
            self.ranks.append(self.module.OmniKVTransferManager(config))
        return [manager.connector is not None for manager in self.ranks]

    def send(self, request_id):
        for rank, manager in enumerate(self.ranks):
            mine = heads_of(rank, self.tp)
            layers = [
                torch.stack([paged(whole_cache(request_id, layer, which)[:, mine]) for which in (0, 1)])
                for layer in range(LAYERS)
            ]
            finished = {request_id: {"block_ids": list(range(1, BLOCKS + 1)), "seq_len": TOKENS}}
            manager.handle_finished_requests_kv_transfer(finished, layers, BLOCK, "bfloat16")

    def receive(self, request_id, sender_info):
        wrong = []
        for rank, manager in enumerate(self.ranks):
            data, nbytes = manager.receive_kv_cache_for_request(request_id, sender_info=sender_info)
            if data is None:
                wrong.append(f"rank {rank} received nothing")
                continue
            for which, name in enumerate(("key_cache", "value_cache")):
                for layer, got in enumerate(data["layer_blocks"][name]):
                    wanted = whole_cache(request_id, layer, which)[:, heads_of(rank, self.tp)].contiguous()
                    if got.shape != wanted.shape or not torch.equal(got.view(torch.uint8), wanted.view(torch.uint8)):
                        wrong.append(f"rank {rank}: {name} of layer {layer} is {list(got.shape)}, or differs")
            if not nbytes:
                wrong.append(f"rank {rank}: no size")
        return wrong

    def close(self):
        for manager in self.ranks:
            manager.close()
            # A released manager keeps its connector open.
            if manager._connector:
                manager._connector.close()
        self.ranks.clear()


def main():
    out = os.fdopen(os.dup(1), "w")
    # Whatever an engine prints must not come between the answers.
    os.dup2(2, 1)
    torch.set_num_threads(1)
    stage = Stage(sys.argv[1])
    print(json.dumps({"value": "ready"}), file=out, flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = {"value": getattr(stage, name)(*arguments)}
        except Exception:  # noqa: BLE001
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=out, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
