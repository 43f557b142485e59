"""What people get wrong when they declare an operator or an implementation: said at once, with the way out."""

import pytest
import torch
from torch import Tensor

from tilestack.contract import Extras, backend, implements, operator
from tilestack.contract.cases import cases

pytestmark = pytest.mark.usefixtures("outside")
pairs = cases(lambda make, n: dict(x=make.normal(n), y=make.normal(n)), check=[(3,)])
names = iter(range(1000))


def declare(definition, **options):
    """The definition under a name that no other test has taken: torch.library keeps names for good."""
    definition.__name__ = f"declared_{next(names)}"
    return operator(cases=pairs, **options)(definition)


@pytest.fixture
def scaled_pair():
    def scaled(x: Tensor, y: Tensor, k: float = 1.0) -> tuple[Tensor, Tensor]:
        return x * k, y * k

    return declare(scaled, outputs=("a", "b"))


@pytest.mark.parametrize("sizes", [[2, 3], (2, 3)], ids=["a list", "a tuple"])
def test_a_default_of_several_numbers_is_called_compiled_and_differentiated(sizes):
    """Schemas of PyTorch have no words for it."""

    def weighted(x: Tensor, y: Tensor, weights: list[int] = sizes) -> Tensor:
        return x * weights[0] + y * weights[1]

    described = declare(weighted, gradient=lambda grad, weights: (grad * weights[0], grad * weights[1]))
    for call in (described, torch.compile(described, backend="eager", fullgraph=True)):
        x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
        out = call(x, y)
        assert out.tolist() == [5.0] * 3
        assert [g.tolist() for g in torch.autograd.grad(out.sum(), (x, y))] == [[2.0] * 3, [3.0] * 3]
        assert call(x, y, [1, 0]).tolist() == [1.0] * 3


def first(x: Tensor, y: Tensor) -> Tensor:
    return x * 1


def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x * 1, y * 1


def of_grad(grad: Tensor, y: Tensor) -> Tensor:
    return grad * y


def of_ctx(ctx: Tensor, y: Tensor) -> Tensor:
    return ctx * y


def keyword_only(x: Tensor, *, eps: float = 1.0) -> Tensor:
    return x * eps


def odd_list(x: Tensor, ys: list[Tensor | None]) -> Tensor:
    return x * 1


@pytest.mark.parametrize(
    ("definition", "options", "message"),
    [
        (of_grad, {}, "an argument cannot be called grad, .* give it another name"),
        (of_ctx, {}, "an argument cannot be called ctx"),
        (first, dict(outputs=("y",)), "an argument cannot be called y"),
        (first, dict(outputs="out"), r"outputs is a tuple of names, not 'out'; write outputs=\('out',\)"),
        (first, dict(mutates="x"), r"mutates is a tuple of names, not 'x'"),
        (both, {}, r"returns 2 results, but outputs names none of them; give each a name: outputs=\(...\)"),
        (both, dict(outputs=("a",)), "returns 2 results, but outputs names 1"),
        (keyword_only, {}, "eps must be an ordinary argument"),
        (odd_list, {}, r"tensors come as Tensor, Tensor \| None or list\[Tensor\]"),
        (first, dict(dtypes=dict(x=torch.float32)), r"dtypes are given as a tuple, not torch.float32"),
    ],
)
def test_an_operator_that_leaves_something_open_is_refused(definition, options, message):
    with pytest.raises(TypeError, match=message):
        declare(definition, **options)


def test_a_check_that_only_says_no_is_explained():
    with pytest.raises(ValueError, match="its `check` refuses these arguments"):
        declare(lambda_of(first), check=lambda x: x.ndim == 2)(torch.ones(3), torch.ones(3))


def lambda_of(function):
    def copy(x: Tensor, y: Tensor) -> Tensor:
        return function(x, y)

    return copy


def forward(x, y, k):
    return x * k, y * k


def backward(grad_a, grad_b, k):
    return grad_a * k, grad_b * k


def with_extra(x, y, k):
    return (x * k, y * k), x


def from_extra(grad_a, grad_b, k, extra):
    return grad_a * k, grad_b * k


def extras(**options):
    return Extras(with_extra, from_extra, **(dict(when=lambda x: True) | options))


@pytest.mark.parametrize(
    ("options", "function", "message"),
    [
        ({}, lambda x, y: (x, y), "takes .*, but is given x, y, k by position"),
        (dict(configs=dict(a=1)), forward, "but is given x, y, k by position, and config by name"),
        ({}, lambda x, y, k, config: (x, y), "a `config` comes with `configs`"),
        (dict(configs=["a"]), forward, "map names to configurations"),
        (dict(configs={"64 columns, 4 splits": 1}), forward, "cannot be chosen by name"),
        (dict(backward="auto"), forward, "is a function, AUTOGRAD or None, not 'auto'"),
        (dict(dtypes=torch.float32), forward, "dtypes are given as a tuple"),
        (dict(dtypes=dict(z=(torch.float32,))), forward, "name z; its tensors are x, y"),
        (dict(backward=backward, extras=extras(when=lambda z: True)), forward, "when of .* names z; it has x, y, k"),
        (
            dict(backward=backward, extras=extras(fake=lambda z: z)),
            forward,
            "fake of .* names z; it has x, y, k, needs",
        ),
        (dict(backward=backward, extras=extras(overwrites=("z",))), forward, r"overwrite z; they are \['extra'\]"),
        (dict(backward=backward, extras=extras(overwrites="extra")), forward, "overwrites is a tuple of names"),
    ],
)
def test_an_implementation_that_cannot_work_is_refused_when_it_is_registered(scaled_pair, options, function, message):
    with pytest.raises(TypeError, match=message):
        implements(scaled_pair, backend="mine", **options)(function)


@pytest.mark.parametrize("found", [lambda grad_a: (grad_a,), lambda grad_a: (grad_a,) * 3, lambda grad_a: None])
def test_a_backward_that_miscounts_is_told_what_it_owes(scaled_pair, found):
    implements(scaled_pair, backend="mine", backward=found)(forward)
    x, y = torch.ones(3, requires_grad=True), torch.ones(3)
    with backend("mine"):
        a, _ = scaled_pair(x, y)
    with pytest.raises(
        TypeError, match=r"backward of .* on mine returned \d gradients; it returns one for each of x, y"
    ):
        a.sum().backward()


@pytest.mark.parametrize("compiled", [False, True])
def test_extras_get_the_configuration_they_name(scaled_pair, compiled):
    given = []

    def made(x, y, k, config):
        given.append(config)
        return forward(x, y, k), x

    def back(grad_a, grad_b, k, extra, config):
        given.append(config)
        return backward(grad_a, grad_b, k)

    mine = Extras(made, back, when=lambda x: True, fake=lambda x: torch.empty_like(x))
    implements(scaled_pair, backend="mine", backward=backward, configs=dict(tall=7, wide=8), extras=mine)(
        lambda x, y, k, config: forward(x, y, k)
    )
    torch.compiler.reset()
    call = torch.compile(lambda x, y: scaled_pair(x, y, 2.0), backend="aot_eager") if compiled else scaled_pair
    x, y = torch.ones(3, requires_grad=True), torch.ones(3)
    with backend("mine"):
        a, _ = call(x, y) if compiled else call(x, y, 2.0)
    a.sum().backward()
    assert given == [7, 7]
    assert torch.equal(x.grad, torch.full((3,), 2.0))
