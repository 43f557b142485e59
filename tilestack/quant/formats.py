"""How checkpoints keep a linear layer's codes: the tensors of a layer [out, in], and the `Codes` that they hold.

    PlainCodes    weight [out, in] of 8 bits                 weight_scale         compressed-tensors: fp8 and W8A8
                                                             weight_scale_inv     fp8 of DeepSeek and Qwen, by blocks
    PackedCodes   weight_packed int32 [out, in · bits / 32]  weight_scale, …      compressed-tensors: W4A16 and W8A16
    GPTQCodes     qweight int32 [in · bits / 32, out]        scales, qzeros, …    gptq
    AWQCodes      qweight int32 [in, out / 8]                scales, qzeros       awq

The first two are also written. Scales become float32, which holds them exactly. Static scales of inputs are not among the
tensors: scales of inputs are found as they come.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from tilestack.ops.quantised_linear import BLOCK, blocks_of
from tilestack.ops.weight_only import CENTRE, PACKED, pack_int4, unpack_int4
from tilestack.quant.packing import pack_words, signed, unpack_words, unsigned, words_of
from tilestack.quant.schemes import Codes, Scheme, scale_of_rows

SCALES = ("F32", "BF16", "F16")  # dtypes, as safetensors calls them
PLAIN = dict(fp8="F8_E4M3", int8="I8")


class Kept(NamedTuple):
    """A tensor that a checkpoint has: the shapes and dtypes that it may have, any dtype where none is named."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...] = ()
    needed: bool = True


@dataclass(frozen=True)
class CodeFormat:
    """The tensors of a layer [rows, inner], by what follows its name."""

    scheme: Scheme

    @property
    def bits(self) -> int:
        return 4 if self.scheme.weights == "int4" else 8

    def groups(self, inner: int) -> int:
        return inner // self.scheme.group if self.scheme.group else 1

    def refused(self, rows: int, inner: int) -> str:
        """Why codes of such a layer cannot be read; empty when they can."""
        group = self.scheme.group or inner
        if inner % group and not self.scheme.blocks:
            return f"its rows of {inner} numbers are no whole groups of {group}"
        if self.bits == 4 and (inner % PACKED or group % PACKED):
            return f"codes of 4 bits are read in groups of a multiple of {PACKED} numbers, and these are of {group}"
        return ""

    def tensors(self, rows: int, inner: int) -> dict[str, Kept]:
        raise NotImplementedError

    def codes(self, given: Mapping[str, Tensor], rows: int, inner: int) -> Codes:
        """The codes of tensors that have these shapes; ValueError where their numbers are wrong."""
        raise NotImplementedError

    def stored(self, unsigned_codes: Tensor) -> Tensor:
        """Codes [rows, inner] of 0 to 2^bits - 1 as `Codes` have them."""
        return pack_int4(unsigned_codes) if self.bits == 4 else signed(unsigned_codes.contiguous())

    def zero_point(self, unsigned_zero: Tensor) -> Tensor:
        """Zero points [rows, groups] of 0 to 2^bits - 1 as `Codes` have them."""
        zero = unsigned_zero.contiguous()
        return zero.view(torch.int8) if self.bits == 4 else signed(zero)


