"""What `tilestack tiles` records, against kernels whose loads and stores are counted by hand."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.cases import Case
from tilestack.lab.proof.verify import Claim
from tilestack.lab.tiles.counts import as_json, bytes_needed, counts_of, total_in_words
from tilestack.lab.tiles.record import record
from tilestack.lab.tiles.regions import Region

pytestmark = pytest.mark.usefixtures("outside")
CPU = torch.device("cpu")


def claim_of(operator, backend, case, direction="forward", dtype=torch.float32, layout="plain"):
    if isinstance(case, str):
        case = next(each for each in operator.cases if each.name == case)
    return Claim(operator, operator.implementations[backend], case, layout, dtype, direction, CPU)


def record_mine(operator, forward, shape, layout="plain", **limits):
    """The recording of a forward as the backend `mine` of an operator of one tensor."""
    implements(operator, backend="mine")(forward)
    case = Case("mine", lambda make: dict(x=make.normal(*shape)))
    return record(claim_of(operator, "mine", case, layout=layout), **limits)


def count(recording, tensor, kind, launch=1):
    (found,) = [c for c in counts_of(recording) if (c.launch, c.tensor, c.kind) == (launch, tensor, kind)]
    return found


@triton.jit
def copy_kernel(x_ptr, out_ptr, n, step, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    place = place // (n // step) + place % (n // step) * step
    x = tl.load(x_ptr + place, mask=inside)
    tl.store(out_ptr + place, x, mask=inside)


def copy_by(step):
    def copy(x):
        out = torch.empty_like(x)
        copy_kernel[(triton.cdiv(x.numel(), 32),)](x, out, x.numel(), step, BLOCK=32)
        return out

    return copy


@pytest.mark.parametrize(("step", "needed"), [(1, 1.0), (2, 0.5), (4, 0.25), (8, 0.125), (32, 0.125)])
def test_a_copy_whose_lanes_are_some_elements_apart_needs_that_share_of_its_sectors(step, needed):
    recording = record_mine(ops.copy, copy_by(step), (32, 32))
    for tensor, kind in (("x_ptr", "load"), ("out_ptr", "store")):
        found = count(recording, tensor, kind)
        assert (found.asked, found.distinct, found.times, found.masked) == (4096, 4096, 1.0, 0.0)
        assert (found.steps, found.fewest, found.efficiency) == (32, 128, needed)
    assert bytes_needed(recording) == 8192
    assert total_in_words(recording) == "8.19 kB asked for, 1.00× what the operator has to move (8.19 kB)"


@triton.jit
def copy_and_count_kernel(x_ptr, out_ptr, counts_ptr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + place, tl.load(x_ptr + place))
    if tl.atomic_add(counts_ptr, 1) == tl.num_programs(0) - 1:
        tl.store(counts_ptr, 0)


def test_atomics_and_stores_of_one_tensor_are_counted_apart():
    def copy(x):
        out, counts = torch.empty_like(x), torch.zeros(3, dtype=torch.int32)
        copy_and_count_kernel[(4,)](x, out, counts, BLOCK=16)
        return out

    recording = record_mine(ops.copy, copy, (64,))
    found = [count(recording, "counts_ptr", kind) for kind in ("atomic", "store")]
    assert [(each.asked, each.distinct, each.times) for each in found] == [(16, 4, 4.0), (4, 4, 1.0)]
    assert recording.launches[0].writes[2].tolist() == [5, 0, 0]


def test_steps_are_in_order_with_their_elements_lines_and_masks():
    launch = record_mine(ops.copy, copy_by(1), (50,)).launches[0]
    assert (launch.kernel, launch.grid, launch.executed, launch.what_is_kept) == ("copy_kernel", (2, 1, 1), 2, "")
    first, second = launch.programs
    assert (first.index, second.index) == ((0, 0, 0), (1, 0, 0))
    load, store = second.steps
    begins = copy_kernel.fn.__code__.co_firstlineno + 1  # the decorator is a line
    assert (load.kind, launch.regions[load.region].name) == ("load", "x_ptr")
    assert (store.kind, launch.regions[store.region].name) == ("store", "out_ptr")
    assert [line.number - begins for line in (*load.lines, *store.lines)] == [4, 5]
    assert load.lines[0].file == __file__
    assert load.elements.tolist() == list(range(32, 50))
    assert (load.lanes, load.masked, load.outside, load.asked) == (32, 14, 0, 72)


@triton.jit
def transpose_rows_kernel(x_ptr, out_ptr, M, N: tl.constexpr):
    column = tl.arange(0, N)
    tl.store(out_ptr + column * M + tl.program_id(0), tl.load(x_ptr + tl.program_id(0) * N + column))


@triton.jit
def transpose_tiles_kernel(x_ptr, out_ptr, M, N, BLOCK: tl.constexpr):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(out_ptr + n * M + m, tl.load(x_ptr + m * N + n))


def test_a_transpose_in_tiles_stores_whole_sectors_and_one_row_by_row_an_eighth_of_each():
    def row_by_row(x):
        out = x.new_empty(x.shape[::-1])
        transpose_rows_kernel[(x.shape[0],)](x, out, *x.shape)
        return out

    def in_tiles(x):
        out = x.new_empty(x.shape[::-1])
        transpose_tiles_kernel[(x.shape[0] // 16, x.shape[1] // 16)](x, out, *x.shape, BLOCK=16)
        return out

    by_row, tiled = (record_mine(ops.transpose, each, (64, 32)) for each in (row_by_row, in_tiles))
    assert [count(each, "x_ptr", "load").efficiency for each in (by_row, tiled)] == [1.0, 1.0]
    assert [count(each, "out_ptr", "store").efficiency for each in (by_row, tiled)] == [0.125, 1.0]
    assert [program.index for program in tiled.launches[0].programs[:3]] == [(0, 0, 0), (0, 1, 0), (1, 0, 0)]


@triton.jit
def softmax_twice_kernel(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0) * columns
    top, total = -float("inf"), 0.0
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + column, mask=column < columns, other=-float("inf"))
        larger = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - larger) + tl.sum(tl.exp(x - larger), 0)
        top = larger
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + column, mask=column < columns)
        tl.store(out_ptr + row + column, tl.exp(x - top) / total, mask=column < columns)


def test_a_softmax_in_two_passes_reads_all_of_x_twice():
    def softmax(x, dim):
        out = torch.empty_like(x)
        softmax_twice_kernel[(x.shape[0],)](x, out, x.shape[1], BLOCK=16)
        return out

    implements(ops.softmax, backend="mine")(softmax)
    case = Case("3x40", lambda make: dict(x=make.normal(3, 40)))
    recording = record(claim_of(ops.softmax, "mine", case))
    read = count(recording, "x_ptr", "load")
    assert (read.times, read.asked, read.distinct) == (2.0, 960, 480)
    assert read.masked == pytest.approx(8 / 48)
    assert recording.launches[0].reads[0].tolist() == [2] * 120
    assert as_json(recording)["asked"] / as_json(recording)["needed"] == 1.5
    kinds = [step.kind for step in recording.launches[0].programs[1].steps]
    assert kinds == ["load"] * 3 + ["load", "store"] * 3


def test_a_naive_product_reads_each_operand_once_for_each_tile_of_the_other():
    rows, columns, tile = 70, 130, 64
    (launch,) = record(claim_of(ops.linear, "triton_naive", "70x130x40xplain")).launches
    read = dict(zip([region.name for region in launch.regions], launch.reads, strict=True))
    assert set(read["a_ptr"].tolist()) == {triton.cdiv(columns, tile)}
    assert set(read["b_ptr"].tolist()) == {triton.cdiv(rows, tile)}
    assert {line.function for step in launch.programs[0].steps for line in step.lines} == {
        "matmul_naive_kernel", "tile_of_product", "sum_along_k", "store_with_bias",
    }  # fmt: skip
    assert launch.programs[0].steps[0].lines[0].function == "matmul_naive_kernel"


def test_tiles_that_descriptors_move_are_named_and_counted():
    recording = record(claim_of(ops.linear, "triton_persistent", "70x130x40xplain", dtype=torch.float16))
    read = count(recording, "a_desc", "descriptor load")
    assert read.times == triton.cdiv(130, 128)
    assert read.distinct == 70 * 40 * 2
    assert read.efficiency == 1.0
    region = recording.launches[0].regions[0]
    assert (region.name, region.shape, region.dtype) == ("a_desc", (70, 40), "float16")


def test_a_backward_is_recorded_without_its_forward_and_launch_by_launch():
    recording = record(claim_of(ops.linear, "triton_naive", "70x130x40xplain", "backward"))
    assert [launch.kernel for launch in recording.launches] == ["matmul_naive_kernel"] * 2
    assert {c.launch for c in counts_of(recording)} == {1, 2}
    for launch, shape in zip(recording.launches, [(70, 40), (130, 40)], strict=True):  # dx and dweight
        (written,) = [launch.regions[place].shape for place, kind in launch.tallies if kind == "store"]
        assert written == shape
    (softmax,) = record(claim_of(ops.softmax, "triton", "3x33x-1", "backward")).launches
    assert softmax.kernel == "softmax_bwd_kernel"


@triton.jit
def count_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.atomic_add(out_ptr + tl.arange(0, BLOCK) % 4, x, mask=x == x)
    tl.atomic_cas(out_ptr + tl.arange(0, BLOCK), x, x)


def test_atomics_are_counted_where_several_lanes_meet():
    def counted(x):
        out = torch.zeros_like(x)
        count_kernel[(1,)](x, out, BLOCK=16)
        return out

    recording = record_mine(ops.copy, counted, (16,))
    found = count(recording, "out_ptr", "atomic")
    assert (found.steps, found.asked, found.distinct, found.times) == (2, 128, 64, 2.0)
    assert recording.launches[0].writes[1].tolist() == [5] * 4 + [1] * 12
    assert recording.launches[0].reads[1].sum() == 0


def test_beyond_the_limits_the_first_are_kept_and_all_are_counted():
    few = record_mine(ops.copy, copy_by(1), (256,), programs=3).launches[0]
    assert [program.index[0] for program in few.programs] == [0, 1, 2]
    assert few.what_is_kept == "the first 3 of 8 programs"
    assert (few.executed, few.reads[0].sum(), few.tallies[0, "load"].steps) == (8, 256, 8)
    short = record_mine(ops.copy, copy_by(1), (256,), lanes=160).launches[0]
    assert [len(program.steps) for program in short.programs] == [2, 2, 1]
    assert short.what_is_kept == "the first 3 of 8 programs, of the last 1 of its 2 loads and stores"
    even = record_mine(ops.copy, copy_by(1), (256,), lanes=128).launches[0]
    assert ([len(p.steps) for p in even.programs], even.what_is_kept) == ([2, 2], "the first 2 of 8 programs")
    assert short.reads[0].tolist() == short.writes[1].tolist() == [1] * 256


@triton.jit
def wrong_kernel(x_ptr, out_ptr, n, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, mask=place < (n + 3 if FAULT == "reads beyond" else n))
    if FAULT == "raises":
        x = x + tl.program_id(0).no_such_thing
    if FAULT == "far away":
        x = tl.load(x_ptr + place * 100_000_000, mask=place >= 0)
    tl.store(out_ptr + place - (5 if FAULT == "writes before" else 0), x, mask=place < n)


def record_wrong(fault):
    def copy(x):
        out = torch.empty_like(x)
        wrong_kernel[(triton.cdiv(x.numel(), 16),)](x, out, x.numel(), fault, BLOCK=16)
        return out

    return record_mine(ops.copy, copy, (24,))


def test_lanes_outside_of_a_tensor_are_told_and_the_call_goes_on():
    reads = record_wrong("reads beyond")
    assert (count(reads, "x_ptr", "load").outside, count(reads, "out_ptr", "store").outside) == (3, 0)
    assert (reads.error, reads.launches[0].executed) == ("", 2)
    writes = record_wrong("writes before")
    assert (count(writes, "x_ptr", "load").outside, count(writes, "out_ptr", "store").outside) == (0, 5)
    assert writes.launches[0].writes[1].tolist() == [1] * 19 + [0] * 5


def test_a_kernel_that_raises_leaves_what_it_did_and_the_line():
    recording = record_wrong("raises")
    line = wrong_kernel.fn.__code__.co_firstlineno + 5
    assert recording.error.startswith("AttributeError: ")
    assert recording.error.endswith(f"({__file__}:{line})")
    (program,) = recording.launches[0].programs
    assert [step.kind for step in program.steps] == ["load"]


def test_an_address_far_from_all_memory_ends_the_call_instead_of_the_process():
    recording = record_wrong("far away")
    assert recording.error.startswith("TouchedOutside: a load at an address that is in no tensor of this call")
    (program,) = recording.launches[0].programs
    assert [step.outside for step in program.steps] == [0, 15]  # all but the first lane
    assert count(recording, "x_ptr", "load").outside == 15


def test_a_call_that_is_interrupted_leaves_what_it_did():
    def copy(x):
        copy_by(1)(x)
        raise KeyboardInterrupt

    recording = record_mine(ops.copy, copy, (32,))
    assert (recording.error, recording.launches[0].executed) == ("interrupted", 1)


@triton.jit
def strayed_kernel(out_ptr, x_ptr, far, BLOCK: tl.constexpr):
    source = x_ptr + tl.program_id(0) * far + tl.arange(0, BLOCK)
    x = tl.load(source)  # a line without the name of what it reads
    tl.store(out_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), x)


def test_a_load_that_strays_is_told_of_the_tensor_that_its_line_read_before():
    def copy(x):
        out = torch.empty_like(x)
        far = 1 << 30 if out.data_ptr() > x.data_ptr() else -(1 << 30)  # past `out`, the nearest then
        strayed_kernel[(2,)](out, x, far, BLOCK=16)
        return out

    recording = record_mine(ops.copy, copy, (32,))
    assert count(recording, "x_ptr", "load").outside == 16
    assert not any(found.outside for found in counts_of(recording) if found.tensor != "x_ptr")


@triton.jit
def choose_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(tl.where(place % 2 == 0, x_ptr + place, out_ptr + place), place.to(tl.float32), mask=place < n)


def test_an_access_to_two_tensors_is_a_step_of_each_and_its_masked_lanes_are_told_once():
    def chosen(x):
        x, out = x.clone(), torch.empty_like(x)
        choose_kernel[(1,)](x, out, x.numel(), BLOCK=16)
        return out

    (program,) = (recording := record_mine(ops.copy, chosen, (10,))).launches[0].programs
    assert [step.elements.tolist() for step in program.steps] == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    assert [(step.lanes, step.masked) for step in program.steps] == [(11, 6), (5, 0)]
    assert count(recording, "x_ptr", "store").masked == 6 / 11


@triton.jit
def two_views_kernel(even_ptr, odd_ptr, out_ptr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(out_ptr + place, tl.load(even_ptr + 2 * place) + tl.load(odd_ptr + 2 * place))


def test_interleaved_views_of_one_memory_are_told_apart():
    def folded(x):
        out = x.new_empty(x.numel() // 2)
        two_views_kernel[(1,)](x[::2], x[1::2], out, BLOCK=16)
        return torch.cat([out, out])

    launch = record_mine(ops.copy, folded, (32,)).launches[0]
    assert [region.name for region in launch.regions] == ["even_ptr", "odd_ptr", "out_ptr"]
    assert [reads.tolist() for reads in launch.reads] == [[1] * 16, [1] * 16, [0] * 16]


@triton.jit
def double_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(out_ptr + place, 2 * tl.load(x_ptr + place))


def test_a_tensor_that_is_two_arguments_has_both_names_and_memory_around_a_view_is_its_own():
    def doubled(x):
        out = x.clone()
        double_kernel[(1,)](out, out, BLOCK=16)
        double_kernel[(1,)](out[:4], out[8:12], BLOCK=8)
        return out

    first, second = record_mine(ops.copy, doubled, (16,)).launches
    assert [region.name for region in first.regions] == ["x_ptr, out_ptr"]
    assert [region.name for region in second.regions] == ["x_ptr", "out_ptr", "memory of x_ptr"]
    assert [reads.sum() for reads in second.reads] == [4, 0, 4]
    assert second.regions[2].elements_at(np.array([second.regions[1].address], np.uint64)) == [8]


def test_arguments_in_awkward_memory_are_found_by_address():
    for layout in ("plain", "strided", "transposed", "padded", "offset"):
        recording = record(claim_of(ops.transpose, "triton", "127x65", layout=layout))
        assert recording.launches[0].reads[0].tolist() == [1] * 127 * 65
        assert not any(found.outside for found in counts_of(recording))


def test_a_workspace_has_the_name_of_the_kernels_argument():
    recording = record(claim_of(ops.linear, "triton_split_k", "3x24x304"))
    (launch,) = recording.launches
    assert [region.name for region in launch.regions][3:5] == ["parts_ptr", "counts_ptr"]
    assert count(recording, "parts_ptr", "load").times == count(recording, "parts_ptr", "store").times == 1
    assert count(recording, "counts_ptr", "atomic").steps == launch.executed == 4
    assert [step.kind for step in launch.programs[0].steps].count("atomic") == 1


def test_elements_are_numbered_in_the_order_of_a_tensors_own_shape():
    memory = torch.arange(24.0)
    for tensor in (memory.view(4, 6), memory.view(4, 6).T, memory.view(2, 3, 4)[:, 1:, ::2], memory[5]):
        region = Region.of("x", tensor, tensor.shape, tensor.stride())
        addresses = memory.data_ptr() + 4 * tensor.flatten().numpy().astype(np.uint64)
        assert region.elements_at(addresses).tolist() == list(range(tensor.numel()))
        others = sorted({*range(24)} - {*map(int, tensor.flatten())})
        assert (region.elements_at(memory.data_ptr() + 4 * np.array(others, np.uint64)) < 0).all()
    expanded = memory[:8].view(2, 4).expand(3, 2, 4)
    assert Region.of("x", expanded, expanded.shape, expanded.stride()).shape == (2, 4)
    windows = memory.unfold(0, 4, 1)
    assert Region.of("x", windows, windows.shape, windows.stride()).shape == (24,)


@triton.jit
def packed_kernel(codes_ptr, out_ptr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    words = tl.load(codes_ptr.to(tl.pointer_type(tl.int32)) + place)
    tl.store(out_ptr + place, words)


def test_a_load_of_words_from_bytes_touches_every_byte():
    def copy(x):
        codes, out = torch.zeros(64, dtype=torch.int8), torch.empty(16, dtype=torch.int32)
        packed_kernel[(1,)](codes, out, BLOCK=16)
        return x.clone()

    recording = record_mine(ops.copy, copy, (8,))
    found = count(recording, "codes_ptr", "load")
    assert (found.asked, found.distinct, found.times) == (64, 64, 1.0)
