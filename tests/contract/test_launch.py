"""The remembered launch: what is part of a signature, what reaches Triton's launcher, and errors for people."""

import inspect
from types import SimpleNamespace

import pytest
import torch

from tilestack.contract import launch as launcher
from tilestack.contract.descriptors import Tile
from tilestack.contract.launch import launch
from tilestack.kernels.tiles import cdiv, next_power


class OnGpu:
    """As much of a CUDA tensor as a launch looks at."""

    is_cuda = True

    def __init__(self, address, dtype=torch.float32):
        self.address, self.dtype = address, dtype

    def data_ptr(self):
        return self.address

    def get_device(self):
        return 0


class Kernel:
    """A compiled kernel(x_ptr, mask_ptr, n, eps, BLOCK) whose C launcher, of either age of Triton, notes what it is given."""

    __name__ = "kernel"
    arg_names = ("x_ptr", "mask_ptr", "n", "eps", "BLOCK")
    params = tuple(SimpleNamespace(name=name, is_constexpr=name == "BLOCK") for name in arg_names)

    def __init__(self, scratch=0, **age):
        self.ordinary, self.wrapped, self.direct = [], [], []
        attributes = dict(
            launch=lambda *values: self.direct.append(values),
            launch_cooperative_grid=False,
            launch_pdl=False,
            global_scratch_size=scratch,
            profile_scratch_size=0,
            __call__=lambda run, *values: self.wrapped.append(values),
        )
        run = type("Launcher", (), attributes | age)
        run.launch = staticmethod(run.launch)
        self.compiled = SimpleNamespace(run=run(), function=99, packed_metadata=(4, 1, 0))

    def __getitem__(self, grid):
        def run(*arguments, **constants):
            self.ordinary.append((grid, arguments, constants))
            return self.compiled

        return run


@pytest.fixture(autouse=True)
def device(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(launcher, "_launchers", {})
    for remembered in (launcher._compiled, launcher._by_values):
        remembered.clear()
    yield
    for remembered in (launcher._compiled, launcher._by_values):
        remembered.clear()


def test_a_constant_may_be_none():
    kernel = Kernel()
    for _ in range(2):
        launch(kernel, (1,), OnGpu(64), None, 5, 0.5, BLOCK=None, num_warps=None)
    assert kernel.ordinary == [((1,), kernel.ordinary[0][1], dict(BLOCK=None))]
    assert kernel.direct


def test_the_second_launch_goes_straight_to_the_c_launcher():
    kernel = Kernel()
    for address in (16, 32, 160):
        launch(kernel, (3, 2), OnGpu(address), None, 5, 0.5, BLOCK=64, num_warps=4)
    assert [constants for _, _, constants in kernel.ordinary] == [dict(BLOCK=64, num_warps=4)]
    head = 7, 99, False, False, None, None, (4, 1, 0), None, None, None
    assert kernel.direct == [(3, 2, 1, *head, 32, 0, 5, 0.5, 64), (3, 2, 1, *head, 160, 0, 5, 0.5, 64)]


def test_newer_launchers_take_the_values_in_one_tuple():
    kernel = Kernel(arg_annotations="kinds", kernel_signature=b"types")
    for _ in range(2):
        launch(kernel, (3,), OnGpu(16), OnGpu(48, torch.int8), 5, 0.5, BLOCK=64)
    given = 3, 1, 1, 7, 99, False, False, (4, 1, 0), None, None, None, None, None, "kinds", b"types"
    assert kernel.direct == [(*given, (16, 48, 5, 0.5, 64))]


def test_a_kernel_that_needs_scratch_memory_keeps_tritons_wrapper():
    kernel = Kernel(scratch=8)
    for _ in range(2):
        launch(kernel, (3,), OnGpu(16), None, 5, 0.5, BLOCK=64)
    assert kernel.wrapped == [(3, 1, 1, 7, 99, (4, 1, 0), None, None, None, 16, 0, 5, 0.5, 64)]
    assert not kernel.direct


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((OnGpu(24), None, 5, 0.5), dict(BLOCK=64)),  # starts off 16 bytes
        ((OnGpu(16, torch.float64), None, 5, 0.5), dict(BLOCK=64)),
        ((OnGpu(16), OnGpu(16), 5, 0.5), dict(BLOCK=64)),
        ((OnGpu(16), None, 16, 0.5), dict(BLOCK=64)),  # a multiple of 16
        ((OnGpu(16), None, 1, 0.5), dict(BLOCK=64)),
        ((OnGpu(16), None, 2**31 + 1, 0.5), dict(BLOCK=64)),  # 64 bits wide
        ((OnGpu(16), None, True, 0.5), dict(BLOCK=64)),
        ((OnGpu(16), None, 5, 1), dict(BLOCK=64)),  # an integer where a float was
        ((OnGpu(16), None, 5, 0.5), dict(BLOCK=32)),
        ((OnGpu(16), None, 5, 0.5), dict(BLOCK=64, num_warps=8)),
    ],
)
def test_what_triton_specialises_on_is_compiled_again(arguments, options):
    kernel = Kernel()
    launch(kernel, (1,), OnGpu(16), None, 5, 0.5, BLOCK=64)
    launch(kernel, (1,), *arguments, **options)
    assert len(kernel.ordinary) == 2


