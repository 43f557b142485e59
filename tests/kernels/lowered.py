"""Thresholds that no small case crosses, and what to make of them so that one does.

Each is proved like any other code, with its constants lowered: by name of a file of kernels, the constants, and the
operators whose cases then cross them. What asks how much shared memory the GPU has is proved as on one that has less.
"""

import contextlib
import importlib

LOWERED = {
    "columns summed in shares": ("memory.columns", dict(FEW_LINES=200), ["reduce_sum"]),
    "logits in several chunks": (
        "loss.linear_cross_entropy",
        dict(CHUNK_BYTES=4 * 65 * 2, ROW_MULTIPLE=1, MANY=1),
        ["linear_cross_entropy"],
    ),
    "ids sorted, not counted": ("memory.embedding", dict(COUNTED=16), ["embedding"]),
    "heads too wide for flash attention": ("attention.ladder", dict(WIDEST_HEAD=16), ["attention"]),
    "rows of scores too long for registers": ("attention.standard", dict(LONGEST_ROW=20), ["attention"]),
    "blocks sorted, not counted": ("sparse.blocks", dict(MOST_COMPARED=4), ["block_sparse_dsd", "block_sparse_sdd"]),
    "pages with less shared memory": ("attention.paged", dict(HOPPER_SHARED=1 << 20), ["paged_attention"]),
    "all heads of a token in one program": ("attention.rope", dict(PROGRAMS=0), ["rope", "rope_", "qk_norm_rope"]),
    "codes with less shared memory": (
        "attention.quantised",
        dict(HOPPER_SHARED=1 << 20),
        ["attention_int8", "attention_fp8"],
    ),
    "rows of softmax with less shared memory": (
        "softmax.rows",
        dict(WIDEST_SOFTMAX=512, BACKWARD_CHUNK_BYTES=1 << 16),
        ["softmax"],
    ),
    "gates too long for registers": ("quantised.gated", dict(WIDEST_QUANTISED=512), ["silu_mul_int8"]),
}


@contextlib.contextmanager
def lowered(file, constants):
    module = importlib.import_module(f"tilestack.kernels.{file}")
    before = {name: getattr(module, name) for name in constants}
    for name, value in constants.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
