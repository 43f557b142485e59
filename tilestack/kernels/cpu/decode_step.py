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
WEIGHTS = {torch.float32: "float", torch.bfloat16: "BFloat16", torch.int8: "int8_t"}
PLAIN = {torch.float32: "float", torch.bfloat16: "BFloat16"}

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
    """A weight [rows, columns], contiguous: float32, bfloat16, or int8 with a float32 scale for each row."""

    rows: Tensor
    scale: Tensor | None = None

    @property
    def addresses(self) -> list[int]:
        return [self.rows.data_ptr(), 0 if self.scale is None else self.scale.data_ptr()]


@dataclass(frozen=True)
class LayerWeights:
    """A layer's weights; its norms have the dtype of keys and values."""

    matrices: Sequence[Matrix]  # qkv, output, gate_up and down
    norms: Sequence[Tensor | None]  # before attention and feed-forward, then of queries and keys where there are such

    @property
    def addresses(self) -> list[int]:
        norms = [0 if norm is None else norm.data_ptr() for norm in self.norms]
        return [address for matrix in self.matrices for address in matrix.addresses] + norms


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
        compiled = lambda of: library("decode_step.cpp", WEIGHT=WEIGHTS[of.rows.dtype], PLAIN=PLAIN[keys.dtype])
        self.functions, self.head_functions = compiled(layers[0].matrices[0]), compiled(head)
        self.functions.most_tokens.restype = integer
        self.most = self.functions.most_tokens()  # tokens of a step
        self.table = torch.tensor([layer.addresses for layer in layers], dtype=torch.int64, device="cpu")
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
        hidden = hidden.float().contiguous()
        (count, columns), tokens = self.head.rows.shape, len(hidden)
        logits = room(tokens, count)
        addresses = *self.head.addresses, hidden.data_ptr(), logits.data_ptr()
        sizes = tokens, columns, count, self.threads
        self.head_functions.decode_head(*map(pointer, addresses), *map(integer, sizes))
        return logits

    def draw(self, logits: Tensor, seeds: Tensor, temperature: Tensor) -> Tensor:
        """A token [D] for each of logits [D, V] in float32, as `ops.sample` draws it without filters; seeds are int64."""
        logits, tokens = logits.contiguous(), torch.empty(len(logits), dtype=torch.int64, device="cpu")
        given = logits, seeds.contiguous(), temperature.float().contiguous(), tokens
        self.functions.draw_tokens(*(pointer(each.data_ptr()) for each in given), *map(integer, logits.shape))
        return tokens