def test_a_float_and_the_grid_are_no_part_of_a_signature():
    kernel = Kernel()
    for grid, eps in (((1,), 0.5), ((4,), 0.5), ((4, 4), 0.25)):
        launch(kernel, grid, OnGpu(16), None, 5, eps, BLOCK=64)
    assert len(kernel.ordinary) == 1


def test_which_of_two_tensors_starts_off_16_bytes_matters():
    kernel = Kernel()
    launch(kernel, (1,), OnGpu(24), OnGpu(16), 5, 0.5, BLOCK=64)
    launch(kernel, (1,), OnGpu(16), OnGpu(24), 5, 0.5, BLOCK=64)
    assert len(kernel.ordinary) == 2


def test_a_tensor_must_be_named_as_a_pointer():
    with pytest.raises(TypeError, match="takes a tensor as n; name it n_ptr"):
        launch(Kernel(), (1,), OnGpu(16), None, torch.ones(1), 0.5, BLOCK=64)


def test_an_empty_grid_launches_nothing():
    kernel = Kernel()
    launch(kernel, (0, 3), OnGpu(16), None, 0, 0.5, BLOCK=64)
    assert not kernel.ordinary


def test_whole_numbers():
    assert [cdiv(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [next_power(n) for n in (0, 1, 2, 3, 4, 5, 1024, 1025)] == [1, 1, 2, 4, 4, 8, 1024, 2048]


def test_sizes_alike_to_triton_share_what_was_compiled():
    kernel = Kernel()
    for n in (5, 6, 7, 99, 2**30 + 1):
        launch(kernel, (1,), OnGpu(16), None, n, 0.5, BLOCK=64)
    assert len(kernel.ordinary) == 1
    assert [values[-3] for values in kernel.direct] == [6, 7, 99, 2**30 + 1]


def real_launcher(**attributes):
    """The launcher class of the Triton that is installed, around a C function that notes what it is given."""
    from triton.backends.nvidia.driver import CudaLauncher

    given = []
    made = object.__new__(CudaLauncher)
    vars(made).update(
        dict(
            launch=lambda *values: given.append(values),
            arg_annotations="annotations",
            kernel_signature=b"signature",
            num_ctas=1,
            global_scratch_size=0,
            global_scratch_align=1,
            profile_scratch_size=0,
            profile_scratch_align=1,
            launch_cooperative_grid=False,
            launch_pdl=True,
        )
        | attributes
    )
    if not inspect.signature(CudaLauncher.__call__).parameters.keys() & {"kernel_metadata"}:
        del made.arg_annotations, made.kernel_signature  # before Triton 3.7 there were none
    return made, given


def test_ours_hands_on_what_the_installed_launcher_does():
    run, given = real_launcher()
    run(3, 2, 1, 7, 99, ("metadata",), None, None, None, 16, 32, 5, 0.5, 64)
    compiled = SimpleNamespace(run=run, function=99, packed_metadata=("metadata",))
    launcher.ready_to_run(compiled, (64,))(3, 2, 1, 7, 16, 32, 5, 0.5)
    assert len(given) == 2
    assert given[0] == given[1]


def test_descriptors_are_encoded_once_for_an_address_and_handed_on_as_tritons_own_are(monkeypatch):
    from triton.backends.nvidia import driver

    encoded = []
    monkeypatch.setattr(driver, "make_tensordesc_arg", lambda arg, meta: encoded.append(arg.base.data_ptr()) or [
        ("map", arg.base.data_ptr(), meta["swizzle"], arg.padding), *arg.shape, *arg.strides
    ])  # fmt: skip
    plain, given = real_launcher()
    metas = [dict(swizzle=3), dict(swizzle=2)]
    signature = dict(q_desc="tensordesc<fp16[64,64]>", out_ptr="*fp16", k_desc="tensordesc<fp16[64,64]>", n="i32")
    wrapped = driver.wrap_handle_tensordesc(plain.launch, signature, metas)
    run, _ = real_launcher(launch=wrapped)
    q, k = (SimpleNamespace(base=OnGpu(a), shape=[128, 64], strides=[64, 1], padding="zero", round_f32_to_tf32=False) for a in (64, 128))  # fmt: skip
    run(3, 1, 1, 7, 99, ("metadata",), None, None, None, q, 16, k, 5)
    tiles = [Tile(OnGpu(a), (128, 64), (64, 1), (64, 64)) for a in (64, 128)]
    ours = launcher.ready_to_run(SimpleNamespace(run=run, function=99, packed_metadata=("metadata",)), (), tiles)
    encoded.clear()
    for _ in range(3):
        first, second = (e(t.tensor.data_ptr(), t.shape, t.strides) for e, t in zip(ours.encoders, tiles, strict=True))
        ours(3, 1, 1, 7, *first, 16, *second, 5)
    assert encoded == [64, 128]
    assert [[*map(as_list, values)] for values in given[1:]] == [[*map(as_list, given[0])]] * 3


def as_list(value):
    return list(value) if isinstance(value, tuple | list) else value


def test_an_unknown_launcher_is_called_as_triton_calls_it():
    called = []
    compiled = SimpleNamespace(run=lambda *values: called.append(values), function=99, packed_metadata=("metadata",))
    launcher.ready_to_run(compiled, (64,))(3, 2, 1, 7, 16, 5)
    assert called == [(3, 2, 1, 7, 99, ("metadata",), None, None, None, 16, 5, 64)]


def test_a_tile_must_be_named_as_a_descriptor():
    with pytest.raises(TypeError, match="takes a tile as n; name it n_desc"):
        launch(Kernel(), (1,), OnGpu(16), None, Tile(OnGpu(16), (4,), (1,), (4,)), 0.5, BLOCK=64)


def test_another_current_device_is_left_for_the_launch_and_found_again(monkeypatch):
    entered = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or torch.no_grad())
    kernel = Kernel()
    launch(kernel, (1,), OnGpu(16), None, 5, 0.5, BLOCK=64)
    launch(kernel, (1,), OnGpu(16), None, 5, 0.5, BLOCK=64)
    assert entered == [0], "to compile; then it is the current one"
    other = Kernel()
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1)
    for _ in range(2):
        launch(other, (1,), OnGpu(16), None, 5, 0.5, BLOCK=64)
    assert entered == [0, 0, 0]


