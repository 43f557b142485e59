"""Kernels compiled ahead, many at once, are those that launches want: none is compiled again, and one that cannot be compiled
is left to its launch without harm to the others."""

import pytest

FILE = "tests/compile/ahead_kernels.py"
PLANTED = "sound_kernel", "broken_kernel", "deadly_kernel", "nameless_kernel"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("triton")


@pytest.fixture(scope="module")
def ahead(uninterpreted, cache):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(cache))
        return uninterpreted(FILE, "ahead"), uninterpreted(FILE, "again")


def test_listing_compiles_and_launches_nothing(ahead):
    first, _ = ahead
    assert first["launched"] == first["compiled"] == 0
    names = {name for name, _ in first["listed"]}
    assert {*PLANTED, "matmul_hopper_kernel", "norm_fwd_kernel"} <= names
    assert [name for name, digest in first["listed"] if not digest] == ["nameless_kernel"]
    assert len({digest for _, digest in first["listed"]}) == len(first["listed"]) == first["found"]


def test_what_is_listed_is_what_a_launch_compiles_and_is_compiled_by_then(ahead):
    first, again = ahead
    assert again["compiled"] == []
    assert again["launched"] == sorted(digest for name, digest in first["listed"] if name not in PLANTED)


def test_each_kernel_is_told_of(ahead):
    first, _ = ahead
    count = len(first["listed"])
    assert first["told"] == [[done, count] for done in range(1, count + 1)]


def test_what_cannot_be_compiled_stops_nothing_else(ahead):
    first, _ = ahead
    assert list(first["left"]) == ["broken_kernel", "deadly_kernel", "nameless_kernel"]
    broken, deadly, nameless = first["problems"]
    assert "planted" in broken
    assert deadly == "the compiler ended with -9"
    assert "Unsupported function" in nameless


ENDING = """
import json, signal, sys
from tilestack.ahead import pool
process = pool.start(2)
if sys.argv[1] == "interrupted":
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    def interrupt(*_): raise KeyboardInterrupt
    signal.signal(signal.SIGALRM, interrupt)
    missing = [pool.Wanted("nowhere", "kernel", ("cuda", 90, 32), "", "")]
    try:
        pool.compile_all(missing, 2)
        ended = "no"
    except KeyboardInterrupt:
        ended = "interrupted"
else:
    process.stdin.close()  # as when we die
    ended = "closed"
    process.wait(60)
print(json.dumps([ended, process.poll() is not None]))
"""


@pytest.mark.parametrize("how", ["interrupted", "closed"])
def test_the_process_ends_with_whoever_asked(uninterpreted, how):
    assert uninterpreted("-c", ENDING, how) == [how, True]
