"""What people read for a case of a result, its label, found by operator and name; and for a dtype."""

import functools
import re
from collections import Counter

import torch

from tilestack.contract.registry import operators


def case_label(op: str, case: str) -> str:
    """A case in words; one that no operator has, an optimizer's or an older one, is its name with × between sizes."""
    return labels_of(op).get(case) or re.sub(r"(?<=\d)x(?=\d)", "×", case)


@functools.cache
def labels_of(op: str) -> dict[str, str]:
    """The label of every case of an operator by name; of cases with the same words, the name beside them."""
    operator = next((found for found in operators() if found.name == op), None)
    labels = {case.name: case.label for case in operator.cases} if operator else {}
    counted = Counter(labels.values())
    return {name: label if counted[label] == 1 else f"{label} ({name})" for name, label in labels.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """As results have it: bfloat16, without the library's name."""
    return str(dtype).removeprefix("torch.")