def test_true_and_false_are_told_apart():
    kernel = Kernel()
    for n in (True, False, True):
        launch(kernel, (1,), OnGpu(16), None, n, 0.5, BLOCK=64)
    assert [values[-3] for values in kernel.direct] == [False, True][-len(kernel.direct) :]
    assert len(launcher._by_values) == 2


class MovesTiles:
    """A kernel(x_desc, out_ptr) whose Triton encodes descriptors in a way we do not know."""

    __name__ = "moves_tiles"
    arg_names = ("x_desc", "out_ptr")
    params = tuple(SimpleNamespace(name=name, is_constexpr=False) for name in arg_names)

    def __init__(self):
        self.compiled_for, self.given = [], []

    def __getitem__(self, grid):
        def run(x, out):
            self.compiled_for.append(tuple(x.block_shape))
            return SimpleNamespace(run=lambda *values: self.given.append(values), function=0, packed_metadata=None)

        return run


def test_a_tile_of_another_block_is_compiled_again_and_one_of_another_shape_encoded_again(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: 0)
    kernel, x, out = MovesTiles(), torch.randn(16, 16), OnGpu(16)
    block = lambda shape, size: Tile(x, shape, (shape[1], 1), size)
    for tile in (block((16, 16), (8, 8)), block((16, 16), (4, 8)), block((8, 32), (8, 8)), block((16, 16), (8, 8))):
        launch(kernel, (1,), tile, out)
    assert kernel.compiled_for == [(8, 8), (4, 8)]
    assert [list(values[-2].shape) for values in kernel.given] == [[8, 32], [16, 16]]


def test_noting_ends_with_its_block_even_in_an_error():
    from triton import knobs

    hooks = list(knobs.runtime.launch_enter_hook.calls)
    for fails in (False, True):
        try:
            with launcher.noting([]):
                assert launcher.notes
                assert not fails
        except AssertionError:
            assert fails
        assert not launcher.notes
        assert list(knobs.runtime.launch_enter_hook.calls) == hooks
