"""One process reads a prompt, four draw the picture: two tensor-parallel places times two branches of guidance.

The model is the small mixture-of-transformers of `omnikv pipeline`. Its caches go from the reading process to one rank
of each tensor-parallel place, which keeps the branch with the text and hands the other one on. All four agree that they
have their part before any of them uses it, draw together, and compare with a single process.

Run it: python examples/omni_pipeline/draw_together.py
"""

import multiprocessing
import os
import tempfile
import time
from multiprocessing.synchronize import Event

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from omnikv import KVSender, Route
from omnikv.cli.pipeline.conditions import Condition
from omnikv.cli.pipeline.drawing import Peers, draw
from omnikv.cli.pipeline.model import ModelConfig, OmniModel
from omnikv.cli.pipeline.picture import as_png, decode
from omnikv.groups import from_device_mesh
from omnikv.handoff.share import SharedReceiver

BRANCHES = ("primary", "cfg_text")
CONDITION = Condition("A lighthouse at dusk", seed=7)
CFG, SP, TP, STEPS, WAIT_S = 2, 1, 2, 4, 60.0


def route_of(namespace: str) -> Route:
    """One reading rank has all heads, each tensor-parallel place of the other stage needs half of them."""
    return Route.tp("ar", "dit", num_kv_heads=ModelConfig().num_kv_heads, from_tp=1, to_tp=TP, namespace=namespace)


@torch.no_grad()
def read(namespace: str, drawn: Event) -> None:
    """Understands the condition of each branch, and sends each cache under its role."""
    torch.set_num_threads(1)
    model = OmniModel(ModelConfig())
    with KVSender(route_of(namespace), rank=0) as sender:
        for branch in BRANCHES:
            sender.send("picture", model.understand(CONDITION.embedded(model, branch)), role=branch)
        drawn.wait(WAIT_S)


@torch.no_grad()
def draw_rank(namespace: str, rank: int, folder: str) -> None:
    """One of the drawing ranks: takes its place in the mesh, receives its branch, and draws with the others."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=CFG * SP * TP)
    mesh = init_device_mesh("cpu", (CFG, SP, TP), mesh_dim_names=("cfg", "sp", "tp"))
    groups = from_device_mesh(mesh)
    model = OmniModel(ModelConfig())
    model.parallelize(mesh["tp"])
    with SharedReceiver(route_of(namespace), groups, roles=BRANCHES, deadline=time.monotonic() + WAIT_S) as receiver:
        outcome = receiver.receive_together("picture", timeout_s=WAIT_S)
        assert outcome.verdict == "keep", outcome.causes
        caches = {branch: kv.layers for branch, kv in outcome.roles.items()}
        part = "reader" if groups.is_reader else "follower"
        heads = [head for kv in outcome.roles.values() for piece in kv.sources for head in piece.heads]
        print(f"rank {rank}: {part}, {outcome.verdict} {', '.join(caches)}, heads {heads}", flush=True)
        cfg, sp = Peers(groups.cfg), Peers(groups.sp)
        latents = draw(model, CONDITION.noise(model), caches, BRANCHES, steps=STEPS, cfg=cfg, sp=sp)
        outcome.close()
    if rank == 0:
        torch.save(latents, f"{folder}/latents.pt")
    dist.destroy_process_group()


@torch.no_grad()
def draw_alone() -> torch.Tensor:
    """The same picture by one process, without any handoff."""
    model = OmniModel(ModelConfig())
    caches = {branch: model.understand(CONDITION.embedded(model, branch)) for branch in BRANCHES}
    return draw(model, CONDITION.noise(model), caches, BRANCHES, steps=STEPS, cfg=Peers(), sp=Peers())


def main() -> None:
    """Start the five ranks, and compare."""
    namespace = f"draw-{os.getpid()}"
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        drawn = spawn.Event()
        reading = spawn.Process(target=read, args=(namespace, drawn))
        drawing = [spawn.Process(target=draw_rank, args=(namespace, rank, folder)) for rank in range(CFG * SP * TP)]
        for process in (reading, *drawing):
            process.start()
        expected = draw_alone()
        for process in drawing:
            process.join()
        drawn.set()
        reading.join()
        assert all(process.exitcode == 0 for process in (reading, *drawing))
        latents = torch.load(f"{folder}/latents.pt")
    png = as_png(decode(latents, ModelConfig().grid))
    difference = float((latents - expected).abs().max())
    print(f"a picture of {len(png)} bytes matches the reference: max difference {difference:.1e}")
    assert difference < 1e-3


if __name__ == "__main__":
    main()
