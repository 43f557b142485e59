"""The backend `cuda` where there is no GPU: who has it, why it cannot run, how tensors reach it, and that it compiles."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tilestack
from tilestack import ops
from tilestack.contract import registry
from tilestack.contract.backends import usable
from tilestack.kernels.cuda import add, build, matmul, rms_norm, softmax, weight_only
from tilestack.kernels.cuda.decode_step import DecoderShape

KERNELS = [
    ("add", "cuda"),
    ("softmax", "cuda"),
    ("rms_norm", "cuda"),
    ("linear", "cuda_tiled"),
    ("linear", "cuda"),
    ("linear_weight_only", "cuda"),
    ("paged_attention", "cuda"),
]
SOURCES = sorted(build.SOURCES.glob("*.cu"))
GPU = torch.device("cuda")


@pytest.mark.parametrize(("operator", "backend"), KERNELS)
def test_it_stands_beside_the_others_and_says_why_it_cannot_run(operator, backend):
    way = ops.operator_named(operator).implementations[backend]
    arguments = {
        "add": (torch.ones(2), torch.ones(2)),
        "softmax": (torch.ones(2),),
        "rms_norm": (torch.ones(2),),
        "linear": (torch.ones(2, 2), torch.ones(2, 2)),
        "linear_weight_only": (torch.ones(2, 16).half(), torch.ones(2, 16, dtype=torch.int8), torch.ones(2, 1)),
        "paged_attention": (
            torch.ones(1, 1, 64),
            *2 * [torch.ones(1, 16, 1, 64)],
            torch.zeros(1, 1, dtype=torch.int64),
            torch.ones(1, dtype=torch.int64),
            torch.arange(2),
            1,
        ),
    }[operator]
    reason = f"{operator} cannot run on {backend}: CUDA C\\+\\+ kernels need a CUDA tensor, not one on cpu; torch, "
    with tilestack.backend(backend), pytest.raises(tilestack.BackendError, match=reason):
        way.operator(*arguments)


@pytest.mark.parametrize("operator", ["add", "softmax", "rms_norm", "linear", "linear_weight_only", "paged_attention"])
def test_auto_leaves_it_alone_unless_it_measured_fastest(operator, monkeypatch):
    described = ops.operator_named(operator)
    monkeypatch.setattr(registry, "_preference", lambda *_: [])
    assert [way.backend for way in registry.candidates(described, {}, GPU, False)] == ["triton"]
    monkeypatch.setattr(registry, "_preference", lambda *_: ["cuda"])
    assert [way.backend for way in registry.candidates(described, {}, GPU, False)] == ["cuda", "triton"]


@pytest.mark.parametrize("tool", ["g++", "ninja", "nvcc"])
def test_a_missing_tool_is_named_with_what_to_do_about_it(tool, monkeypatch, tmp_path):
    from torch.utils import cpp_extension

    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == tool else f"/usr/bin/{name}")
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None if tool == "nvcc" else str(tmp_path))
    build.missing_tool.cache_clear()
    try:
        assert f"there is no {tool}; " in str(usable("cuda", GPU))
        monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
        monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path))
        build.missing_tool.cache_clear()
        assert usable("cuda_tiled", GPU) is True
    finally:
        build.missing_tool.cache_clear()


def test_importing_the_kernels_compiles_nothing():
    program = "import sys; from tilestack import ops; ops.operators(); assert 'tilestack.kernels.cuda.matmul' in sys.modules; print('torch.utils.cpp_extension' in sys.modules)"
    here = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=here)
    assert done.stdout.split() == ["False"], done.stderr


@pytest.fixture
def calls(monkeypatch):
    """What launchers hand to C, by the name of the function; nothing runs."""
    noted = {}

    class Functions:
        def __init__(self, source):
            self.source = source

        def __getattr__(self, name):
            return self.source, name

    for module in (add, softmax, rms_norm, matmul):
        monkeypatch.setattr(module, "library", Functions)
        monkeypatch.setattr(module, "call", lambda function, device, *given: noted.update({function: given}))
    return noted


def test_tensors_reach_c_as_the_kernels_read_them(calls):
    x = torch.randn(6, 4).T  # not contiguous
    assert add.add(x, x).is_contiguous()
    given, _, _, count, dtype = calls["add.cu", "add"]
    assert given.is_contiguous()
    assert (count, dtype) == (24, build.DTYPES[torch.float32])

    out = softmax.softmax(torch.randn(2, 5, 3).double(), 1)
    assert out.shape == (2, 5, 3)
    assert out.is_contiguous()
    rows, _, *sizes = calls["softmax.cu", "softmax"]
    assert rows.shape == (2, 3, 5)
    assert sizes == [6, 5, build.DTYPES[torch.float64]]

    rms_norm.rms_norm(torch.randn(2, 3, 8), None, 1e-6)
    assert calls["rms_norm.cu", "rms_norm"][3:] == (6, 8, 1e-6, build.DTYPES[torch.float32])

    a, b = torch.randn(5, 7), torch.randn(3, 7).T
    assert matmul.tiled_product(a, b, None).shape == (5, 3)
    assert calls["matmul_tiled.cu", "matmul_tiled"][4:] == (5, 3, 7, 7, 1, 7, 1, build.DTYPES[torch.float32])

    assert matmul.tensor_core_product(a.half(), b.half(), None).shape == (5, 3)
    left, right, _, _, *sizes = calls["matmul_tensor_cores.cu", "matmul_tensor_cores"]
    assert sizes == [5, 3, 8, build.DTYPES[torch.float16]]
    assert torch.equal(left @ right.T, a.half() @ b.half())


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0,)])
def test_nothing_is_launched_for_empty_tensors(calls, shape):
    x = torch.zeros(shape)
    assert add.add(x, x).shape == softmax.softmax(x, -1).shape == rms_norm.rms_norm(x, None, 1e-6).shape == shape
    assert not calls


def test_a_matrix_that_lies_well_is_not_copied():
    matrix = torch.randn(4, 16).half()
    assert matmul.rows_of_vectors(matrix) is matrix
    off = torch.randn(4 * 16 + 1).half()[1:].view(4, 16)
    assert matmul.rows_of_vectors(off).data_ptr() % 16 == 0
    assert torch.equal(matmul.rows_of_vectors(off), off)


@pytest.mark.parametrize("name", weight_only.CONFIGS)
def test_more_blocks_share_k_where_one_has_no_room(name):
    given = weight_only.CONFIGS[name]
    small = weight_only.fitting_plan(given, 1, 1024, 8, 0)
    assert (small.row_warps, small.k_warps, small.splits) == given
    for sizes in [(16, 4096, 32, 0), (16, 14336, 112, 0), (8, 14336, 448, 0), (16, 28672, 1, 1), (16, 8192, 512, 2)]:
        plan = weight_only.fitting_plan(given, *sizes)
        assert plan.shared_bytes <= weight_only.MOST_SHARED
        assert plan.splits <= weight_only.MOST_SPLITS
        codes = 32 if sizes[3] == 0 else 16
        assert plan.k_warps * plan.splits * plan.stages * weight_only.PIECES * codes >= sizes[1]


@pytest.mark.parametrize("group", [16, 48, 80, 96, 112, 128])
def test_a_block_has_a_scale_for_every_group_that_its_part_of_k_touches(group):
    """And what shares one scale in a stage lies in one group."""
    for config in [*weight_only.CONFIGS.values(), weight_only.Config(1, 1, 4), weight_only.Config(1, 3, 5)]:
        for groups in range(1, 60):
            plan = weight_only.plan_of(config, 8, group * groups, groups, 1)
            every, mine = group * groups // weight_only.PIECE, plan.k_warps * plan.stages * weight_only.PIECES
            for first in range(0, every, mine):
                last = min(first + mine, every) - 1
                assert last // plan.group_pieces - first // plan.group_pieces < plan.groups_nearby
            assert plan.group_pieces % weight_only.fold_of(plan) == 0


@pytest.mark.parametrize(
    ("rows", "inner", "groups", "dtype", "reason"),
    [
        (16, 4096, 32, torch.uint8, None),
        (16, 48, 3, torch.int8, None),
        (17, 64, 1, torch.int8, "it takes 1 to 16 rows, not 17"),
        (1, 40, 1, torch.int8, "multiples of 16 codes of 8 bits, not 40 and 40"),
        (1, 64, 8, torch.int8, "multiples of 16 codes of 8 bits, not 64 and 8"),
        (16, 65536, 1, torch.uint8, "16 rows of 65536 numbers and their scales find no room in shared memory"),
    ],
)
def test_few_rows_of_whole_pieces_are_taken(rows, inner, groups, dtype, reason):
    weight = torch.empty(3, inner // (2 if dtype == torch.uint8 else 1), dtype=dtype)
    answer = weight_only.takes(torch.empty(rows, inner).half(), weight, torch.empty(3, groups))
    assert answer is True if reason is None else reason in answer


def test_values_become_those_of_c_and_an_error_is_raised_in_cudas_words(monkeypatch):
    x = torch.ones(1)
    kinds = [type(build.as_c(value)) for value in (x, None, 1.5, 3)]
    assert kinds == [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_double, ctypes.c_int64]
    assert build.as_c(x).value == x.data_ptr()

    def refused(*_):
        return b"invalid configuration argument"

    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    with pytest.raises(RuntimeError, match="refused: invalid configuration argument"):
        build.call(refused, GPU, x)


def nvcc():
    from torch.utils.cpp_extension import CUDA_HOME

    beside = Path(CUDA_HOME, "bin", "nvcc") if CUDA_HOME else None
    return str(beside) if beside and beside.exists() else shutil.which("nvcc")


def constants_of(source):
    """The macros that a source is compiled with, by set, and for which GPUs."""
    if source.stem == "weight_only":
        kinds = {"int4": (0, 4), "int4 32": (0, 1), "int8": (1, 4), "int8 32": (1, 2), "fp8": (2, 4)}
        return {name: (dict(CODES=codes, FOLD=fold), (90,)) for name, (codes, fold) in kinds.items()}
    if source.stem == "paged_decode":
        usual = dict(DIM=128, GROUP=2, PAGE=16, HALF=3, CODES=0, LONG=1, WARPS=2, SLOTS=3)
        codes = usual | dict(CODES=1, SLOTS=6)
        wide, small = dict(GROUP=8, WARPS=4), dict(DIM=64, GROUP=1, HALF=2, LONG=0, SLOTS=6)
        kinds = {"usual": usual, "wide": usual | wide, "small": usual | small}
        return {name: (given, (80, 90)) for name, given in kinds.items()} | {
            f"fp8 {name}": (codes | given, (90,))
            for name, given in dict(usual={}, wide=wide, float16=dict(HALF=2)).items()
        }
    if source.stem != "decode_step":
        return {"": ({}, (80, 90))}
    qwen3 = DecoderShape(28, 1024, 16, 8, 128, 3072, 151936, True)
    llama = DecoderShape(16, 2048, 32, 8, 64, 8192, 128256, False)
    of = lambda shape, layout: (shape.constants(*layout), (90,))
    coded = lambda shape: replace(shape, codes=True)
    return {
        "qwen3 fp8": of(coded(qwen3), (16, 8)),
        "qwen3 fp8 half": of(coded(qwen3), (8, 8)),
        "llama fp8": of(coded(llama), (16, 8)),
        "qwen3": of(qwen3, (16, 8)),
        "qwen3 8": of(qwen3, (8, 16)),
        "qwen3 half": of(qwen3, (8, 8)),
        "llama": of(llama, (8, 16)),
        "llama half": of(llama, (8, 8)),
    }


SPILLS_OWED = {
    "decode_step qwen3 fp8": 60,
    "decode_step qwen3 fp8 half": 20,
    "decode_step llama fp8": 100,
    "decode_step llama half": 8,
}  # bytes, not yet cured: 128 registers are few there
COMPILED = {f"{source.stem} {name}".strip(): (source, *given) for source in SOURCES for name, given in constants_of(source).items()}  # fmt: skip


@pytest.mark.parametrize("name", COMPILED)
def test_it_compiles_without_spills(name, tmp_path):
    from torch.utils.cpp_extension import COMMON_NVCC_FLAGS

    source, constants, capabilities = COMPILED[name]
    if not (compiler := nvcc()):
        pytest.skip("there is no nvcc here")
    targets = [f"-gencode=arch=compute_{capability},code=sm_{capability}" for capability in capabilities]
    flags = [*COMMON_NVCC_FLAGS, *build.CUDA_FLAGS, "-std=c++17", "-Xptxas", "-v", "-Xcompiler", "-fPIC", *targets]
    flags += [f"-D{name}={value}" for name, value in constants.items()]
    done = subprocess.run(
        [compiler, *flags, "-c", str(source), "-o", str(tmp_path / "out.o")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    spilled = [int(bytes_) for bytes_ in re.findall(r"(\d+) bytes spill stores", done.stderr)]
    assert spilled
    assert max(spilled) <= SPILLS_OWED.get(name, 0)


def test_weights_of_no_numbers_in_several_groups_are_asked_for_safely():
    codes = torch.zeros(16, 0, dtype=torch.int8)
    assert weight_only.takes(torch.zeros(8, 0), codes, torch.zeros(16, 2)) is True
