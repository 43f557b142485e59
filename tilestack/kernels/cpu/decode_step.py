"""A decode step of a dense decoder on a CPU as one call (decode_step.cpp), compiled for its dtypes on first use."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilestack.kernels.cpu.build import library
from tilestack.kernels.cpu.large_pages import use_large_pages

LANES = 16  # of decode_step.cpp
PLAIN = {torch.float32: "float", torch.bfloat16: "BFloat16"}
CODES = {torch.int8: "int8_t", torch.float8_e4m3fn: "Float8", torch.uint8: "Int4"}

pointer, integer = ctypes.c_void_p, ctypes.c_int64


class StepArguments(ctypes.Structure):
    """The `Step` of decode_step.cpp, where each is explained."""

    _fields_ = [
        *((name, pointer) for name in ("layers", "norm")),
        *((name, integer) for name in ("count", "hidden", "heads", "kv_heads", "dim", "intermediate")),
        *((name, ctypes.c_double) for name in ("eps", "scale")),
        *((name, pointer) for name in ("keys", "values")),
        *((name, integer) for name in ("pages", "page")),
        *((name, pointer) for name in ("cos", "sin")),
        *((name, integer) for name in ("tokens", "blocks")),
        *((name, pointer) for name in ("positions", "slots", "sequences", "tables")),
        *((name, pointer) for name in ("x", "qkv", "seen", "gated", "normal", "scores")),
        *((name, integer) for name in ("longest", "threads")),
    ]


@dataclass(frozen=True)
class Matrix:
    """A weight [rows, columns], contiguous: of float32 or bfloat16, or codes as `ops.linear_weight_only` takes them, whose
    groups `groups_refused` does not mind."""

    rows: Tensor
    scale: Tensor | None = None  # float32 [rows, groups], or [rows]
    zero: Tensor | None = None  # int8 [rows, groups]

    @property
    def columns(self) -> int:
        return self.rows.shape[1] * (2 if self.rows.dtype == torch.uint8 else 1)

    @property
    def group(self) -> int:
        return 0 if self.scale is None else self.columns * len(self.rows) // max(self.scale.numel(), 1)

    @property
    def fields(self) -> list[int]:
        """The `Matrix` of codes.h."""
        address = lambda tensor: 0 if tensor is None else tensor.data_ptr()
        return [self.rows.data_ptr(), address(self.scale), address(self.zero), self.group]

    def functions(self, plain: torch.dtype) -> ctypes.CDLL:
        """The library for such weights beside norms, keys and values of a dtype."""
        return library("decode_step.cpp", WEIGHT=(PLAIN | CODES)[self.rows.dtype], PLAIN=PLAIN[plain])


def matrix_product(matrix: Matrix, x: Tensor, functions: ctypes.CDLL, threads: int) -> Tensor:
    """x [T, columns] times the rows of a matrix, [T, rows], in float32. With functions of bfloat16, x of many rows is
    rounded to it."""
    x = x.float().contiguous()
    out = room(len(x), len(matrix.rows))
    rows, scale, zero, group = matrix.fields
    given = pointer(rows), pointer(scale), pointer(zero), integer(group), pointer(x.data_ptr()), pointer(out.data_ptr())
    functions.decode_head(*given, *map(integer, (len(x), matrix.columns, len(matrix.rows), threads)))
    return out


def groups_refused(columns: int, groups: int) -> str:
    """Why rows of codes in so many groups cannot be read; empty when they can."""
    group = columns // groups
    return f"groups of codes must be multiples of {LANES}, not {group}" if group % LANES else ""


@dataclass(frozen=True)
class LayerWeights:
    """A layer's weights; its norms have the dtype of keys and values."""

    matrices: Sequence[Matrix]  # qkv, output, gate_up and down
    norms: Sequence[Tensor | None]  # before attention and feed-forward, then of queries and keys where there are such

    @property
    def fields(self) -> list[int]:
        """The `Layer` of decoder.h."""
        norms = [0 if norm is None else norm.data_ptr() for norm in self.norms]
        return [field for matrix in self.matrices for field in matrix.fields] + norms


