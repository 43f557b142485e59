"""Quantise a decoder, one layer after another, by what calibration texts do in it.

The texts stand before a layer as hidden states. They go through it once while what its projections read is looked at; then
its weights become codes; then they go through it once more, to stand before the next layer as the codes leave them. So each
layer is calibrated on what it will read, errors of the layers before it included.

    hidden states ──► layer, its inputs recorded ──► scales folded, weights rounded
          └─────────► layer of codes ──► hidden states of the next

At any time there are the statistics of one layer, and two tensors of the size of all hidden states; in a mixture a third,
and the statistics of one expert (quantise_experts.py). The embedding, the norms, the routers and the head keep their numbers.
"""

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tilestack.models.attention import Places
from tilestack.models.context import Documents
from tilestack.models.decoder import Decoder, Layer, places_of
from tilestack.models.folding import folds_of
from tilestack.models.quantise_experts import ExpertCount, RoutedInputs, quantise_mixture
from tilestack.nn import Linear, MoE
from tilestack.ops.numerics import wide
from tilestack.ops.weight_only import PACKED
from tilestack.quant.experts import PROJECTIONS
from tilestack.quant.linear import quantise_linear
from tilestack.quant.methods import METHODS, Method, refuse_method
from tilestack.quant.schemes import Scheme
from tilestack.quant.statistics import InputStatistics, scaled_statistics

BATCH = 8192  # tokens that go through a layer at once

Progress = Callable[[int, int], None]  # layers done, and how many there are
Stream = list[tuple[Tensor, Tensor | None, Places]]  # what stands before a layer: x, residual and places of each batch


def projections(decoder: Decoder, scheme: Scheme, ignore: Sequence[str] = ()) -> dict[str, Linear | MoE]:
    """The linear layers that become codes, by path; all but the head and those that a pattern names, such as `layers.0.*`. Of a
    mixture, the paths of its experts' projections, such as `layers.0.mlp.down`; a pattern may name it as a whole.

    Raises for what cannot become codes and was not ignored, and for a pattern that names nothing.
    """
    found: dict[str, Linear | MoE] = {}
    unused = set(ignore)
    for path, module, weight in weights_of(decoder):
        names = {path, path.rpartition(".")[0]} if isinstance(module, MoE) else {path}
        matching = {pattern for pattern in ignore if any(fnmatch.fnmatchcase(name, pattern) for name in names)}
        unused -= matching
        if matching:
            continue
        if type(module) not in (Linear, MoE):
            raise ValueError(f"{path} is a {type(module).__name__}: quantise a model of plain weights")
        if not scheme.takes(weight.shape[-1]):
            raise ValueError(
                f"{scheme.weights} needs rows of a multiple of {PACKED} numbers, and those of {path} have "
                f"{weight.shape[-1]}; ignore it, or take 8 bits"
            )
        if not all(bool(torch.isfinite(matrix).all()) for matrix in weight.reshape(-1, *weight.shape[-2:])):
            raise ValueError(f"the weight of {path} holds numbers that are not finite, for which there are no codes")
        found[path] = module
    if unused:
        raise ValueError(
            f"nothing is named {', '.join(sorted(unused))}; there are paths such as {', '.join(list(found)[:4])}"
        )
    if not found:
        raise ValueError("there is nothing left to quantise: every projection is ignored")
    return found


def weights_of(decoder: Decoder) -> Iterator[tuple[str, Linear | MoE, Tensor]]:
    """Path, module and weight of each linear layer but the head, and of each projection of all of a mixture's experts."""
    for path, module in decoder.named_modules():
        if isinstance(module, Linear) and path != "head":
            yield path, module, module.weight
        elif isinstance(module, MoE):
            yield from ((f"{path}.{name}", module, getattr(module, name)) for name in PROJECTIONS)


