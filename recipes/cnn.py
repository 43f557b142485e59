"""A small convolutional network that learns to tell shapes apart, on images drawn by code: `python recipes/cnn.py`.

    image 1 × 16 × 16 ─ conv 16 ─ conv 32, /2 ─ conv 32, /2 ─ linear ─▶ square, disc or cross

It takes some ten seconds on two cores and prints how many images it had not seen are named rightly. Recipes in TOML are of
language models, whose loop reads tokens; this one is short enough to be its own loop. The convolutions, activations, loss
and optimizer are tilestack's: with --device cuda they run on its kernels.
"""

import argparse
import sys

import torch
from torch import Tensor

from tilestack import nn, ops, optim

KINDS = ("square", "disc", "cross")
SIDE = 16  # pixels
BATCH, HELD_OUT = 64, 1000  # images
REPORT_EVERY = 50  # steps
HELD_OUT_SEED = -1  # no step draws from it


def draw(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noisy images [count, 1, SIDE, SIDE] of shapes of any size and place, channels last, and the number of each kind."""
    chance = torch.Generator().manual_seed(seed)
    pick = lambda low, high: torch.randint(low, high, (count, 1, 1), generator=chance)
    kind, size = torch.randint(len(KINDS), (count,), generator=chance), pick(4, 7)
    line, column = torch.arange(SIDE)[:, None] - pick(6, 10), torch.arange(SIDE)[None, :] - pick(6, 10)
    square = (line.abs() <= size) & (column.abs() <= size)
    disc = line**2 + column**2 <= size**2
    cross = square & (line.abs().minimum(column.abs()) <= 1)
    shapes = torch.stack([square, disc, cross])[kind, torch.arange(count)]
    images = shapes.float() + 0.2 * torch.randn(count, SIDE, SIDE, generator=chance)
    return images[:, None].to(memory_format=torch.channels_last), kind


def network() -> torch.nn.Module:
    return torch.nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.ReLU(),
        torch.nn.Flatten(), nn.Linear(32 * (SIDE // 4) ** 2, len(KINDS)),
    ).to(memory_format=torch.channels_last)  # fmt: skip


def train(steps: int, device: torch.device, lr: float = 3e-3) -> torch.nn.Module:
    torch.manual_seed(0)
    model = network().to(device)
    optimizer = optim.AdamW(model.parameters(), lr=lr)
    for step in range(1, steps + 1):
        images, kinds = (x.to(device) for x in draw(BATCH, seed=step))
        loss = ops.cross_entropy(model(images), kinds)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % REPORT_EVERY == 0 or step == steps:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    return model


@torch.no_grad()
def accuracy(model: torch.nn.Module, device: torch.device) -> float:
    """The part of HELD_OUT new images that are named rightly."""
    images, kinds = (x.to(device) for x in draw(HELD_OUT, HELD_OUT_SEED))
    return (model(images).argmax(1) == kinds).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--steps", type=int, default=150, help=f"of {BATCH} images each (default: 150)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    given = parser.parse_args()
    if given.steps < 1:
        parser.error(f"--steps must be at least 1, not {given.steps}")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU that PyTorch can use; leave it out to train on the CPU")
    device = torch.device(given.device)
    model = train(given.steps, device)
    print(f"{accuracy(model, device):.1%} of {HELD_OUT} new images named rightly")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped before the last step; nothing was written")
