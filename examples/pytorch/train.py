"""Fits a line with DistributedDataParallel, and resumes. Of tpu-stack it knows RUN_DIR only.

fab train --framework pytorch --workdir examples/pytorch -- python train.py
"""

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
run, rank = Path(os.environ["RUN_DIR"]), dist.get_rank()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step, saved = 0, run / "checkpoint.pt"
if saved.exists():
    state = torch.load(saved, weights_only=True)
    step = state["step"]
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])

while step < 200:
    step += 1
    x = torch.randn(64, 1, generator=torch.Generator().manual_seed(1000 * step + rank))
    loss = torch.mean((model(x) - 3 * x) ** 2)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0 and step % 20 == 0:
        with (run / "metrics.jsonl").open("a") as metrics:
            metrics.write(json.dumps({"step": step, "loss": loss.item(), "time": time.time()}) + "\n")
        partial = run / "checkpoint.pt.new"
        torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, partial)
        partial.replace(saved)
print(f"rank {rank} of {dist.get_world_size()}: weight {model.module.weight.item():.3f}")
dist.destroy_process_group()
