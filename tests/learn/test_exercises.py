"""Every exercise can be solved, is not solved as it is given, and its mistakes are recognised when somebody makes them."""

import ast
import re
from pathlib import Path

import pytest

from tilestack.lab.proof.workers import load_file
from tilestack.learn.exercise import EXERCISES, SOURCES
from tilestack.learn.folder import State
from tilestack.learn.grading import grade

X_INF = 'x = tl.load(x_ptr + row * columns + column, mask=column < columns, other=-float("inf")).to(tl.float32)'
# What somebody may write instead of the solution, and a part of what the tutor then says.
PLANTED = [
    ("add", "x + y, mask", "x, mask", "only x is stored"),
    ("add", "x + y, mask", "x * y, mask", "the two are multiplied"),
    ("add", "x + y, mask", "x - y, mask", "the second is subtracted"),
    ("add", "offsets < n", "offsets < n - 1", "Nothing was written"),
    ("add", "tl.program_id(0).to(tl.int64) * BLOCK + ", "", "one program's share"),
    ("add", "return grad, grad", "return grad, 2 * grad", "Every element is 2 times the right one"),
    ("relu", "tl.where(x < 0, 0.0, x)", "x", "nothing is set to zero"),
    ("relu", "tl.where(out <= 0, 0.0, grad)", "grad", "nothing is set to zero"),
    ("relu", "tl.where(x < 0, 0.0, x)", "tl.where(x < 0, x, 0.0)", "the negative numbers are kept"),
    ("mend_copy", "offsets < n", "offsets <= n", "A `tl.load` touches memory outside its tensor"),
    ("mend_copy", "x, mask=inside)", "x, mask=offsets < n + 1)", "A `tl.store` goes outside the result"),
    ("mend_copy", "tl.store(out_ptr", "tl.store(x_ptr", "Nothing was written"),
    ("transpose", "x_ptr + matrix +", "x_ptr +", "every program reads the first matrix"),
    ("transpose", "column[:, None] * rows + row[None, :], tl.trans(tile), mask=tl.trans(inside)",
     "row[:, None] * columns + column[None, :], tile, mask=inside", "the elements keep their order in memory"),
    ("embedding", 'other=float("nan")', "other=0.0", "an id outside the table gives zeros"),
    ("embedding", "(id >= 0) & ", "", "A `tl.load` touches memory outside its tensor"),
    ("reduce_sum", "range(0, columns, CHUNK)", "range(0, CHUNK, CHUNK)", "only the first chunk of 256 is added"),
    ("reduce_sum", "tl.sum(sums, 0)", "tl.sum(sums, 0) / columns", "the mean is taken"),
    ("reduce_sum", "x_ptr + row * columns", "x_ptr", "every program sums the first row"),
    ("softmax", 'other=-float("inf")', "other=0.0", "the places beyond the row count as scores of 0"),
    ("softmax", "exponential / tl.sum(exponential, 0)", "exponential", "not divided by their sum"),
    ("softmax", X_INF + "\n    exponential = tl.exp(x - tl.max(x, 0))",
     X_INF + "\n    exponential = tl.exp(x + 200.0)", "subtract the maximum first"),
    ("softmax", "tl.sum(exponential, 0)", "tl.sum(tl.where(column < columns, x, 0.0), 0)", "the sum is that of the scores"),
    ("online_softmax", "total * tl.exp(top - higher)", "total", "not rescaled when the maximum rises"),
    ("online_softmax", "tl.exp(x - top) / total", "tl.exp(x - top)", "the maximum, but not the sum"),
    ("rms_norm", "tl.sum(x * x, 0) / columns", "tl.sum(x * x, 0)", "the sum of squares is taken for their mean"),
    ("rms_norm", "tl.sum(x * x, 0) / columns", "tl.sum(x * x, 0) / WIDTH", "the mean is over WIDTH"),
    ("rms_norm", "if HAS_WEIGHT:\n", "if False:\n", "the weight is left out"),
    ("rms_norm", "x * tl.rsqrt(", "x * tl.sqrt(", "multiplied by its root mean square"),
    ("rms_norm_backward", "r * (g - n * (tl.sum(g * n, 0) / columns))", "r * g", "r is taken for a constant"),
    ("rms_norm_backward", "        g *= tl.load", "        tl.load", "the weight is missing in g"),
    ("mend_swiglu", "row * 2 * columns", "row * columns", "The first row is right and every later one is wrong"),
    ("silu_mul", "gate * tl.sigmoid(gate) * up", "up * tl.sigmoid(up) * gate", "gate and up are exchanged"),
    ("silu_mul", "gate * tl.sigmoid(gate) * up", "tl.sigmoid(gate) * up", "without the factor gate"),
    ("silu_mul", " * (1 + gate * (1 - s))", "", "the derivative of sigmoid is forgotten"),
    ("quantise_rows", ", 1e-30) / 127", ", 1e-30)", "not divided by 127"),
    ("quantise_rows", ", 1e-30) / 127", ", 1e-30) / 128", "it is divided by 128"),
    ("quantise_rows", "tl.max(tl.abs(x), 0)", "tl.max(x, 0)", "without `tl.abs`"),
    ("linear", "weight_ptr + n[None, :] * K + k[:, None]", "weight_ptr + k[:, None] * N + n[None, :]", "as if it were [K, N]"),
    ("linear", "if HAS_BIAS:", "if False:", "the bias is left out"),
    ("linear", "range(0, K, STEP)", "range(0, STEP, STEP)", "only the first 32 of K"),
    ("linear", "total += tl.dot(", "total = tl.dot(", "each step replaces the sums"),
    ("ordered_linear", "height = tl.minimum(blocks_m - first, GROUP)", "height = GROUP", "Some elements were never written"),
    ("cross_entropy", "top + tl.log(total) - target", "target - top - tl.log(total)", "the sign is turned around"),
    ("cross_entropy", "top + tl.log(total) - target", "top + tl.log(total)", "the label's logit is not subtracted"),
    ("cross_entropy", "tl.where(label == ignore_index, 0.0, top + tl.log(total) - target)",
     "top + tl.log(total) - tl.load(logits_ptr + row * classes + tl.where(known, label, 0)).to(tl.float32)",
     "ignored rows count"),
    ("attention", "query[:, None] + keys - queries", "query[:, None]", "query i stops at key i"),
    ("attention", "if CAUSAL:", "if False:", "queries see keys that come after them"),
    ("attention", ".to(tl.float32) * scale", ".to(tl.float32)", "the scores are not scaled"),
]  # fmt: skip


