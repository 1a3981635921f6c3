"""Handwritten digits on workers of Ray Train, which restarts them from the last checkpoint after a failure.

pip install 'gossamer[ray-train]'
python examples/ray_train.py --workers 2 --recipe "TopK(0.05)"
"""

import argparse
import tempfile
from typing import Any

import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import gossamer
from gossamer.integrations.ray import GossamerConfig, report, restore


def train(config: dict[str, Any]) -> None:
    """Training function of every worker."""
    torch.manual_seed(0)
    world = gossamer.init()
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    training = TensorDataset(images, torch.tensor(digits.target))
    data = DataLoader(training, 32, sampler=world.shard(training))
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)).to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    with gossamer.attach(model, optimizer, config["recipe"]) as session:
        for epoch in range(restore(session).get("epoch", 0), config["epochs"]):
            with session.epoch():
                for x, y in data:
                    loss = cross_entropy(model(x.to(world.device)), y.to(world.device))
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
            report(session, {"loss": loss.item(), "workers": world.size}, epoch=epoch + 1)


def main(args: argparse.Namespace) -> None:
    ray.init(address="local", num_cpus=args.workers, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train,
            train_loop_config={"recipe": args.recipe, "epochs": args.epochs},
            torch_config=GossamerConfig(),
            scaling_config=ScalingConfig(num_workers=args.workers),
            run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=3)),
        )
        for name, value in trainer.fit().metrics.items():
            print(f"{name}: {value:.4g}")
    ray.shutdown()


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Handwritten digits on Ray Train.")
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--epochs", type=int, default=3)
    options.add_argument("--recipe", default="TopK(0.05)", help="communication recipe")
    main(options.parse_args())