@dataclass(frozen=True)
class PlainCodes(CodeFormat):
    """Codes of 8 bits as they are."""

    scale_name: str = "weight_scale"

    def tensors(self, rows: int, inner: int) -> dict[str, Kept]:
        shapes: tuple[tuple[int, ...], ...] = scale_shapes(rows, self.groups(inner))
        if self.scheme.blocks:
            shapes = ((blocks_of(rows), blocks_of(inner)),)
        found = {"weight": Kept(((rows, inner),), (PLAIN[self.scheme.weights],)), self.scale_name: Kept(shapes, SCALES)}
        return found if self.scheme.symmetric else found | {"weight_zero_point": Kept(shapes, ("I8",))}

    def codes(self, given: Mapping[str, Tensor], rows: int, inner: int) -> Codes:
        scale = finite(given[self.scale_name], self.scale_name)
        if self.scheme.blocks:
            return Codes(given["weight"], scale_of_rows(scale, rows, inner).contiguous(), None)
        zero = None if self.scheme.symmetric else for_rows(given["weight_zero_point"], rows)
        return Codes(given["weight"], for_rows(scale, rows), zero)

    def pack(self, codes: Codes) -> dict[str, Tensor]:
        """The tensors that hold some codes."""
        scale, (rows, inner) = codes.scale, codes.codes.shape
        if self.scheme.blocks:
            scale = scale[::BLOCK, :: scale.shape[1] * BLOCK // inner]
            if not scale_of_rows(scale, rows, inner).equal(codes.scale):
                raise ValueError("its blocks do not begin with it: quantise each matrix of a fused layer by itself")
        found = {"weight": codes.codes, self.scale_name: scale.contiguous()}
        return found if codes.zero is None else found | {"weight_zero_point": codes.zero}


@dataclass(frozen=True)
class PackedCodes(CodeFormat):
    """Codes of 4 or 8 bits in words along a row; zero points in words along a column."""

    def tensors(self, rows: int, inner: int) -> dict[str, Kept]:
        groups = self.groups(inner)
        found = {
            "weight_packed": Kept(((rows, words_of(inner, self.bits)),), ("I32",)),
            "weight_scale": Kept(scale_shapes(rows, groups), SCALES),
            "weight_shape": Kept(((2,),), ("I64", "I32")),
            "weight_g_idx": Kept(((inner,),), ("I32",), needed=False),
        }
        if not self.scheme.symmetric:
            found["weight_zero_point"] = Kept(((words_of(rows, self.bits), groups),), ("I32",))
        return found

    def codes(self, given: Mapping[str, Tensor], rows: int, inner: int) -> Codes:
        if (said := given["weight_shape"].tolist()) != [rows, inner]:
            raise ValueError(f"weight_shape says {said} instead of {[rows, inner]}")
        refuse_order(given.get("weight_g_idx"), "weight_g_idx", self.scheme.group or inner)
        codes = self.stored(unpack_words(given["weight_packed"], self.bits, inner))
        zero = None
        if not self.scheme.symmetric:
            zero = self.zero_point(unpack_words(given["weight_zero_point"].T, self.bits, rows).T)
        return Codes(codes, for_rows(finite(given["weight_scale"], "weight_scale"), rows), zero)

    def pack(self, codes: Codes) -> dict[str, Tensor]:
        """The tensors that hold some codes."""
        plain = unpack_int4(codes.codes) if self.bits == 4 else unsigned(codes.codes)
        found = {
            "weight_packed": pack_words(plain, self.bits),
            "weight_scale": codes.scale.contiguous(),
            "weight_shape": torch.tensor(plain.shape),
        }
        if codes.zero is not None:
            zero = codes.zero.view(torch.uint8) if self.bits == 4 else unsigned(codes.zero)
            found["weight_zero_point"] = pack_words(zero.T, self.bits).T.contiguous()
        return found


@dataclass(frozen=True)
class GPTQCodes(CodeFormat):
    """Codes in words along a column, zero points along a row of [groups, out]. Files of the first format keep a zero point
    less 1, so that 15 is the 0 of 4 bits."""

    offset: int = 1  # of zero points: 1 in the first format, 0 in the second

    def tensors(self, rows: int, inner: int) -> dict[str, Kept]:
        groups = self.groups(inner)
        return {
            "qweight": Kept(((words_of(inner, self.bits), rows),), ("I32",)),
            "qzeros": Kept(((groups, words_of(rows, self.bits)),), ("I32",)),
            "scales": Kept(((groups, rows),), SCALES),
            "g_idx": Kept(((inner,),), ("I32", "I64"), needed=False),
        }

    def codes(self, given: Mapping[str, Tensor], rows: int, inner: int) -> Codes:
        refuse_order(given.get("g_idx"), "g_idx", self.scheme.group or inner)
        codes = unpack_words(given["qweight"].T, self.bits, inner)
        zero = unpack_words(given["qzeros"], self.bits, rows).T
        zero = self.zero_point((zero + self.offset) & (2**self.bits - 1))
        if self.scheme.symmetric:
            if (zero != (CENTRE if self.bits == 4 else 0)).any():
                raise ValueError(f"qzeros are not {2 ** (self.bits - 1)} throughout, which sym in the config means")
            zero = None  # type: ignore[assignment]
        return Codes(self.stored(codes), finite(given["scales"], "scales").T.contiguous(), zero)


@dataclass(frozen=True)
class AWQCodes(CodeFormat):
    """Codes of 4 bits in words along a row of [in, out], the even ones of eight before the odd ones; zero points likewise."""

    ORDER: ClassVar = [0, 4, 1, 5, 2, 6, 3, 7]  # where in a word the codes of eight outputs are

    def refused(self, rows: int, inner: int) -> str:
        whole = "" if rows % len(self.ORDER) == 0 else f"its {rows} outputs are no whole words of {len(self.ORDER)}"
        return whole or super().refused(rows, inner)

    def tensors(self, rows: int, inner: int) -> dict[str, Kept]:
        groups = self.groups(inner)
        found = {
            "qweight": Kept(((inner, words_of(rows, 4)),), ("I32",)),
            "scales": Kept(((groups, rows),), SCALES),
        }
        return found if self.scheme.symmetric else found | {"qzeros": Kept(((groups, words_of(rows, 4)),), ("I32",))}

    def codes(self, given: Mapping[str, Tensor], rows: int, inner: int) -> Codes:
        ordered = lambda words: (
            unpack_words(words, 4, rows).unflatten(-1, (-1, len(self.ORDER)))[..., self.ORDER].flatten(-2)
        )
        zero = None if self.scheme.symmetric else self.zero_point(ordered(given["qzeros"]).T)
        scale = finite(given["scales"], "scales").T.contiguous()
        return Codes(self.stored(ordered(given["qweight"]).T), scale, zero)


def written_format(scheme: Scheme, codes: Codes) -> PlainCodes | PackedCodes:
    """How a layer's codes are written: as compressed-tensors keeps them, in groups of the layer's own size."""
    inner = codes.codes.shape[1] * (2 if scheme.weights == "int4" else 1)
    groups = codes.scale.shape[1]
    if not scheme.blocks:
        scheme = replace(scheme, group=0 if groups == 1 else inner // groups, symmetric=codes.zero is None)
    return format_of_scheme(scheme)


def format_of_scheme(scheme: Scheme) -> PlainCodes | PackedCodes:
    """How codes are written whose groups are as their scheme has them, also where a row is one group: of all experts of a
    model, others read one size of groups."""
    plain = scheme.weights == "fp8" or scheme.activations
    return PlainCodes(scheme) if plain else PackedCodes(scheme)


def scale_shapes(rows: int, groups: int) -> tuple[tuple[int, ...], ...]:
    """Of one scale for a row, or for all, also where a dimension of 1 is left out."""
    return ((rows, groups),) if groups > 1 else ((rows, 1), (rows,), (1,), ())


def for_rows(scale: Tensor, rows: int) -> Tensor:
    """[rows, groups] of a scale, which may be one for all."""
    return scale.reshape(-1, 1).expand(rows, 1).contiguous() if scale.numel() == 1 else scale.reshape(rows, -1)


def finite(scale: Tensor, name: str) -> Tensor:
    """A scale in float32, all of whose numbers are numbers."""
    if not torch.isfinite(scale).all():
        raise ValueError(f"{name} holds numbers that are not finite")
    return scale.float()


def refuse_order(group_of: Tensor | None, name: str, group: int) -> None:
    """Raise where the numbers of a group are no neighbours."""
    if group_of is not None and not group_of.equal(torch.arange(len(group_of), dtype=group_of.dtype) // group):
        raise ValueError(
            f"{name} puts numbers into groups in the order of activations (desc_act, actorder), which is not read; take a "
            "checkpoint that was quantised without it"
        )
