"""What every test stands on: Triton's interpreter where there is no GPU, one thread each, and registries left as found."""

import os
import random
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy
import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported, so before any test is
torch.set_num_threads(1)  # pytest-xdist has a process for every core already
os.environ["OMP_NUM_THREADS"] = "1"  # nor more in the processes that tests start

from tilestack import ops  # noqa: E402
from tilestack.contract import backends, registry  # noqa: E402
from tilestack.lab.proof.oracle import judge, own_error  # noqa: E402

with suppress(ImportError):  # the tests that need it say so
    from hypothesis import HealthCheck, settings

    settings.register_profile("busy", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")  # a machine with other things to do; and the same examples on all

needs_gpu = pytest.mark.skip(reason="there is no CUDA GPU here")


def pytest_configure():
    """Say at once, rather than after all other tests, that two files of tests share a name."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    if shared := [name for name, files in names.items() if files > 1]:
        raise pytest.UsageError(f"several files of tests are called {', '.join(shared)}; give each a name of its own")


def pytest_collection_modifyitems(items):
    for item in items:
        if not GPU and "gpu" in item.path.relative_to(item.config.rootpath / "tests").parts[:-1]:
            item.add_marker(needs_gpu)
    items.sort(
        key=lambda item: item.get_closest_marker("slow") is None
    )  # else one process may wait for another's last test


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """The same numbers for a test whichever ran before it in its process; before its fixtures, which draw too."""
    random.seed(0)
    numpy.random.seed(0)
    torch.default_generator.manual_seed(0)
    if GPU:
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def choices_of_commands():
    """Undoes what commands decide about backends and about looking at values: they own their process, and a test does not."""
    before = backends._configured
    yield
    if backends._values_checked is not None:
        backends.check_values(None)
    if backends._configured != before:
        backends._configured = before
        registry.forget_plans()


@pytest.fixture
def outside():
    """Undoes what a test registers or configures: operators, implementations, backends' needs, and choices."""
    ops.operators()
    before = dict(registry._operators), dict(backends._needs), backends._configured
    implementations = {name: dict(described.implementations) for name, described in before[0].items()}
    yield
    registry._operators.clear()
    registry._operators.update(before[0])
    backends._needs.clear()
    backends._needs.update(before[1])
    backends._configured = before[2]
    backends._environment.cache_clear()
    for name, described in registry._operators.items():
        described.implementations.clear()
        described.implementations.update(implementations[name])
    registry.forget_plans()


@pytest.fixture
def as_good_as():
    """Checks that our result is as good as PyTorch's, given the truth: PyTorch's modules take the definition's part."""

    def check(*results):
        ours, theirs, truth = (result.detach() for result in results)
        assert not (message := judge(ours, theirs, truth, own_error(theirs, truth)).message), message

    return check


@pytest.fixture
def browse(tmp_path):
    """Opens pages in headless Chromium, each in a browser of its own."""
    from browser import Browser, chromium

    if chromium() is None:
        pytest.skip("there is no Chromium here: apt-get install chromium, or put google-chrome on the PATH")
    opened = []

    def start(url, **about):
        opened.append(Browser(tmp_path / f"browser-{len(opened)}", **about))
        opened[-1].open(url)
        return opened[-1]

    yield start
    for browser in opened:
        browser.close()
