"""A byte-level GPT-2, trained from scratch with Transformers' Trainer on the source code of Python's standard library.

python examples/gpt2.py, or: gossamer run --workers 2 examples/gpt2.py --recipe "DiLoCo(period=20) + Int8()"
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from gossamer.integrations.transformers import GossamerTrainer

CONTEXT = 64  # bytes


class Windows(Dataset[dict[str, Tensor]]):
    """Sample i is the i-th window of CONTEXT bytes of all files."""

    def __init__(self, files: list[Path]) -> None:
        text = b"".join(file.read_bytes() for file in files)
        self.rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, CONTEXT, CONTEXT)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        row = self.rows[place].long()
        return {"input_ids": row, "labels": row}


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    held_out = torch.utils.data.Subset(Windows(files[::10]), range(256))
    size = {"n_embd": args.width, "n_layer": args.layers, "n_head": 4, "vocab_size": 256, "n_positions": CONTEXT}
    model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))
    training = TrainingArguments(
        args.output,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        learning_rate=1e-3,
        warmup_steps=10,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=args.evaluate_every,
        save_steps=args.evaluate_every,
        save_total_limit=2,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
        seed=args.seed,
    )
    data = Windows([file for i, file in enumerate(files) if i % 10])
    trainer = GossamerTrainer(model, training, train_dataset=data, eval_dataset=held_out, recipe=args.recipe)
    trainer.train(resume_from_checkpoint=args.resume)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="A byte-level GPT-2 with Transformers' Trainer.")
    options.add_argument("--recipe", default="Dense()", help="communication recipe")
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--batch", type=int, default=8, help="windows per worker and step")
    options.add_argument("--width", type=int, default=64)
    options.add_argument("--layers", type=int, default=2)
    options.add_argument("--evaluate-every", type=int, default=100, metavar="STEPS", help="and save")
    options.add_argument("--output", default="runs/gpt2", metavar="DIRECTORY")
    options.add_argument("--resume", metavar="CHECKPOINT", help="such as runs/gpt2/checkpoint-100")
    options.add_argument("--seed", type=int, default=0)
    main(options.parse_args())