@torch.no_grad()
def quantise(
    decoder: Decoder,
    scheme: Scheme,
    method: str = "nearest",
    ids: Tensor | None = None,
    *,
    ignore: Sequence[str] = (),
    progress: Progress | None = None,
) -> ExpertCount:
    """Make codes of a decoder's projections, in place, and tell how many experts there were. `ids` [samples, length] are the
    calibration texts, which gptq, awq and smooth need and clip is better with. The same texts give the same codes; in another
    order, sums of products differ in their last digits, and with them here and there a number that lies between two codes."""
    refuse_method(method, scheme)
    chosen, way = projections(decoder, scheme, ignore), METHODS[method]
    if way.statistics and ids is None and method != "clip":
        raise ValueError(f"{method} needs calibration texts: give token ids, [samples, length]")
    stream = [] if ids is None or way.statistics is None else before_layers(decoder, ids)
    counted = ExpertCount()
    for number, layer in enumerate(decoder.layers):
        assert isinstance(layer, Layer)
        prefix = f"layers.{number}."
        inner = {path.removeprefix(prefix): module for path, module in chosen.items() if path.startswith(prefix)}
        linears = {name: module for name, module in inner.items() if isinstance(module, Linear)}
        experts = [name for name in PROJECTIONS if isinstance(inner.get(f"mlp.{name}"), MoE)]
        statistics: dict[str, Tensor] = {}
        routed = None
        if way.statistics and stream and inner:
            reads = way.scale is None or way.behind == "all"  # what folds into norms alone does nothing for experts
            routed = RoutedInputs(layer.mlp) if isinstance(layer.mlp, MoE) and experts and reads else None
            statistics = recorded(layer, linears, routed, stream, way.statistics, prefix)
        quantise_layer(layer, linears, statistics, scheme, way)
        if isinstance(layer.mlp, MoE) and experts:
            found = quantise_mixture(layer.mlp, experts, routed, scheme, way, f"{prefix}mlp")
            counted = ExpertCount(counted.experts + found.experts, counted.nearest + found.nearest)
        if number + 1 < len(decoder.layers):
            stream = [(*layer(x, residual, places, Documents()), places) for x, residual, places in stream]
        if progress is not None:
            progress(number + 1, len(decoder.layers))
    return counted


def before_layers(decoder: Decoder, ids: Tensor) -> Stream:
    """The calibration texts as they stand before the first layer, in batches."""
    rows = ids.to(decoder.embedding.weight.device).split(max(1, BATCH // ids.shape[1]))
    return [(decoder.embedded(some), None, places_of(decoder.rotary, some.shape, None, Documents())) for some in rows]


def recorded(
    layer: Layer, inner: dict[str, Linear], routed: RoutedInputs | None, stream: Stream, kind: str, prefix: str
) -> dict[str, Tensor]:
    """Statistics of what the linear layers of a layer read; what its mixture reads goes to `routed`."""
    kept = {name: InputStatistics(kind) for name in inner}
    listeners: list[tuple[torch.nn.Module, Callable[[Tensor], None]]] = [
        (linear, kept[name].add) for name, linear in inner.items()
    ]
    if routed is not None:
        listeners.append((routed.mixture, routed.add))
    with listening(listeners):
        for x, residual, places in stream:
            layer(x, residual, places, Documents())
    return {name: statistics.result(prefix + name) for name, statistics in kept.items()}


@contextmanager
def listening(listeners: Iterable[tuple[torch.nn.Module, Callable[[Tensor], None]]]) -> Iterator[None]:
    """Let functions have the inputs of modules."""
    handles = [
        module.register_forward_pre_hook(lambda module, given, heard=heard: heard(given[0]))
        for module, heard in listeners
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def quantise_layer(
    layer: Layer, inner: dict[str, Linear], statistics: dict[str, Tensor], scheme: Scheme, way: Method
) -> None:
    """Make codes of the linear layers of a layer."""
    kept = {linear: linear.weight.dtype for linear in inner.values()}
    for linear in kept:
        linear.weight.data = wide(linear.weight)  # folding should not round what is rounded anyway
    for fold in folds_of(layer) if way.scale else ():
        # A linear layer that is ignored keeps its numbers, so nothing is folded into it.
        allowed = fold.behind_norm or (way.behind == "all" and fold.maker in kept)
        if fold.name in statistics and allowed:
            found = statistics[fold.name]
            scale = fold.apply(way.scale(fold.reader.weight, found, scheme, fold.shared))  # type: ignore[misc]
            statistics[fold.name] = scaled_statistics(found, scale)
    for name, linear in inner.items():
        codes = way.round(linear.weight, statistics.get(name), scheme)
        quantise_linear(linear, scheme, codes)
        linear.weight.data = linear.weight.to(kept[linear])
