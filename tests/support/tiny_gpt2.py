"""A GPT-2 of 2 layers, 32 wide, with random parameters; imported where transformers is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

WORDS, LENGTH = 64, 16


def tiny_gpt2(dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        **dropouts,
    )
    return GPT2LMHeadModel(config)


def texts(count: int = 64, seed: int = 1) -> list[dict[str, Tensor]]:
    words = torch.randint(0, WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in words]


def arguments(output: Path | str, **more: Any) -> Any:
    """TrainingArguments for a processor, without reports, progress bars and checkpoints unless asked for."""
    quiet: dict[str, Any] = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    return TrainingArguments(str(output), **{"per_device_train_batch_size": 4, "max_steps": 6, **quiet, **more})


def digest(model: nn.Module) -> str:
    """A hash of all parameters' bits."""
    import hashlib

    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=8).hexdigest()
