"""RobertaForMaskedLM in PyTorch with a plain training loop: forward and backward pass compiled, attention by
scaled_dot_product_attention, fused AdamW; in float32, or in bfloat16 by autocast, the parameters staying float32.

Runs in the environment of bench/locks/pytorch.txt, which has nothing of ours:
python torch_step.py FOLDER [--dtype bfloat16]

--reference: no training; writes found.npz, what the model makes of batch.npz (inputs_BS, labels_BS: -100 where nothing
is asked): the logits everywhere, the loss, and its gradient under each parameter's name."""

# mypy: ignore-errors

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from transformers import RobertaForMaskedLM
from turns import answer, resident_bytes


def main(folder, dtype):
    """See above."""
    facts = {"imported_bytes": resident_bytes(), "dtype": dtype}
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16")
    torch.manual_seed(0)
    settings = json.loads((folder / "optimizer.json").read_text())
    model = RobertaForMaskedLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    model.train()
    compiled = torch.compile(model)
    groups = [
        {
            "params": [p for p in model.parameters() if p.ndim > 1],
            "weight_decay": settings["weight_decay"],
        },
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), eps=1e-6, fused=True)
    batches = np.load(folder / "batches.npz")
    inputs, labels = (torch.tensor(batches[name], dtype=torch.long) for name in ("inputs", "labels"))

    def take(number):
        entry = number % len(inputs)
        for group in optimizer.param_groups:
            group["lr"] = settings["rates"][number]
        with autocast:
            loss = compiled(input_ids=inputs[entry], labels=labels[entry]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    answer(take, facts)


def reference(folder):
    """See above."""
    torch.manual_seed(0)
    model = RobertaForMaskedLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()  # without dropout; gradients are computed all the same
    batch = np.load(folder / "batch.npz")
    inputs, labels = (torch.tensor(batch[name], dtype=torch.long) for name in ("inputs_BS", "labels_BS"))
    output = model(input_ids=inputs, attention_mask=torch.ones_like(inputs), labels=labels)
    output.loss.backward()
    gradients = {
        name: parameter.grad.numpy()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    np.savez(
        folder / "found.npz", logits=output.logits.detach().numpy(), loss=output.loss.item(), **gradients
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--reference", action="store_true")
    options = parser.parse_args()
    reference(options.folder) if options.reference else main(options.folder, options.dtype)
