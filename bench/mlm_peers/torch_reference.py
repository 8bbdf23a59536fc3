"""RobertaForMaskedLM of `transformers` in PyTorch: what it makes of given weights and given masked tokens.

Runs in the environment of bench/locks/pytorch.txt, which has nothing of ours.

    python torch_reference.py FOLDER

FOLDER holds config.json, model.safetensors and batch.npz (inputs_BS, labels_BS: -100 where nothing is asked).
Writes found.npz: the logits everywhere, the loss, and the loss's gradient under each parameter's name."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch  # type: ignore[import-not-found,unused-ignore]
from transformers import RobertaForMaskedLM  # type: ignore[import-not-found,unused-ignore]


def main(folder: Path) -> None:
    """See above."""
    torch.manual_seed(0)
    model = RobertaForMaskedLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()  # without dropout; gradients are computed all the same
    batch = np.load(folder / "batch.npz")
    inputs, labels = (torch.tensor(batch[name], dtype=torch.long) for name in ("inputs_BS", "labels_BS"))
    found = model(input_ids=inputs, attention_mask=torch.ones_like(inputs), labels=labels)
    found.loss.backward()
    gradients = {
        name: parameter.grad.numpy()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    np.savez(folder / "found.npz", logits=found.logits.detach().numpy(), loss=found.loss.item(), **gradients)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
