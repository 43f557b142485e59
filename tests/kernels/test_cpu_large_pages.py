"""Memory in large pages, where it lies: the pages that tensors touch, numbers that stay, and systems that have no such pages."""

import platform
import re
import sys
from pathlib import Path

import pytest
import torch

from tilestack.kernels.cpu import large_pages
from tilestack.kernels.cpu.large_pages import PAGE, use_large_pages, whole_pages


def large_bytes(address):
    """Bytes in large pages of the mapping that an address lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    return 0


def test_whole_pages_cover_spans_once():
    far = 100 * PAGE
    assert whole_pages([(far + 5, far + 6), (PAGE - 1, PAGE + 1), (3, 4), (2 * PAGE + 7, 3 * PAGE)]) == [
        (0, 3 * PAGE),
        (far, far + PAGE),
    ]
    assert whole_pages([(0, 9 * PAGE), (PAGE, 2 * PAGE)]) == [(0, 9 * PAGE)]
    assert whole_pages([]) == []


def gives_large_pages():
    """Whether Linux has them and puts memory into them when asked, which it does since 6.1."""
    version = [*map(int, re.findall(r"\d+", platform.release())[:2])]
    return sys.platform == "linux" and Path("/sys/kernel/mm/transparent_hugepage").exists() and version >= [6, 1]


@pytest.mark.skipif(
    not gives_large_pages(), reason="this system has no large pages to be had for memory that is in use"
)
@pytest.mark.parametrize("parts", [1, 40])
def test_numbers_and_addresses_stay_and_pages_become_large(parts):
    numbers = torch.arange(16 << 20, dtype=torch.int32)
    tensors = [part.clone() for part in numbers.chunk(parts)]
    addresses = [each.data_ptr() for each in tensors]
    use_large_pages(tensors)
    for tensor in tensors:
        assert large_bytes(tensor.data_ptr()) >= tensor.nbytes - 2 * PAGE
    assert [each.data_ptr() for each in tensors] == addresses
    assert torch.equal(torch.cat(tensors), numbers)


def test_little_memory_and_other_systems_are_left_alone(monkeypatch):
    def no_call(*args):
        raise AssertionError("nothing should have been asked")

    monkeypatch.setattr(large_pages.ctypes, "CDLL", no_call)
    use_large_pages([torch.zeros(1000), torch.zeros(0)])
    monkeypatch.setattr(large_pages.sys, "platform", "darwin")
    use_large_pages([torch.zeros(16 << 20)])


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="not Linux")
def test_memory_that_is_no_longer_there_is_no_error():
    gone = type("Gone", (), dict(nbytes=64 << 20, data_ptr=lambda self: 16 * PAGE))()  # nothing is mapped so low
    use_large_pages([gone])
