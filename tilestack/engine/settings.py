"""What an engine is started with. Whatever is left out follows from the model and the machine."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tilestack.ahead import compile_ahead
from tilestack.engine.params import check_whole
from tilestack.models import Decoder, PagedCache
from tilestack.models.key_offset import calibrate_key_offset
from tilestack.ops.paged import CODES

log = logging.getLogger(__name__)
CPU_CACHE = 1 << 30  # bytes of keys and values on a CPU, unless told
GPU_SHARE = 0.9  # of a GPU's memory that the engine uses in all, unless told


@dataclass(frozen=True)
class EngineSettings:
    device: str | None = None
    dtype: str | None = None  # bfloat16 on GPUs and on CPUs that compute with it, else float32
    weights: str | None = None  # "fp8", "int8" or "int4": of 8 or 4 bits; the model's own
    context: int | None = None  # the longest text, prompt and answer; the model's own
    max_sequences: int = 256  # that run at a time
    step_tokens: int | None = None  # that a step computes at most: a long prompt is read in chunks of this size
    page: int = 16  # tokens in a page
    kv_memory: int | None = None  # bytes for keys and values
    kv_dtype: str | None = None  # that they are kept in: the model's own, or "int8" or "fp8" for half of the memory
    # Where they are kept in 8 bits, prompts multiply codes of queries by those: less to compute, and a rounding more.
    code_queries: bool = False
    swap_memory: int = 0  # bytes of host memory for those of sequences that had to give way; 0: they are computed again
    prefix_caching: bool = True
    batch_invariant: bool = False  # a token has the bits that it has in any batch, and in training; slower
    overlap: bool | None = None  # launch a step before the one before it is read; None: on a GPU
    graphs: bool | None = None  # steps as CUDA graphs; None: on a GPU
    # One call for a step of few tokens, where the model and the machine allow it: on a GPU a single kernel for a batch of one,
    # while its text is not long, on a CPU one function. "persistent": the kernel for texts of any length, and a warning where
    # there is none; "operators": neither.
    decode: str | None = None
    speculate: str | None = None  # "lookup", or a smaller model with the same tokenizer
    # Guessed at a time; None: 4 by a model, and 7 by look-up, which takes no time, up to 31 (on a CPU 15) while all are right.
    draft_tokens: int | None = None
    queue: int | None = 1024  # sequences that may wait; None: any number
    adapters: Mapping[str, str | Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("device", "dtype"):
            if isinstance(given := getattr(self, name), torch.device | torch.dtype):  # by name from here on
                object.__setattr__(self, name, str(given).removeprefix("torch."))
        many, bytes_ = 2**31 - 1, 2**62
        for name, low, high in (("max_sequences", 1, many), ("page", 1, many), ("swap_memory", 0, bytes_)):
            check_whole(name, getattr(self, name), low, high)
        for name, low, high in (
            ("context", 1, many),
            ("step_tokens", 1, many),
            ("draft_tokens", 1, many),
            ("kv_memory", 1, bytes_),
            ("queue", 0, bytes_),
        ):
            if (value := getattr(self, name)) is not None:
                check_whole(name, value, low, high)
        if self.batch_invariant and (self.weights or self.kv_dtype or self.adapters or self.decode == "persistent"):
            raise ValueError(
                "batch_invariant is for the model as it was trained: without weights or kv_dtype of 8 bits, adapters, and "
                "decode='persistent'"
            )
        if self.code_queries and self.kv_dtype is None:
            raise ValueError("code_queries multiplies codes of keys, which a cache with kv_dtype int8 or fp8 has")
        if self.draft_tokens is not None and self.speculate is None:
            raise ValueError("draft_tokens is for speculative decoding; set speculate, too, to lookup or a model")
        if self.decode not in (None, "persistent", "operators"):
            raise ValueError(
                f"no way to decode is called {self.decode!r}; choose persistent or operators, or leave it out"
            )


def cache_dtype(settings: EngineSettings, dtype: torch.dtype) -> torch.dtype:
    """What keys and values of a model of some dtype are kept in."""
    known = {None: dtype, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
    if settings.kv_dtype not in known:
        raise ValueError(f"no kv_dtype {settings.kv_dtype!r}; choose from int8, fp8, or leave it out")
    return known[settings.kv_dtype]


def bytes_of_token(dtype: torch.dtype, *decoders: Decoder | None) -> int:
    """What a token's keys and values take in all layers of the models that read it, with a scale for each head where they
    are codes."""
    scale = 4 if dtype in CODES else 0
    configs = [decoder.config for decoder in decoders if decoder is not None]
    shapes = [(config.layers, *shape) for config in configs for shape in filter(None, config.cached_shapes)]
    return sum(layers * heads * (dim * dtype.itemsize + scale) for layers, heads, dim in shapes)


@torch.no_grad()
def memory_for_pages(decoder: Decoder, step_tokens: int) -> int:
    """Bytes left for keys and values: on a GPU, what remains of its memory beside the largest step there can be."""
    device = decoder.embedding.weight.device
    if device.type != "cuda":
        return CPU_CACHE
    length = min(step_tokens, decoder.config.positions)
    rows = max(1, step_tokens // length)

    def largest_step() -> None:
        hidden = decoder.hidden(torch.zeros(rows, length, dtype=torch.int64, device=device))
        decoder.logits(hidden.flatten(0, 1)[:256]).float()

    compile_ahead([largest_step])
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    largest_step()
    torch.cuda.synchronize(device)
    step = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, whole = torch.cuda.mem_get_info(device)
    return int(free - step - (1 - GPU_SHARE) * whole)


def make_cache(
    decoder: Decoder, settings: EngineSettings, context: int, step_tokens: int, draft: Decoder | None = None
) -> PagedCache:
    """Pages for as many tokens as the memory holds, those of a model that drafts beside them, and no more than can be
    used at a time."""
    weight = decoder.embedding.weight
    memory = settings.kv_memory or memory_for_pages(decoder, step_tokens)
    dtype = cache_dtype(settings, weight.dtype)
    page = bytes_of_token(dtype, decoder, draft) * settings.page
    useful = settings.max_sequences * -(-context // settings.page)
    pages = min(memory // page, useful)
    if pages < 1:
        raise ValueError(
            f"{memory / 1e6:.1f} MB hold no page of {settings.page} tokens, which takes {page / 1e6:.1f} MB; give more "
            "kv_memory, a smaller model, or a GPU with more memory"
        )
    longest = min(context, int(pages) * settings.page)
    if longest < context:
        needed = page * -(-context // settings.page)
        what = f"{memory / 1e6:,.1f} MB for keys and values hold {longest:,} tokens; a context of {context:,} takes {needed / 1e6:,.1f} MB"
        more = "more kv_memory" if settings.kv_dtype else "more kv_memory, or kv_dtype int8"
        if settings.context is not None:
            raise ValueError(f"{what}. Give a context of {longest} or less, or {more}")
        log.warning("%s. Texts end at %d tokens; with %s they may be longer", what, longest, more)
    return new_cache(decoder, int(pages) + 1, settings, dtype, longest)


def new_cache(decoder: Decoder, pages: int, settings: EngineSettings, dtype: torch.dtype, longest: int) -> PagedCache:
    """So many pages for a model, with what its keys have in common where they become codes."""
    weight = decoder.embedding.weight
    if settings.code_queries and weight.is_cuda and weight.dtype == torch.float32:
        raise ValueError("code_queries is for models in bfloat16 or float16; float32 is asked for its digits")
    cache = PagedCache(decoder.config, pages, settings.page, dtype, weight.device, longest, settings.code_queries)
    calibrate_key_offset(decoder, cache)
    return cache
