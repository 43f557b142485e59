"""Listing on what says it is a GPU: launches are passed over once and for all, and nothing of it stays."""

import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from triton import knobs

from tilestack.ahead import pool
from tilestack.ahead.listing import Listing
from tilestack.contract import launch as launching
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line


class OnGpu(torch.Tensor):
    """A tensor on the host that says it is on a GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cuda = True

    def get_device(self):
        return 0


class Kernel:
    """A kernel(x_ptr, n, BLOCK) that adds n to what it is launched on; Triton asks its hook before it compiles it."""

    __name__ = "kernel"
    arg_names = ("x_ptr", "n", "BLOCK")
    params = tuple(SimpleNamespace(name=name, is_constexpr=name == "BLOCK") for name in arg_names)

    def __init__(self):
        self.asked = []

    def warmup(self, *arguments, grid, **options):
        self.asked.append((grid, arguments[1], options))

    def __getitem__(self, grid):
        def run(x, n, BLOCK):
            x.add_(n)
            launcher = SimpleNamespace(launch=None, global_scratch_size=0)
            return SimpleNamespace(run=launcher, function=None, packed_metadata=None)

        return run


@pytest.fixture(autouse=True)
def device(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(launching, "_launchers", {})
    monkeypatch.setattr(launching, "_by_values", {})
    monkeypatch.setattr(launching, "_compiled", {})


def on_gpu(*shape):
    return torch.zeros(*shape).as_subclass(OnGpu)


def test_triton_is_asked_once_for_each_kind_of_launch_and_nothing_stays():
    kernel, x, hook = Kernel(), on_gpu(64), knobs.runtime.jit_cache_hook
    with Listing():
        for n in (3, 5, 16):  # the last of them is a multiple of 16, for which Triton compiles anew
            launch(kernel, (4,), x, n, BLOCK=64, num_warps=None)
        launch(kernel, (4,), x, 3, BLOCK=32)
    assert kernel.asked == [((4,), 3, dict(BLOCK=64)), ((4,), 16, dict(BLOCK=64)), ((4,), 3, dict(BLOCK=32))]
    assert not x.any()
    assert not launching._launchers
    assert not launching._by_values
    assert not launching._compiled
    assert not launching.notes
    assert knobs.runtime.jit_cache_hook is hook
    launch(kernel, (4,), x, 3, BLOCK=64)
    assert (x == 3).all()


def test_a_kernel_that_was_launched_before_is_passed_over_too():
    kernel, x = Kernel(), on_gpu(64)
    launch(kernel, (4,), x, 3, BLOCK=64)
    with Listing():
        launch(kernel, (4,), x, 3, BLOCK=64)
    assert (x == 3).all()
    assert len(kernel.asked) == 1


def test_launches_of_other_threads_are_made():
    kernel, x = Kernel(), on_gpu(64)
    with Listing():
        other = threading.Thread(target=launch, args=(kernel, (4,), x, 3), kwargs=dict(BLOCK=64))
        other.start()
        other.join()
        kept, _ = launching._launchers[id(kernel)]
    assert (x == 3).all()
    kept((4,), x, 16, BLOCK=64)  # by one who found it then and uses it now
    assert (x == 19).all()
    assert not kernel.asked


def test_new_memory_is_zeros():
    with Listing():
        made = [torch.empty(1 << 12), torch.empty(3, 5).new_empty(1 << 12), torch.empty_like(torch.ones(1 << 12))]
    assert not any(each.any() for each in made)


def test_calls_are_not_repeated_from_what_was_passed_over():
    kernel, kept = Kernel(), []
    call = straight_line(lambda x: launch(kernel, (4,), x, 3, BLOCK=64), kept.append)
    x = on_gpu(64)
    with Listing():
        for _ in range(3):
            call(x)
    assert not kept
    assert not x.any()


def test_a_call_that_fails_ends_the_list_but_no_more(monkeypatch):
    kernel = Kernel()

    def failing():
        raise RuntimeError("of what nobody computed")

    calls = [lambda: launch(kernel, (4,), on_gpu(64), 3, BLOCK=64), failing, lambda: pytest.fail("not reached")]
    assert pool.list_missing(calls, lambda so_far: None) == []
    assert len(kernel.asked) == 1
    assert not launching.notes


def test_nothing_stays_of_a_list_that_is_broken_off():
    hook = knobs.runtime.jit_cache_hook
    for _ in range(2):  # the second waits for nobody
        with pytest.raises(KeyboardInterrupt), Listing():
            raise KeyboardInterrupt
    assert knobs.runtime.jit_cache_hook is hook
    assert not launching.notes


def test_a_kernel_is_listed_for_each_device_and_once():
    targets = [SimpleNamespace(backend="cuda", arch=arch, warp_size=32) for arch in (80, 90)]
    kernel = SimpleNamespace(
        __name__="kernel", hash="", device_caches={n: (None, None, each) for n, each in enumerate(targets)}
    )
    function = SimpleNamespace(jit_function=kernel, module="module", name="kernel")
    told = []
    with Listing(told.append) as listed:
        for device in (0, 1, 0):
            about = dict(device=device, specialization_data="{}")
            assert knobs.runtime.jit_cache_hook(key="a", fn=function, compile=about)
    assert [wanted.target for wanted in listed.missing] == [("cuda", 80, 32), ("cuda", 90, 32)]
    assert told == listed.missing


@pytest.mark.parametrize("count", [pool.FEW - 1, pool.FEW])
def test_few_kernels_are_left_to_their_launches(monkeypatch, count):
    compiled, told = [], lambda done, all: None
    monkeypatch.setattr(pool, "possible", lambda: True)
    monkeypatch.setattr(pool, "jobs_allowed", lambda: 2)
    monkeypatch.setattr(pool, "list_missing", lambda calls, count_them: wanted(count))
    monkeypatch.setattr(pool, "compile_all", lambda *given: compiled.append(given))
    assert pool.compile_ahead([], told) == count
    assert compiled == ([(wanted(count), 2, told)] if count == pool.FEW else [])


def test_the_process_that_compiles_is_shown_no_gpu(monkeypatch):
    asked = []
    monkeypatch.setattr(pool, "_process", None)
    monkeypatch.setattr(pool, "at_exit", lambda: None)
    monkeypatch.setattr(subprocess, "Popen", lambda command, **how: asked.append(how["env"]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    pool.start(2)
    assert asked[0]["CUDA_VISIBLE_DEVICES"] == ""
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_where_the_first_calls_lack_nothing_no_more_are_looked_at():
    made = []
    pool.list_missing([lambda: made.append(1)] * 100, lambda so_far: None)
    assert len(made) == pool.SAMPLES


@pytest.mark.parametrize("program", ["", "print('{\"number\": 0')"])
def test_a_process_that_dies_or_answers_nonsense_compiles_nothing_and_is_forgotten(monkeypatch, program):
    start = lambda jobs: subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1, text=True)
    monkeypatch.setattr(pool, "start", start)
    wanted = pool.Wanted("module", "kernel", ("cuda", 90, 32), "{}", "")
    assert pool.compile_all([wanted] * 2, 2) == ["not compiled"] * 2


REFUSING = """
import json, sys
for line in sys.stdin:
    print(json.dumps(dict(number=json.loads(line)["number"], problem="no" * 200)), flush=True)
