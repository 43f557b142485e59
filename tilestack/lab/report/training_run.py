"""A training run in the report: its loss, what it is worth beside compressors and counting, and what it writes."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tilestack.data.baseline import Baselines, baselines
from tilestack.data.prepared import documents, prepare_tokens
from tilestack.lab.report.page import Section, cards, colour, plot, text
from tilestack.train import Recipe, metrics

NAMES = {"zlib": "zlib -9", "lzma": "lzma", "five_gram": "5-gram counts"}


def measure_baselines(recipe: Recipe, folder: Path) -> Baselines:
    """Bits a byte of a run's held-out documents without a model: by compressors, and by counts of its training text."""
    _, tokens = prepare_tokens(recipe.data, folder, tokenizer_of=recipe.model.path)
    texts = [document for document in documents(recipe.data) if document]
    share = recipe.data.validation
    part = lambda split: (texts[int(number)] for number in tokens.documents(split, share))
    return baselines(part("train"), part("validation"))


def training_section(
    folder: Path, figures: dict[str, Any], others: Baselines, samples: Sequence[tuple[str, str]]
) -> Section:
    """The run of a folder, as a section of a page. A sample is a prompt, and what the model wrote after it."""
    steps, losses = metrics.curve(folder, "loss")
    held_steps, held = metrics.curve(folder, "validation_loss")
    line = lambda name, xs, ys, shade, **more: dict(
        type="scatter", mode="lines", name=name, x=xs, y=ys, line=dict(color=colour(shade)), **more
    )
    smoothed = metrics.smooth(losses, max(1, len(losses) // 40))
    curves = [
        line("each step", steps, losses, "blue", opacity=0.3),
        line("training", steps, smoothed, "blue"),
        line("held out", held_steps, held, "amber") | dict(mode="lines+markers"),  # there may be one figure only
    ]
    loss = plot(curves, dict(xaxis=dict(title="step"), yaxis=dict(title="loss, nats a token")), 380, "training loss")
    ours = figures["bits_per_byte"]
    shown = {"this model": ours, **{NAMES[name]: bits for name, bits in asdict(others).items()}}
    bars = [
        dict(
            type="bar", orientation="h", x=list(shown.values())[::-1], y=list(shown)[::-1],
            text=[f"{bits:.2f}" for bits in list(shown.values())[::-1]],
            marker=dict(color=[colour("muted")] * (len(shown) - 1) + [colour("good" if ours <= min(shown.values()) else "bad")]),
        )
    ]  # fmt: skip
    bits = plot(bars, dict(xaxis=dict(title="bits a byte of held-out text, less is better")), 240, "bits a byte")
    facts = cards(
        [
            (f"{losses[0]:.2f} → {smoothed[-1]:.2f}", f"training loss over {steps[-1]:,} steps, smoothed", ""),
            *([(f"{held[-1]:.2f}", "loss of held-out text at the end", "")] if held else []),
            (f"{ours:.3f}", "bits a byte of held-out text", "good" if ours < others.five_gram else "bad"),
            (f"{speed(folder):,.0f}", "tokens a second", ""),
        ]
    )
    written = "".join(f'<pre class="sample"><b>{text(prompt)}</b>{text(more)}</pre>' for prompt, more in samples)
    lede = "A small model of Python code, trained on the sources that come with Python, then asked to go on: what it was given is set bold, the rest is its own."
    return Section("A model trained here", lede, facts + loss + bits + written)


def speed(folder: Path) -> float:
    """The median speed of a run."""
    rates = sorted(row["tokens_per_s"] for row in metrics.rows(folder, metrics.SPEED))
    return rates[len(rates) // 2] if rates else 0.0
