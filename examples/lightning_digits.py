"""Handwritten digits with Lightning's Trainer, callbacks and checkpoints, and a communication recipe.

Alone:        python examples/lightning_digits.py
Two workers:  gossamer run --workers 2 examples/lightning_digits.py --recipe "DiLoCo(period=10)"
"""

import argparse

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

from gossamer.integrations.lightning import GossamerStrategy

Batch = tuple[Tensor, Tensor]


class Digits(lightning.LightningModule):  # type: ignore[misc]  # Any, where Lightning is not installed
    """A network for images of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: Batch, number: int) -> Tensor:
        images, labels = batch
        return cross_entropy(self.net(images), labels)

    def validation_step(self, batch: Batch, number: int) -> None:
        images, labels = batch
        right = (self.net(images).argmax(dim=1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True)  # the mean over all workers

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(args: argparse.Namespace) -> None:
    lightning.seed_everything(args.seed, verbose=False)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32) / 16
    everything = TensorDataset(images, torch.tensor(digits.target))
    learn, test = random_split(everything, [0.8, 0.2], torch.Generator().manual_seed(0))
    trainer = lightning.Trainer(
        strategy=GossamerStrategy(args.recipe),
        accelerator="cpu",
        max_epochs=args.epochs,
        callbacks=[EarlyStopping("accuracy", mode="max", patience=5)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Digits(), DataLoader(learn, args.batch, shuffle=True), DataLoader(test, args.batch))
    if trainer.is_global_zero:
        print(f"{trainer.callback_metrics['accuracy']:.1%} of {len(test)} unseen digits are read correctly")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Handwritten digits with Lightning.")
    options.add_argument("--epochs", type=int, default=20)
    options.add_argument("--batch", type=int, default=32, help="images per worker and step")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--recipe", default="Dense()", help="communication recipe")
    main(options.parse_args())