"""


@pytest.fixture
def refusing(monkeypatch):
    """A process that answers every question at once, and at length."""
    command = [sys.executable, "-c", REFUSING]
    process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True, start_new_session=True)
    monkeypatch.setattr(pool, "_process", process)
    yield process
    process.kill()
    process.wait()


def wanted(count):
    return [pool.Wanted("module", "kernel", ("cuda", 90, 32), "x" * 1000, "")] * count


def test_more_questions_and_answers_than_pipes_hold_come_through(refusing):
    found = []
    asking = threading.Thread(target=lambda: found.extend(pool.compile_all(wanted(1000), 2)), daemon=True)
    asking.start()
    asking.join(60)
    assert found == ["no" * 200] * 1000


def test_every_thread_gets_its_own_answers(refusing):
    told = {count: [] for count in (200, 300)}
    ask = lambda count: pool.compile_all(wanted(count), 2, lambda done, all: told[count].append((done, all)))
    threads = [threading.Thread(target=ask, args=(count,), daemon=True) for count in told]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert told == {count: [(done, count) for done in range(1, count + 1)] for count in told}
    assert refusing.poll() is None  # nobody had to end it


def test_a_fork_leaves_the_process_to_the_one_that_started_it(refusing):
    pool.at_exit()
    if (child := os.fork()) == 0:
        os._exit(0 if pool._process is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pool._process is refusing


def test_the_environment_says_how_many_processes(monkeypatch):
    assert 1 <= pool.jobs_allowed() <= pool.MOST_JOBS
    monkeypatch.setenv(pool.JOBS_VARIABLE, "5")
    assert pool.jobs_allowed() == 5
    monkeypatch.setenv(pool.JOBS_VARIABLE, "1")
    assert pool.compile_ahead([lambda: pytest.fail("not looked at")]) == 0
    monkeypatch.setenv(pool.JOBS_VARIABLE, "many")
    with pytest.raises(ValueError, match="TILESTACK_COMPILE_JOBS is a number of processes, not 'many'"):
        pool.jobs_allowed()
