"""A decode step of batch 1 as one persistent kernel (decode_step.cu), compiled for a model's shape on first use."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from tilestack.kernels.cuda.build import call, cuda_needs, library

WARPS = 16  # of decode_step.cu
# Blocks to a cluster, and clusters, the best first: on 128 multiprocessors with few parts to add up, with more of them, and
# on half as many. A cluster lies within one of the GPU's groups of multiprocessors, and not every group is whole.
LAYOUTS = ((16, 8), (8, 16), (8, 8))


@dataclass(frozen=True)
class DecoderShape:
    """What the kernel is compiled for."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    qk_norm: bool
    codes: bool = False  # of float8_e4m3fn, a scale for each row, in the linear layers but the head

    def constants(self, cluster: int, clusters: int) -> dict[str, int]:
        """The macros of decode_step.cu."""
        sizes = {name.upper(): int(value) for name, value in asdict(self).items()}
        return sizes | dict(CLUSTER=cluster, CLUSTERS=clusters)


def divides(rows: float, columns: float, codes: bool = False) -> bool:
    """Whether a `Product` of these rows and columns in decode_step.cu gives every warp as much."""
    tall, wide = (8, 64) if codes else (16, 32)
    patches = columns / wide
    split = next((split for split in (16, 8, 4, 2, 1) if patches % split == 0), 0)
    return rows > 0 and split > 0 and rows * split % (tall * WARPS) == 0


def layouts_of(shape: DecoderShape) -> list[tuple[int, int]]:
    """The layouts over which a shape can be divided evenly."""
    return [layout for layout in LAYOUTS if is_even(shape, *layout)]


def is_even(shape: DecoderShape, cluster: int, clusters: int) -> bool:
    if shape.heads % clusters or shape.heads % shape.kv_heads:
        return False
    queries, share = shape.heads // clusters, shape.heads // shape.kv_heads
    if queries % share and share % queries:
        return False
    keys = max(queries // share, 1)
    units = shape.intermediate / clusters
    products = (
        ((queries + 2 * keys) * shape.head_dim / cluster, shape.hidden),
        (shape.hidden / cluster, queries * shape.head_dim),
        (2 * units / cluster, shape.hidden),
        (shape.hidden / cluster, units),
    )
    return queries + keys <= WARPS and all(divides(rows, columns, shape.codes) for rows, columns in products)


def shape_refused(shape: DecoderShape) -> str:
    """Why the kernel cannot be compiled for a shape; empty when it can."""
    if shape.hidden % 256 or shape.hidden > 2048:
        return f"hidden must be a multiple of 256 up to 2048, not {shape.hidden}"
    if shape.head_dim not in (64, 128):
        return f"head_dim must be 64 or 128, not {shape.head_dim}"
    if not layouts_of(shape):
        return f"{shape.heads} heads and {shape.intermediate} units do not divide evenly over 128 or 64 multiprocessors"
    return ""


def device_refused(device: torch.device) -> str:
    """Why the kernel cannot run on a device; empty when it can."""
    if (answer := cuda_needs(device)) is not True:
        return str(answer)
    capability = torch.cuda.get_device_capability(device)
    return "" if capability == (9, 0) else f"its clusters are made for compute capability 9.0, not {capability}"


class DecodeStep:
    """The step of one model. `layers` hold, for each: the weights of qkv, output, gate_up and down, then those of the norms
    before attention and feed-forward, and of queries and keys, or None; of codes, then the scales [rows] of the four weights,
    in float32. All else is bfloat16. All are contiguous, on 16 bytes, and must stay where they are."""

    def __init__(
        self,
        shape: DecoderShape,
        layers: Sequence[Sequence[Tensor | None]],
        embedding: Tensor,
        head: Tensor,
        norm: Tensor,
        *,
        eps: float,
        scale: float,
    ):
        device = embedding.device
        if reason := shape_refused(shape) or device_refused(device):
            raise ValueError(f"no persistent decode step: {reason}")
        self.shape, self.eps, self.scale = shape, float(eps), float(scale)
        self.functions, clusters = fitting_library(shape, device)
        addresses = [[0 if each is None else each.data_ptr() for each in layer] for layer in layers]
        self.table = torch.tensor(addresses, dtype=torch.int64, device=device)
        self.kept = layers, embedding, head, norm
        # What blocks tell each other, each number with the mark of its step and layer, and the last mark of all.
        self.parts = torch.zeros(2, clusters, shape.hidden, dtype=torch.int64, device=device)
        self.marked = torch.zeros(1, dtype=torch.int32, device=device)

    def __call__(
        self, ids: Tensor, length: Tensor, pages: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """Logits [1, V] in float32 of the token after `ids` [1], which is the last of `length` [1] tokens.

        `pages` [blocks] are the sequence's in `keys` and `values`, [layers, pages, page, kv_heads, head_dim], where the
        token's own are put too; all integers are int64. `cos` and `sin` are [positions, head_dim / 2] in float32.
        """
        _, embedding, head, norm = self.kept
        logits = torch.empty(1, self.shape.vocabulary, device=embedding.device)
        call(
            self.functions.decode_step, embedding.device, self.table, embedding, head, norm, cos, sin, ids, length,
            pages, keys, values, self.parts, logits, self.marked, keys.shape[1], keys.shape[2], self.eps, self.scale,
        )  # fmt: skip
        return logits


def fitting_library(shape: DecoderShape, device: torch.device) -> tuple[Any, int]:
    """The kernel compiled for the first layout whose clusters find room on a GPU at a time, and how many they are."""
    reasons = []
    for cluster, clusters in layouts_of(shape):
        functions = library("decode_step.cu", **shape.constants(cluster, clusters))
        try:
            call(functions.decode_step_fits, device)
        except RuntimeError as refused:
            reasons.append(f"{clusters} clusters of {cluster} blocks: {refused}")
        else:
            return functions, clusters
    raise ValueError(f"no persistent decode step: {'; '.join(reasons)}")
