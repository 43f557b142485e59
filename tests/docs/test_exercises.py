"""The exercises of docs/learn.md can be solved, and the command that checks them finds what the page says people do wrong."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from run_page import REPOSITORY

from tilestack.lab.verify import Proof, prove
from tilestack.lab.workers import Task, load_files

SOLVED = Path(__file__).with_name("exercises_solved.py")
EXERCISES = [
    ("relu", "mine"),
    ("transpose", "mine"),
    ("softmax", "mine"),
    ("softmax", "mine_long"),
    ("linear", "mine"),
    ("attention", "mine"),
]


def proofs(operator: str, backend: str, every_variant: bool = False) -> Iterator[Proof]:
    """What `verify --device cpu --dtype float32` tries; with --quick unless every variant is wanted."""
    task = Task(operator, torch.float32, torch.device("cpu"), backend, every_variant=every_variant)
    return map(prove, task.claims())


def test_the_page_asks_for_what_is_solved():
    page = (REPOSITORY / "docs" / "learn.md").read_text(encoding="utf-8")
    asked = re.findall(r"^\| \d \| (?:`(\w+)\(|the same)", page, re.MULTILINE)
    assert [name or "softmax" for name in asked] == [operator for operator, _ in EXERCISES]


@pytest.mark.parametrize(("operator", "backend"), EXERCISES)
def test_a_solution_passes(outside, operator, backend):
    load_files([SOLVED])
    found = list(proofs(operator, backend))
    assert [proof for proof in found if proof.ok is False] == []
    assert sum(proof.ok is True for proof in found) >= 4


@pytest.mark.parametrize(
    ("operator", "backend", "right", "wrong"),
    [
        ("relu", "mine", "tl.where(x < 0, 0.0, x)", "tl.maximum(x, 0.0)"),
        ("transpose", "mine", "mask=tl.trans(inside)", "mask=inside"),
        ("transpose", "mine", "x_ptr + matrix +", "x_ptr +"),
        ("softmax", "mine", 'other=-float("inf")', "other=0.0"),
        ("softmax", "mine_long", "total * tl.exp(top - higher)", "total"),
        ("linear", "mine", "weight_ptr + n[None, :] * K + k[:, None]", "weight_ptr + k[:, None] * N + n[None, :]"),
        ("attention", "mine", "query[:, None] + keys - queries", "query[:, None]"),
    ],
)
def test_what_people_stumble_over_is_found(outside, tmp_path, operator, backend, right, wrong):
    source = SOLVED.read_text(encoding="utf-8")
    assert right in source
    stumbled = tmp_path / "mine.py"
    stumbled.write_text(source.replace(right, wrong), encoding="utf-8")
    load_files([stumbled])
    assert any(proof.ok is False for proof in proofs(operator, backend, every_variant=operator == "relu"))
