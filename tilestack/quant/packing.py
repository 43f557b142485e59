"""Codes in words of 32 bits, as checkpoints keep them. The first code is in the lowest bits:

    4 bits   word = c0 | c1 << 4 | c2 << 8 | …  | c7 << 28
    8 bits   word = c0 | c1 << 8 | c2 << 16 | c3 << 24

Codes here are 0 to 15 or 0 to 255, uint8. So a word's bytes, lowest first, are its codes, or two each.
"""

import torch
from torch import Tensor

WORD = 32  # bits


def words_of(codes: int, bits: int) -> int:
    """How many words hold so many codes."""
    return -(-codes * bits // WORD)


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., K] as words [..., ⌈K · bits / 32⌉] of int32, the last filled up with zeros."""
    codes = torch.nn.functional.pad(codes, (0, words_of(codes.shape[-1], bits) * WORD // bits - codes.shape[-1]))
    if bits == 4:
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    return as_dtype(codes, torch.int32)


def unpack_words(words: Tensor, bits: int, codes: int) -> Tensor:
    """The first `codes` codes of words [..., N] of int32."""
    found = as_dtype(words, torch.uint8)
    if bits == 4:
        found = torch.stack((found & 15, found >> 4), -1).flatten(-2)
    return found[..., :codes]


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of rows as numbers of another size. Flat, as PyTorch minds the strides of dimensions of 1."""
    inner = x.shape[-1] * x.element_size() // dtype.itemsize
    return x.reshape(-1).view(dtype).view(*x.shape[:-1], inner)


def signed(codes: Tensor) -> Tensor:
    """Codes 0 to 255 around 128 as int8 around 0."""
    return (codes ^ 128).view(torch.int8)


def unsigned(codes: Tensor) -> Tensor:
    """Codes of int8 around 0 as 0 to 255 around 128."""
    return codes.view(torch.uint8) ^ 128
