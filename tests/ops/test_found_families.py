"""Families are found, not listed: the package exports every operator its files define, and the stub says the same."""

from tilestack import ops
from tilestack.lab import catalogue


def test_every_operator_of_a_family_is_exported():
    inside = [op.name for op in ops.operators() if op.__module__.startswith("tilestack.ops.")]
    assert len(inside) > 50
    assert sorted([*inside, "operator_named", "operators"]) == ops.__all__
    assert all(getattr(ops, name) is ops.operator_named(name) for name in inside)


def test_the_stub_is_what_make_docs_would_write():
    assert catalogue.STUB.read_text() == catalogue.stub(), "run `make docs`"