def sizes_refused(**sizes: int) -> str:
    """Why the step cannot be compiled for some sizes; empty when it can."""
    wrong = [name for name, size in sizes.items() if size % LANES]
    return f"{wrong[0]} must be a multiple of {LANES}, not {sizes[wrong[0]]}" if wrong else ""


def room(*shape: int) -> Tensor:
    """Memory for numbers, whatever dtype and device are PyTorch's defaults."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


class DecodeStep:
    """The step of one model, all of whose layers have matrices of one dtype; the head's may be another. What it is given must
    stay where it is."""

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        norm: Tensor,
        head: Matrix,
        keys: Tensor,  # [layers, pages, page, kv_heads, dim]
        values: Tensor,
        *,
        heads: int,
        intermediate: int,
        eps: float,
        scale: float,
    ):
        self.kept = layers, norm, keys, values
        use_large_pages([matrix.rows for layer in layers for matrix in layer.matrices] + [head.rows])
        self.threads = torch.get_num_threads()
        self.head, self.hidden, self.intermediate = head, len(norm), intermediate
        self.functions = layers[0].matrices[0].functions(keys.dtype)
        self.head_functions = head.functions(keys.dtype)
        self.functions.most_tokens.restype = integer
        self.most = self.functions.most_tokens()  # tokens of a step
        self.table = torch.tensor([layer.fields for layer in layers], dtype=torch.int64, device="cpu")
        _, pages, page, kv_heads, dim = keys.shape
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.arguments: dict[str, Any] = dict(
            layers=self.table, norm=norm, count=len(layers), hidden=len(norm), heads=heads, kv_heads=kv_heads, dim=dim,
            intermediate=intermediate, eps=eps, scale=scale, keys=keys, values=values, pages=pages, page=page,
        )  # fmt: skip

    def __call__(
        self, x: Tensor, positions: Tensor, slots: Tensor, sequences: Tensor, tables: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """Normed hidden states [T, hidden] of tokens, in float32, from their embeddings x [T, hidden].

        `positions`, `slots` and `sequences` [T] say where a token stands, where its keys are to lie, and which row of
        `tables` [S, blocks] has the pages that it sees; of padding, in slot -1, nothing is kept. Integers are int64; `cos`
        and `sin` are [positions, dim / 2].
        """
        self.check_tokens(len(x))
        x, threads = x.to(torch.float32, copy=True).contiguous(), self.threads
        tokens, longest = len(x), tables.shape[1] * self.arguments["page"] + LANES
        memory = dict(
            x=x, qkv=room(tokens, (self.heads + 2 * self.kv_heads) * self.dim), seen=room(tokens, self.heads * self.dim),
            gated=room(tokens, self.intermediate), normal=room(threads, tokens, self.hidden),
            scores=room(threads, longest), positions=positions, slots=slots, sequences=sequences,
            tables=tables.long().contiguous(), cos=cos, sin=sin,
        )  # fmt: skip
        given = self.arguments | memory | dict(tokens=tokens, blocks=tables.shape[1], longest=longest, threads=threads)
        address = lambda value: value.data_ptr() if isinstance(value, Tensor) else value
        self.functions.decode_step(
            ctypes.byref(StepArguments(**{name: address(value) for name, value in given.items()}))
        )
        return x

    def check_tokens(self, tokens: int) -> None:
        if tokens > self.most:
            raise ValueError(
                f"a step has at most {self.most} tokens here, not {tokens}; this CPU leaves more to operators"
            )

    def logits(self, hidden: Tensor) -> Tensor:
        """The head's scores [D, V] of hidden states [D, hidden], in float32."""
        self.check_tokens(len(hidden))
        return matrix_product(self.head, hidden, self.head_functions, self.threads)

    def draw(self, logits: Tensor, seeds: Tensor, temperature: Tensor) -> Tensor:
        """A token [D] for each of logits [D, V] in float32, as `ops.sample` draws it without filters; seeds are int64."""
        logits, tokens = logits.contiguous(), torch.empty(len(logits), dtype=torch.int64, device="cpu")
        given = logits, seeds.contiguous(), temperature.float().contiguous(), tokens
        self.functions.draw_tokens(*(pointer(each.data_ptr()) for each in given), *map(integer, logits.shape))
        return tokens
