"""Quantised models compared with what they were: what `tilestack quantize` tells at its end, and the table of every scheme
and method in the documentation.

Quality does not depend on the machine, so the table is measured on a CPU, on few tokens, and says how many.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from tilestack import data, models
from tilestack.data.calibration import BUILTIN, calibration_ids, texts_of
from tilestack.lab import machine, results
from tilestack.lab.stale import source_of_run
from tilestack.models.checkpoints import CONFIG, read_json
from tilestack.models.quantise import quantise
from tilestack.quant import SCHEMES, QuantisedLinear
from tilestack.quant.experts import QuantisedMoE
from tilestack.quant.methods import METHODS, default_method
from tilestack.train.evaluation.comparison import Comparison, Window, compare, remember, take_windows
from tilestack.train.evaluation.evaluate import Estimate, whole_document

# Of the documentation's table.
MODEL = "smollm2"
SAMPLES, LENGTH, EVALUATED = 8, 256, 2048
COMMAND = "tilestack bench quantize --save"
RESULTS = "quantise"  # the file in results/<machine>/


@dataclass(frozen=True)
class Size:
    """What a model's projections and all of it take: bits for each number of a projection, and bytes."""

    bits_per_weight: float
    bytes: int


def kept_dtype(model: str) -> torch.dtype:
    """The dtype of what stays as it is: bfloat16, or float16 where the model is of that."""
    path = models.locate(model)
    said = read_json(path / CONFIG) if path.is_dir() else {}
    return torch.float16 if "float16" in (said.get("dtype"), said.get("torch_dtype")) else torch.bfloat16


def held_out_windows(sources: Iterable[str], tokenizer: data.Tokenizer, length: int, tokens: int) -> list[Window]:
    """Windows of texts to compare models on, begun and ended as evaluation does it."""
    documents = (
        (whole_document(tokenizer, tokenizer.encode_documents([text])[0]), len(text.encode()))
        for text in texts_of(sources, held_out=True)
    )
    return take_windows(documents, length, tokens)


def size_of_decoder(decoder: models.Decoder) -> Size:
    """The size of a decoder as it is stored."""
    found = [(layer.weight, layer.kept) for layer in decoder.modules() if isinstance(layer, QuantisedLinear)]
    for layer in decoder.modules():
        if isinstance(layer, QuantisedMoE):
            found += [(getattr(layer, name), stack) for name, stack in layer.stacks.items()]
    codes = sum(bytes_of(part) for _, kept in found for part in kept if part is not None)
    weights = sum(weight.numel() for weight, _ in found)
    others = sum(bytes_of(parameter) for parameter in decoder.parameters() if not parameter.is_meta)
    return Size(8 * codes / weights if weights else 8.0 * decoder.embedding.weight.element_size(), codes + others)


def bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def quality_table(title: str, before: Size, after: Size, found: Comparison) -> Table:
    """What `tilestack quantize` shows at its end."""
    made = Table(title=title)
    for heading in ("", "before", "after"):
        made.add_column(heading, justify="right" if heading else "left")
    made.add_row("bits per quantised weight", f"{before.bits_per_weight:.2f}", f"{after.bits_per_weight:.2f}")
    made.add_row("size, MB", f"{before.bytes / 1e6:,.1f}", f"{after.bytes / 1e6:,.1f}")
    for name in ("bits_per_byte", "perplexity"):
        figures = (with_error(getattr(each, name)) for each in (found.before, found.after))
        made.add_row(name.replace("_", " "), *figures)
    made.add_row("change of bits per byte", "", with_error(found.change))
    made.add_row("KL divergence from before, nats", "", with_error(found.kl))
    made.add_row("top-1 agreement with before", "", with_error(found.agreement))
    documents = "1 document" if found.before.documents == 1 else f"{found.before.documents:,} documents"
    made.caption = f"{found.before.tokens:,} held-out tokens of {documents}; ± standard error"
    return made


def with_error(estimate: Estimate) -> str:
    error = "" if estimate.error != estimate.error else f" ± {estimate.error:.2g}"
    return f"{estimate.value:.4g}{error}"


def schemes_and_methods() -> list[tuple[str, str]]:
    """Every scheme, fewest bits first, with every method that does something for it, the default first."""
    found = []
    for name, scheme in reversed(SCHEMES.items()):
        usual = default_method(scheme)
        useful = [method for method in METHODS if method != "smooth" or scheme.activations]
        found += [(name, method) for method in sorted(useful, key=lambda method: method != usual)]
    return found


def measure_quality(
    chosen: Sequence[tuple[str, str]], device: torch.device, tell: Callable[[str], Any], model: str
) -> Iterator[dict[str, Any]]:
    """A run for each scheme and method, as it is measured."""
    tokenizer = data.Tokenizer.load(model)
    ids = calibration_ids(texts_of([BUILTIN]), tokenizer, SAMPLES, LENGTH)
    windows = held_out_windows([BUILTIN], tokenizer, LENGTH, EVALUATED)
    decoder = models.load(model, dtype=kept_dtype(model), device=device)
    reference, before = remember(decoder, windows, device), size_of_decoder(decoder)
    for scheme, method in chosen:
        tell(f"{scheme} by {method}")
        changed = copy.deepcopy(decoder)
        quantise(changed, SCHEMES[scheme], method, ids)
        yield {
            "model": model,
            "scheme": scheme,
            "method": method,
            "default": method == default_method(SCHEMES[scheme]),
            "calibration": {"samples": SAMPLES, "length": LENGTH, "texts": BUILTIN},
            "size": {"before": asdict(before), "after": asdict(size_of_decoder(changed))},
            "quality": asdict(compare(changed, reference, device)),
            "commit": machine.stamp(device.type)["commit"],
            "source": source_of_run(),
        }


def kept_runs(path: Path) -> list[dict[str, Any]]:
    return results.read_json(path)["runs"] if path.exists() else []


def is_alike(run: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two runs may stand in one table: of one model, by the same texts."""
    texts = lambda each: (each["model"], each["calibration"], each["quality"]["before"])
    return texts(run) == texts(other)


def way_of(run: dict[str, Any]) -> tuple[str, str, str]:
    return run["model"], run["scheme"], run["method"]


def keep(path: Path, stamp: dict[str, Any], run: dict[str, Any]) -> None:
    """Put a run into its file, in the place of an older one of its scheme and method; those of other texts are dropped."""
    runs = {way_of(each): each for each in [*kept_runs(path), run] if is_alike(each, run)}
    order = {way: number for number, way in enumerate(schemes_and_methods())}
    results.save(path, {"machine": stamp, "runs": sorted(runs.values(), key=lambda each: order[way_of(each)[1:]])})


def render_quantised(runs: Sequence[dict[str, Any]]) -> Table:
    made = Table()
    for number, heading in enumerate(HEADER):
        made.add_column(heading, justify="right" if number > 1 else "left")
    for run in runs:
        made.add_row(*cells(run))
    return made


HEADER = (
    "scheme",
    "method",
    "bits per weight",
    "size",
    "bits per byte",
    "change",
    "KL divergence, nats",
    "top-1 agreement",
)


def cells(run: dict[str, Any]) -> list[str]:
    """A line of the table."""
    size, quality = run["size"]["after"], run["quality"]
    figure = lambda name: with_error(Estimate(**quality[name]))
    return [
        run["scheme"],
        run["method"],
        f"{size['bits_per_weight']:.2f}",
        f"{size['bytes'] / 1e6:.0f} MB",
        f"{quality['after']['bits_per_byte']['value']:.4f}",
        figure("change"),
        figure("kl"),
        figure("agreement"),
    ]
