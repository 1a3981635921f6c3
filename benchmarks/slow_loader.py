"""A run with something to see: `benchmarks/watch_pictures.py` draws it.

    gossamer run --workers 4 --network 100mbit,20ms benchmarks/slow_loader.py     # from the repository's root

After a third of its steps the loader of rank 2 is slow; at the end rank 1 raises an error.
"""

import sys
import time
from pathlib import Path

import torch

import gossamer

sys.path.append(str(Path.cwd()))
from examples.bytelm import ByteLM, data_of  # found only after the line above

STEPS, SLOW_RANK, FAILING_RANK = 240, 2, 1
DEVICE_SECONDS, SLOW_SECONDS = 0.05, 0.15


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    world = gossamer.init()
    texts, _ = data_of(world, 8, 0)
    model = ByteLM(64, 4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with gossamer.attach(model, optimizer) as session:
        for step in range(STEPS):
            if world.rank == SLOW_RANK and step > STEPS // 3:
                time.sleep(SLOW_SECONDS)
            loss = model(next(texts))
            time.sleep(DEVICE_SECONDS)  # as long as a device would take
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.log(loss=loss.item(), perplexity=loss.exp().item())
            if step % 20 == 0:
                print(f"step {step}, loss {loss.item():.3f}", flush=True)
        if world.rank == FAILING_RANK:
            raise ValueError("a batch of no rows: shard-17 is empty")


if __name__ == "__main__":
    main()