def graded(name, text, folder, everything=False):
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    return grade(EXERCISES[name], path, "cpu", everything, lambda *_: None)


def test_the_order_names_every_file():
    assert sorted(EXERCISES) == sorted(path.stem for path in SOURCES.glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("exercise", EXERCISES.values(), ids=EXERCISES)
def test_a_solution_passes_and_what_is_given_is_told_what_is_missing(exercise, outside, tmp_path):
    solved = graded(exercise.name, exercise.solution(), tmp_path)
    assert solved.wrong is None, solved.wrong
    assert solved.state is State.PASSES
    assert solved.claims >= 4
    begun = graded(exercise.name, exercise.given("tilestack learn check"), tmp_path)
    assert begun.state is State.BEGUN
    assert begun.wrong.advice
    assert begun.wrong.elements or begun.wrong.line
    assert begun.claims == solved.claims


@pytest.mark.parametrize("exercise", EXERCISES.values(), ids=EXERCISES)
def test_a_file_says_what_to_do_and_not_how(exercise):
    given, solution = exercise.given("tilestack learn check x"), exercise.solution()
    for text in (given, solution):
        assert ast.get_docstring(ast.parse(text)).startswith(exercise.teaches)
        assert not any(mark in text for mark in ("# begin", "# end", "# |", "HINTS", "MISTAKES"))
    assert given.count("\nCheck it:  tilestack learn check x\n") == 1
    assert ("Yours:" in given) != exercise.is_repair
    assert "Yours:" not in solution
    assert len(exercise.hints) >= 3


@pytest.mark.parametrize(("name", "right", "wrong", "said"), PLANTED)
def test_a_mistake_is_recognised(name, right, wrong, said, outside, tmp_path):
    solution = EXERCISES[name].solution()
    assert right in solution
    checked = graded(name, solution.replace(right, wrong), tmp_path)
    assert said in " ".join(checked.wrong.advice), checked.wrong


def test_every_known_mistake_is_made_above(outside):
    """But for those that only a NaN brings out, below."""
    known = {
        (name, words)
        for name, exercise in EXERCISES.items()
        for words in getattr(load_file(exercise.path), "MISTAKES", ())
    }
    made = {(name, words) for name, words in known if any(n == name and said in words for n, _, _, said in PLANTED)}
    assert {words for _, words in known - made} == {"a NaN becomes 0, as `tl.maximum` makes it"}


def test_everything_finds_what_plain_cases_do_not(outside, tmp_path):
    lost = EXERCISES["relu"].solution().replace("tl.where(x < 0, 0.0, x)", "tl.maximum(x, 0.0)")
    assert graded("relu", lost, tmp_path).wrong is None
    checked = graded("relu", lost, tmp_path, everything=True)
    assert checked.state is State.PASSES
    assert "a NaN becomes 0" in checked.wrong.advice[0]
    assert "nan" in checked.wrong.claim
    strides = EXERCISES["add"].solution().replace("x, y = x.contiguous(), y.contiguous()", "")
    checked = graded("add", strides, tmp_path, everything=True)
    assert "strided (Every second element" in checked.wrong.claim


def test_an_attempt_must_take_what_the_solution_takes(outside, tmp_path):
    narrow = EXERCISES["add"].solution().replace('backend="mine"', 'backend="mine", dtypes=[torch.float16]')
    assert "it refuses the call" in graded("add", narrow, tmp_path).wrong.what
    one_way = EXERCISES["relu"].solution().replace(", backward=relu_backward", "")
    assert "it has no backward" in graded("relu", one_way, tmp_path).wrong.what
    elsewhere = EXERCISES["add"].solution().replace('backend="mine"', 'backend="yours"')
    assert "registers no backend 'mine' for add" in graded("add", elsewhere, tmp_path).wrong.what


def test_what_pytorch_computes_is_no_kernel(outside, tmp_path):
    text = EXERCISES["add"].solution()
    by_torch = graded("add", text + "\n\n@implements(ops.add, backend='mine', backward=add_backward)\ndef add(x, y):\n    return x + y\n", tmp_path)  # fmt: skip
    assert by_torch.state is State.BEGUN
    assert by_torch.proved == by_torch.claims
    assert "no kernel of yours computes them" in by_torch.wrong.what
    ours = text.replace("import implements, ops", "import backend, implements, ops")
    by_ours = graded("add", ours + "\n\n@implements(ops.add, backend='mine', backward=add_backward)\ndef add(x, y):\n    with backend('triton'):\n        return ops.add(x, y)\n", tmp_path)  # fmt: skip
    assert "no kernel of yours computes them" in by_ours.wrong.what


# Of a backward the line that begins it, and what PyTorch computes there before any kernel is launched.
BACKWARDS = {
    "relu": ("def relu_backward(grad, out):\n", "    return torch.where(out <= 0, 0, grad)\n"),
    "silu_mul": (
        "def silu_mul_backward(grad, gate, up):\n",
        "    s = gate.sigmoid()\n"
        "    return grad * up * s * (1 + gate * (1 - s)), grad * gate * s\n",
    ),
    "rms_norm_backward": (
        "def rms_norm_backward(grad, x, weight, eps):\n",
        "    r = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)\n"
        "    n, g = x * r, grad if weight is None else grad * weight\n"
        "    dweight = None if weight is None else (grad * n).flatten(end_dim=-2).sum(0)\n"
        "    return r * (g - n * (g * n).mean(-1, keepdim=True)), dweight\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BACKWARDS)
def test_a_backward_that_is_to_be_a_kernel_must_launch_one(name, outside, tmp_path):
    """Also where the forward does."""
    text, (head, body) = EXERCISES[name].solution(), BACKWARDS[name]
    assert head in text
    checked = graded(name, text.replace(head, head + body), tmp_path)
    assert checked.state is State.BEGUN
    assert checked.proved == checked.claims
    assert checked.wrong.what == "the numbers are right, but no kernel of yours computes them in the backward: none was launched there"  # fmt: skip


def test_a_forward_must_launch_a_kernel_also_where_the_backward_does(outside, tmp_path):
    text = EXERCISES["relu"].solution()
    assert text.count("def relu(x):\n") == 1
    checked = graded("relu", text.replace("def relu(x):\n", "def relu(x):\n    return x.clamp(min=0)\n"), tmp_path)
    assert "computes them in the forward:" in checked.wrong.what


def test_a_direction_has_a_kernel_where_the_file_leaves_one_to_write():
    both = {name: exercise.directions for name, exercise in EXERCISES.items() if exercise.directions != ["forward"]}
    expected = {"relu": ["forward", "backward"], "silu_mul": ["forward", "backward"], "rms_norm_backward": ["backward"]}
    assert both == expected


def test_an_error_is_told_with_its_line(outside, tmp_path):
    source = EXERCISES["add"].solution()
    line = next(n for n, text in enumerate(source.splitlines(), 1) if "inside = " in text)
    wrong = graded("add", source.replace("offsets < n", "ofsets < n"), tmp_path).wrong
    assert (wrong.line, wrong.code) == (line, "inside = ofsets < n")
    assert wrong.what == "NameError: name 'ofsets' is not defined"
    wrong = graded("add", source.replace("@triton.jit", "@triton.jitt"), tmp_path).wrong
    assert "add.py cannot be loaded: AttributeError" in wrong.what
    assert wrong.code == "@triton.jitt"


def test_a_close_result_is_told_from_a_wrong_one(outside, tmp_path):
    close = EXERCISES["softmax"].solution().replace("(exponential, 0), mask", "(exponential, 0) + 1e-5 * x * x, mask")
    assert "All are close" in graded("softmax", close, tmp_path).wrong.advice[0]
    close = EXERCISES["add"].solution().replace("x + y, mask", "(x + y) * 1.0005, mask")
    assert "All are close" in graded("add", close, tmp_path).wrong.advice[0]
    wide = EXERCISES["add"].solution().replace("torch.empty_like(x)", "torch.empty_like(x, dtype=torch.float64)")
    assert "dtype torch.float64 instead of torch.float32" in graded("add", wide, tmp_path).wrong.what


@pytest.mark.parametrize("page", ["learn.md", "zh/learn.md"])
def test_the_page_lists_the_exercises_in_their_order(page):
    text = (Path(__file__).resolve().parents[2] / "docs" / page).read_text(encoding="utf-8")
    listed = re.findall(r"^\| (\d+) \| `(\w+)` \|", text, re.MULTILINE)
    assert listed == [(str(number), name) for number, name in enumerate(EXERCISES, 1)]
