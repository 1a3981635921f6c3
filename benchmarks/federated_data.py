"""Data of many unlike devices without a download: digits as ten thousand writers draw them, and files as authors.

python benchmarks/federated_data.py [--picture writers.png]     # what there is
"""

import argparse
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import cos, exp, sin
from pathlib import Path
from random import Random

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from gossamer.base import figures

SIDE = 8  # of an image, in pixels
TASTE = 0.5  # of a Dirichlet: how unlike writers are in the digits that they write
FEWEST_SAMPLES, MEAN_SAMPLES = 4, 24
LEAST_CHARACTERS = 200  # of an author's text


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Images (1797, 1, 8, 8) from 0 to 1, and labels (1797,)."""
    found = load_digits()
    return torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(found.target)


@dataclass(frozen=True)
class Hand:
    """How one writer writes: drawn from the writer's number."""

    turn: float  # in radians
    slant: float
    size: float
    stroke: float  # exponent of the ink: below 1 is thicker
    taste: tuple[float, ...]  # probability of each digit

    @classmethod
    def of(cls, random: Random) -> "Hand":
        draws = [random.gammavariate(TASTE, 1.0) + 1e-12 for _ in range(10)]
        return cls(
            turn=random.gauss(0, 0.18),
            slant=random.gauss(0, 0.25),
            size=exp(random.gauss(0, 0.12)),
            stroke=exp(random.gauss(0, 0.3)),
            taste=tuple(draw / sum(draws) for draw in draws),
        )


def writer(number: int, samples: Sequence[int] | None = None, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images (n, 1, 8, 8) and labels (n,) of one writer, the same whenever asked: nothing is kept.

    samples: indices of digits that may be drawn from, so that others are unseen; None: all.
    """
    random = Random(f"writer {seed} {number}")
    hand = Hand.of(random)
    images, labels = digits()
    by_label = _by_label(tuple(samples) if samples is not None else None)
    count = max(FEWEST_SAMPLES, round(random.gauss(MEAN_SAMPLES, MEAN_SAMPLES**0.5)))
    chosen = [random.choice(by_label[label]) for label in random.choices(range(10), hand.taste, k=count)]
    return drawn(images[chosen], hand), labels[chosen]


@cache
def _by_label(samples: tuple[int, ...] | None) -> list[list[int]]:
    labels = digits()[1].tolist()
    some = range(len(labels)) if samples is None else samples
    return [[index for index in some if labels[index] == label] for label in range(10)]


def drawn(images: Tensor, hand: Hand) -> Tensor:
    """Images (n, 1, 8, 8) as a hand writes them."""
    c, s = cos(hand.turn) / hand.size, sin(hand.turn) / hand.size
    theta = torch.tensor([[c, c * hand.slant - s, 0.0], [s, s * hand.slant + c, 0.0]])
    grid = affine_grid(theta.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    return grid_sample(images**hand.stroke, grid, align_corners=False).clamp(0, 1)


@cache
def authors() -> tuple[Path, ...]:
    """Files of the standard library, each as an author with a style; tests are left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = (path for path in root.rglob("*.py") if not {"site-packages", "test", "tests"} & set(path.parts))
    return tuple(sorted(path for path in found if path.stat().st_size >= LEAST_CHARACTERS))


def author(number: int) -> Tensor:
    """One author's text as bytes (n,), each an integer from 0 to 255."""
    return torch.tensor(list(authors()[number].read_bytes()), dtype=torch.long)


def main(args: argparse.Namespace) -> None:
    began = time.perf_counter()
    sizes = [len(writer(number)[1]) for number in range(200)]
    seconds = (time.perf_counter() - began) / 200
    print(f"a writer: {min(sizes)} to {max(sizes)} digits, drawn in {1000 * seconds:.2f} ms")
    lengths = sorted(path.stat().st_size for path in authors())
    print(f"{len(lengths)} authors, {sum(lengths) / 1e6:.1f} MB, median {lengths[len(lengths) // 2]:,} bytes")
    if args.picture:
        draw(args.picture)


def draw(path: Path, writers: int = 12, columns: int = 16) -> None:
    """A row a writer, a column a digit."""
    page = torch.ones(writers * (SIDE + 1), columns * (SIDE + 1))
    for row in range(writers):
        images, _ = writer(row)
        for column, image in enumerate(images[:columns]):
            top, left = row * (SIDE + 1), column * (SIDE + 1)
            page[top : top + SIDE, left : left + SIDE] = 1 - image[0]
    figure = figures.figure(columns / 2, writers / 2, dpi=120)
    axes = figure.subplots()
    axes.imshow(page, cmap="gray", vmin=0, vmax=1)
    axes.axis("off")
    figure.savefig(path)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Writers and authors.")
    options.add_argument("--picture", type=Path, help="draw a dozen writers into this PNG")
    main(options.parse_args())
