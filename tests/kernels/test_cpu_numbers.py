"""What C++ for a CPU reads and writes, number by number: by instructions of AVX-512 where there are such, and in the way of
all other CPUs."""

import ctypes
import platform
import subprocess
from pathlib import Path

import pytest
import torch

from tilestack.kernels.cpu import build
from tilestack.ops.weight_only import unpack_int4

pytestmark = pytest.mark.skipif(bool(build.missing_compiler()), reason="there is no C++ compiler")
OTHERS = ["-mno-avx512f"] if platform.machine() == "x86_64" else []


@pytest.fixture(scope="module", params=[[], OTHERS], ids=["this CPU", "others"])
def library(request, tmp_path_factory):
    made = tmp_path_factory.mktemp("numbers") / "cpu_numbers.so"
    source = Path(__file__).with_name("cpu_numbers.cpp")
    flags = ["-O1" if flag == "-O3" else flag for flag in build.FLAGS]
    command = [*build.compiler(), *flags, *request.param, f"-I{build.SOURCES}", str(source), "-o", str(made)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(made))


def called(function, x, out, *more):
    """What a function makes of the memory of x in that of out, of as many numbers as out has."""
    function(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr()), ctypes.c_int64(out.numel()), *more)
    return out


def same_numbers(found, expected):
    return torch.equal(found.nan_to_num(7e37), expected.nan_to_num(7e37)) and torch.equal(
        found.isnan(), expected.isnan()
    )


@pytest.mark.parametrize(
    ("name", "dtype"), {"bfloat16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}.items()
)
def test_every_number_is_read_as_pytorch_reads_it(library, name, dtype):
    patterns = torch.arange(256**dtype.itemsize).to(torch.int32).to(torch.int16 if dtype.itemsize == 2 else torch.uint8)
    numbers = patterns.view(dtype)
    assert same_numbers(called(library[f"read_{name}"], numbers, torch.empty(len(numbers))), numbers.float())


def test_every_pair_of_4_bits_is_read_as_the_definition_reads_it(library):
    codes = torch.stack([torch.arange(256).to(torch.uint8).roll(17 * turn) for turn in range(16)], 1).contiguous()
    found = called(library.read_int4, codes, torch.empty(len(codes), 32), ctypes.c_float(0.3), ctypes.c_int8(5))
    assert torch.equal(found, (unpack_int4(codes).float() - 5) * torch.tensor(0.3))


def test_numbers_are_rounded_to_bfloat16_as_by_pytorch(library):
    halves = torch.arange(2**16).to(torch.int32) << 16
    about = torch.cat([halves + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).view(
        torch.float32
    )  # ties, and beside
    found = called(library.write_bfloat16, about, torch.empty(len(about), dtype=torch.bfloat16))
    assert same_numbers(found.float(), about.bfloat16().float())


def test_powers_and_sums_are_off_by_some_units_in_the_last_place(library):
    torch.manual_seed(0)
    x = torch.cat([-126 * torch.rand(1008), torch.tensor([0.0, -0.5, -1.0, -126.0]), -126 - 1e4 * torch.rand(12)])
    found, exact = called(library.powers_of_two, x, torch.empty(len(x))).double(), x.double().clamp(min=-126).exp2()
    assert ((found - exact).abs() <= 8 * torch.finfo(torch.float32).eps * exact).all()
    library.total.restype = ctypes.c_float
    some = torch.randn(16)
    found = library.total(ctypes.c_void_p(some.data_ptr()))
    assert abs(found - float(some.double().sum())) <= 16 * torch.finfo(torch.float32).eps * float(some.abs().max())
