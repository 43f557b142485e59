"""Tiles that the copy engine of Hopper moves (TMA): what a kernel's `…_desc` arguments are given.

    launch(kernel, grid, Tile.of(q, [128, 64]), …)      block of 128×64 elements of a matrix q

The GPU wants 128 bytes that describe the tensor, made by the driver from its address, shape and strides. They are encoded
once for an address and found again from then on: a training step meets the same addresses in every step.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor

ADDRESSES_KEPT = 1024  # encoded descriptors of a kernel's argument, before starting over


class Tile(NamedTuple):
    """A tensor as TMA is to see it: a shape and strides of its own, moved in blocks, laid out in shared memory so."""

    tensor: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    layout: Any = None  # a Gluon kernel's; Triton chooses by itself

    @classmethod
    def of(cls, tensor: Tensor, block: Sequence[int], layout: Any = None) -> "Tile":
        """All of a tensor in its own shape."""
        return cls(tensor, tuple(tensor.shape), tensor.stride(), tuple(block), layout)

    def descriptor(self) -> Any:
        """What Triton's own launcher takes."""
        parts = self.tensor, list(self.shape), list(self.strides), list(self.block)
        if self.layout is None:
            from triton.tools.tensor_descriptor import TensorDescriptor

            return TensorDescriptor(*parts)
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

        return GluonDescriptor(*parts, self.layout)


class Encoder:
    """A kernel's argument: (address, shape, strides) to the values its C launcher takes, encoded once each."""

    def __init__(self, encode: Callable[[int, tuple, tuple], tuple]):
        self.encode = encode
        self.known: dict[tuple, tuple] = {}

    def __call__(self, address: int, shape: tuple, strides: tuple) -> tuple:
        found = self.known.get((address, shape, strides))
        if found is None:
            if len(self.known) >= ADDRESSES_KEPT:
                self.known.clear()
            found = self.known[address, shape, strides] = self.encode(address, shape, strides)
        return found


def described_launch(run: Any, compiled: Any, tiles: list[Tile]) -> tuple[Callable | None, list[Encoder]]:
    """The C launcher of a compiled kernel, and an encoder for each of its descriptors.

    Triton wraps that launcher in a function that encodes the descriptors anew in every call. None where it does so in a
    way we do not know: then the encoders make Triton's own objects, for Triton's own wrapper.
    """
    launcher = getattr(run, "launch", None)
    if not tiles:
        return launcher, []
    inside = closure_of(launcher)
    metas = inside.get("tensordesc_meta")
    try:
        from triton.backends.nvidia.driver import make_tensordesc_arg
    except ImportError:
        make_tensordesc_arg = None
    if "launcher" in inside and isinstance(metas, list) and len(metas) == len(tiles) and make_tensordesc_arg:
        return inside["launcher"], [Encoder(encoding(make_tensordesc_arg, meta)) for meta in metas]
    return None, [Encoder(wrapping(tile)) for tile in tiles]


def encoding(make: Callable, meta: Any) -> Callable[[int, tuple, tuple], tuple]:
    """By Triton's own function, which asks a descriptor for its address, shape and strides."""

    def encode(address: int, shape: tuple, strides: tuple) -> tuple:
        base = SimpleNamespace(data_ptr=lambda: address)
        return tuple(
            make(
                SimpleNamespace(base=base, shape=shape, strides=strides, padding="zero", round_f32_to_tf32=False), meta
            )
        )

    return encode


def wrapping(tile: Tile) -> Callable[[int, tuple, tuple], tuple]:
    """A descriptor like the tile's, of memory at another address."""
    model = tile.descriptor()

    def encode(address: int, shape: tuple, strides: tuple) -> tuple:
        values = vars(model) | dict(base=SimpleNamespace(data_ptr=lambda: address, dtype=tile.tensor.dtype))
        return (SimpleNamespace(**(values | dict(shape=list(shape), strides=list(strides)))),)

    return encode


def closure_of(function: Any) -> dict[str, Any]:
    """What a function keeps of where it was made, by name."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True)) if code and cells else {}
