"""The first half of a gated feed-forward layer on Hopper: the top rung's product (`matmul.py`), then the gate over the pair
that it wrote; why in two kernels is in `matmul/gated_parts.py`."""

import functools

from torch import Tensor

from tilestack import ops
from tilestack.contract import Extras, implements
from tilestack.contract.repeat import straight_line
from tilestack.kernels.hopper.matmul import CONFIGS, Config, hopper_product
from tilestack.kernels.matmul.gated import empty_pair, gated_gradients_by
from tilestack.kernels.matmul.gated_parts import gated_after
from tilestack.kernels.matmul.products import HALVES
from tilestack.kernels.matmul.tma import can_move


def linear_swiglu_and_pair(x: Tensor, weight: Tensor, bias: Tensor | None, config: Config) -> tuple[Tensor, Tensor]:
    return gated_after(functools.partial(hopper_product, config=config), x, weight, bias)


def linear_swiglu_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, bool, bool], config: Config
) -> tuple[Tensor | None, ...]:
    product = functools.partial(hopper_product, config=config)
    return gated_gradients_by(product, grad, x, weight, bias, needs, None)


def linear_swiglu_backward_from_pair(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, bool, bool], pair: Tensor,
    config: Config,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    product = functools.partial(hopper_product, config=config)
    return gated_gradients_by(product, grad, x, weight, bias, needs, pair)


@implements(
    ops.linear_swiglu,
    backend="gluon",
    repeat=straight_line,
    backward=linear_swiglu_backward,
    extras=Extras(linear_swiglu_and_pair, linear_swiglu_backward_from_pair, when=lambda x: True, fake=empty_pair),
    when=can_move,
    dtypes=HALVES,
    configs=CONFIGS,
)
def linear_swiglu(x: Tensor, weight: Tensor, bias: Tensor | None, config: Config) -> Tensor:
    return linear_swiglu_and_pair(x, weight, bias, config)[0]
