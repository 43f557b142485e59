"""Quantise a decoder, one layer after another, by what calibration texts do in it.

The texts stand before a layer as hidden states. They go through it once while what its projections read is looked at; then
its weights become codes; then they go through it once more, to stand before the next layer as the codes leave them. So each
layer is calibrated on what it will read, errors of the layers before it included.

    hidden states ──► layer, its inputs recorded ──► scales folded, weights rounded
          └─────────► layer of codes ──► hidden states of the next

At any time there are the statistics of one layer, and two tensors of the size of all hidden states. The embedding, the
norms and the head keep their numbers.
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
from tilestack.nn import Linear, MoE
from tilestack.ops.numerics import wide
from tilestack.ops.weight_only import PACKED
from tilestack.quant.linear import quantise_linear
from tilestack.quant.methods import METHODS, Method, refuse_method
from tilestack.quant.schemes import Scheme
from tilestack.quant.statistics import InputStatistics

BATCH = 8192  # tokens that go through a layer at once

Progress = Callable[[int, int], None]  # layers done, and how many there are
Stream = list[tuple[Tensor, Tensor | None, Places]]  # what stands before a layer: x, residual and places of each batch


def projections(decoder: Decoder, scheme: Scheme, ignore: Sequence[str] = ()) -> dict[str, Linear]:
    """The linear layers that become codes, by path; all but the head and those that a pattern names, such as `layers.0.*`.

    Raises for what cannot become codes and was not ignored, and for a pattern that names nothing.
    """
    found: dict[str, Linear] = {}
    unused = set(ignore)
    for path, module in decoder.named_modules():
        if not isinstance(module, Linear | MoE) or path == "head":
            continue
        matching = {pattern for pattern in ignore if fnmatch.fnmatchcase(path, pattern)}
        unused -= matching
        if matching:
            continue
        if isinstance(module, MoE):
            raise ValueError(
                f"{path} has experts, which are not quantised yet; to keep their numbers and quantise the rest, ignore '*.mlp'"
            )
        if type(module) is not Linear:
            raise ValueError(f"{path} is a {type(module).__name__}: quantise a model of plain weights")
        if not scheme.takes(module.in_features):
            raise ValueError(
                f"{scheme.weights} needs rows of a multiple of {PACKED} numbers, and those of {path} have "
                f"{module.in_features}; ignore it, or take 8 bits"
            )
        if not bool(torch.isfinite(module.weight).all()):
            raise ValueError(f"the weight of {path} holds numbers that are not finite, for which there are no codes")
        found[path] = module
    if unused:
        raise ValueError(
            f"nothing is named {', '.join(sorted(unused))}; there are paths such as {', '.join(list(found)[:4])}"
        )
    if not found:
        raise ValueError("there is nothing left to quantise: every projection is ignored")
    return found


@torch.no_grad()
def quantise(
    decoder: Decoder,
    scheme: Scheme,
    method: str = "nearest",
    ids: Tensor | None = None,
    *,
    ignore: Sequence[str] = (),
    progress: Progress | None = None,
) -> None:
    """Make codes of a decoder's projections, in place. `ids` [samples, length] are the calibration texts, which gptq, awq
    and smooth need and clip is better with. The same texts give the same codes; in another order, sums of products differ in
    their last digits, and with them here and there a number that lies between two codes."""
    refuse_method(method, scheme)
    chosen, way = projections(decoder, scheme, ignore), METHODS[method]
    if way.statistics and ids is None and method != "clip":
        raise ValueError(f"{method} needs calibration texts: give token ids, [samples, length]")
    stream = [] if ids is None or way.statistics is None else before_layers(decoder, ids)
    for number, layer in enumerate(decoder.layers):
        assert isinstance(layer, Layer)
        prefix = f"layers.{number}."
        inner = {path.removeprefix(prefix): linear for path, linear in chosen.items() if path.startswith(prefix)}
        statistics = (
            recorded(layer, inner, stream, way.statistics, prefix) if way.statistics and stream and inner else {}
        )
        quantise_layer(layer, inner, statistics, scheme, way)
        if number + 1 < len(decoder.layers):
            stream = [(*layer(x, residual, places, Documents()), places) for x, residual, places in stream]
        if progress is not None:
            progress(number + 1, len(decoder.layers))


def before_layers(decoder: Decoder, ids: Tensor) -> Stream:
    """The calibration texts as they stand before the first layer, in batches."""
    rows = ids.to(decoder.embedding.weight.device).split(max(1, BATCH // ids.shape[1]))
    return [(decoder.embedded(some), None, places_of(decoder.rotary, some.shape, None, Documents())) for some in rows]


def recorded(layer: Layer, inner: dict[str, Linear], stream: Stream, kind: str, prefix: str) -> dict[str, Tensor]:
    """Statistics of what the linear layers of a layer read."""
    kept = {name: InputStatistics(kind) for name in inner}
    with listening((linear, kept[name].add) for name, linear in inner.items()):
        for x, residual, places in stream:
            layer(x, residual, places, Documents())
    return {name: statistics.result(prefix + name) for name, statistics in kept.items()}


@contextmanager
def listening(listeners: Iterable[tuple[Linear, Callable[[Tensor], None]]]) -> Iterator[None]:
    """Let functions have the inputs of linear layers."""
    handles = [
        linear.register_forward_pre_hook(lambda module, given, heard=heard: heard(given[0]))
        for linear, heard in listeners
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


def scaled_statistics(found: Tensor, scale: Tensor) -> Tensor:
    """What is known of inputs once they are divided by a scale, of largest magnitudes or of second moments."""
    scale = scale.to(found)
    return found / scale if found.ndim == 1 else found / torch.outer(scale, scale)
