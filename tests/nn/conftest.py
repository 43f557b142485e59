"""The bound of these tests: PyTorch's own error against float64 decides how far a result of ours may be off."""

import pytest

from tilestack.lab.oracle import judge, own_error


@pytest.fixture
def as_good_as():
    """Checks that our result is as good as PyTorch's, given the truth: PyTorch's modules take the definition's part."""

    def check(*results):
        ours, theirs, truth = (result.detach() for result in results)
        assert not (message := judge(ours, theirs, truth, own_error(theirs, truth)).message), message

    return check
