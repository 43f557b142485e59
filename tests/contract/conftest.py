"""Both ways in which a call that wants a gradient meets autograd: in Python, and in C++ where that can be built."""

import functools

import pytest

from tilestack.contract import autograd, registry
from tilestack.contract.native import build


@functools.cache
def built_node():
    """The C++ module, built if need be, or the reason why it cannot be."""
    try:
        return build.load(build.build_node())
    except build.NodeBuildError as reason:
        return str(reason)


@pytest.fixture
def node():
    found = built_node()
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.fixture(params=["Python", "C++"])
def each_node(request, monkeypatch):
    found = request.getfixturevalue("node") if request.param == "C++" else None
    monkeypatch.setattr(autograd, "native_node", lambda: found)
    registry.forget_plans()
    yield request.param
    registry.forget_plans()
