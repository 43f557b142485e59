"""Engines on the workloads of `bench serve`, in this process, taking turns; each result is a line that begins with RESULT.

python -m tilestack.lab.serving.serve_candidates asked.json "tilestack" "transformers"
"""

import copy
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from tilestack import models
from tilestack.contract import check_values
from tilestack.engine import LLM, Engine, EngineSettings, Request, SamplingParams
from tilestack.engine.cpu_weights import can_block, pack_for_cpu
from tilestack.engine.quantised_weights import quantise_weights
from tilestack.engine.settings import cache_dtype
from tilestack.lab.serving.bench_serve import name_of
from tilestack.lab.serving.serve_workloads import Workload, workloads
from tilestack.lab.stale import SERVING, present_source

REPEATS = {"cuda": 2, "cpu": 3}  # a CPU has other things to do in between
CONTEXT = 4096  # of the engines, where no workload needs more
OUTWEIGHS = 256  # a power of two, by which weights are multiplied and divided without a rounding

# The engines that are ours: what they are started with, and the workloads that some are for alone.
SETTINGS: dict[str, dict[str, Any]] = {
    "tilestack": {},
    "tilestack int8": dict(weights="int8"),
    "tilestack lookup": dict(speculate="lookup"),
    "tilestack operators": dict(decode="operators"),
    "tilestack fp8 kv": dict(kv_dtype="fp8"),
    "tilestack fp8 weights": dict(weights="fp8"),
}
ONLY = {
    "tilestack lookup": ("copying",),
    "tilestack operators": ("batch 1",),
    "tilestack fp8 kv": ("throughput",),
    "tilestack fp8 weights": ("throughput", "batch 1", "batch 64"),
}

Serve = Callable[[list[list[int]], list[int], float], int]  # answers prompts with so many tokens; how many it made


def dtype_of(asked: dict[str, Any]) -> torch.dtype:
    """What engines compute in: what ours would take by itself."""
    return torch.bfloat16 if asked["device"] == "cuda" or can_block() else torch.float32


def decoder_of(asked: dict[str, Any]) -> models.Decoder:
    dtype = dtype_of(asked)
    if asked["model"]:
        return models.load(asked["model"], dtype=dtype, device=asked["device"]).eval()
    torch.manual_seed(0)
    with torch.device(asked["device"]):
        decoder = models.Decoder(models.ModelConfig.from_hf(asked["shape"]))
    return decoder.to(dtype).eval()


def with_tilestack(decoder: models.Decoder, context: int, **settings: Any) -> Serve:
    llm = LLM(Engine(decoder, None, EngineSettings(context=context, queue=None, **settings)))

    def serve(prompts: list[list[int]], answers: list[int], temperature: float) -> int:
        asked = [
            Request(f"{n}", prompt, SamplingParams(temperature=temperature, max_tokens=most, ignore_eos=True, seed=n))
            for n, (prompt, most) in enumerate(zip(prompts, answers, strict=True))
        ]
        return sum(output.usage.completion for output in llm.run(asked))

    return serve


def with_vllm(folder: str, context: int) -> Serve:
    from vllm import LLM as Theirs
    from vllm import SamplingParams as TheirParams

    llm = Theirs(model=folder, dtype="bfloat16", max_model_len=context, skip_tokenizer_init=True)

    def serve(prompts: list[list[int]], answers: list[int], temperature: float) -> int:
        params = [
            TheirParams(temperature=temperature, ignore_eos=True, max_tokens=most, detokenize=False) for most in answers
        ]
        found = llm.generate([dict(prompt_token_ids=prompt) for prompt in prompts], params, use_tqdm=False)
        return sum(len(each.outputs[0].token_ids) for each in found)

    return serve


def with_transformers(folder: str, device: str, dtype: torch.dtype) -> Serve:
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map=device).eval()

    def serve(prompts: list[list[int]], answers: list[int], temperature: float) -> int:
        ids = torch.tensor(prompts, device=device)
        sampling = dict(do_sample=True, temperature=temperature) if temperature else dict(do_sample=False)
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), min_new_tokens=answers[0], max_new_tokens=answers[0],
            pad_token_id=0, **sampling,
        )  # fmt: skip
        return made[:, ids.shape[1] :].numel()

    return serve


def timed(serve: Serve, workload: Workload, answers: list[int], shift: int, top: int) -> float:
    """Seconds of one run, with other tokens each time: what a prefix cache knows must not help."""
    prompts = [[(token + 3571 * shift) % (top + 1) for token in prompt] for prompt in workload.prompts]
    began = time.perf_counter()
    made = serve(prompts, answers, workload.temperature)
    if made != sum(answers):
        raise RuntimeError(f"{workload.name}: {made} tokens were made, not {sum(answers)}")
    return time.perf_counter() - began


def measure(
    serves: dict[str, Serve], workload: Workload, vocabulary: int, repeats: int
) -> dict[str, tuple[float, float]]:
    """Of each engine the workload's figure, and the seconds it stands for; they take turns."""
    top, shifts = min(10_000, vocabulary - 1), iter(range(1000))
    once = lambda serve, answers: timed(serve, workload, answers, next(shifts), top)

    def best_of_turns(answers: list[int]) -> dict[str, float]:
        turns = [{name: once(serve, answers) for name, serve in serves.items()} for _ in range(repeats)]
        return {name: min(turn[name] for turn in turns) for name in serves}

    for serve in serves.values():
        once(serve, workload.answers)
    seconds = best_of_turns(workload.answers)
    if workload.unit == "ms/step":
        prompts = best_of_turns([1] * len(workload.answers))
        steps = {name: seconds[name] - prompts[name] for name in serves}
        return {name: (each / (workload.answers[0] - 1) * 1e3, each) for name, each in steps.items()}
    figure = lambda each: each * 1e3 if workload.unit == "ms" else workload.answered / each
    return {name: (figure(each), each) for name, each in seconds.items()}


def fits(name: str, workload: Workload) -> bool:
    if name in ONLY:
        return workload.name in ONLY[name]
    return name != "transformers" or (
        len(set(map(len, workload.prompts))) == 1 and workload.name not in ("long", "prefix")
    )


def results(names: list[str], asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each engine and workload. What is current of all the engines here is left out; where it is not of one, the
    others are measured beside it."""
    decoder = decoder_of(asked)
    config, dtype, device = decoder.config, dtype_of(asked), asked["device"]
    every = {each.name: each for each in workloads(config, asked["scale"])}
    if wrong := [name for name in asked["only"] or () if name not in every]:
        raise ValueError(f"no workload is called {', '.join(wrong)}; choose from {', '.join(every)}")
    current = {tuple(pair) for pair in asked["current"]}
    due = lambda name, workload: fits(name, workload) and (workload.name, name) not in current
    chosen = [every[name] for name in asked["only"] or every if any(due(each, every[name]) for each in names)]
    names = [name for name in names if any(fits(name, each) for each in chosen)]
    if not chosen:
        return
    longest = max(max(map(len, each.prompts)) + max(each.answers) for each in chosen) + 1
    context = min(config.positions, max(longest, CONTEXT))
    weights = {name: bytes_of_weights(decoder, SETTINGS.get(name, {}).get("weights")) for name in names}
    serves = {name: serve_of(name, decoder, asked, context) for name in names}
    sources = {name: present_source(SERVING, name, device) for name in names}
    ours = decoder if any(name.startswith("tilestack") for name in names) else None
    del decoder  # where it is not ours, another engine wants the memory
    for workload in chosen:
        fitting = {name: serve for name, serve in serves.items() if fits(name, workload)}
        is_made_to_copy = workload.name == "copying" and not asked["model"] and config.tied
        with repeating_itself(ours) if ours and is_made_to_copy else nullcontext():
            found = measure(fitting, workload, config.vocabulary, REPEATS[device])
        for name, (figure, seconds) in found.items():
            kept = cache_dtype(EngineSettings(**SETTINGS.get(name, {})), dtype)
            moved = workload.moved(config, weights[name], kept.itemsize)
            yield dict(op=SERVING, case=workload.name, dtype=f"{dtype}".removeprefix("torch."), direction="forward",
                       backend=name, figure=round(figure, 4), unit=workload.unit, seconds=seconds, moved=moved,
                       answered=workload.answered, device=device, model=name_of(asked["model"]),
                       source=sources[name], versions=versions_of(name))  # fmt: skip


def versions_of(name: str) -> dict[str, str]:
    """What ran: the engine's version, as it says itself, with those of what it stands on. All are imported by now."""
    packages = (name.split()[0], "torch", "triton")
    return {package: sys.modules[package].__version__ for package in packages if package in sys.modules}


@contextmanager
@torch.no_grad()
def repeating_itself(decoder: models.Decoder) -> Iterator[None]:
    """Random weights copy nothing. Inside, embeddings outweigh all that layers add to them, so that a decoder whose head they
    are repeats the last token, and guesses by look-up are right; what a step computes and reads stays the same."""
    decoder.embedding.weight *= OUTWEIGHS
    try:
        yield
    finally:
        decoder.embedding.weight /= OUTWEIGHS


def serve_of(name: str, decoder: models.Decoder, asked: dict[str, Any], context: int) -> Serve:
    if name.startswith("tilestack"):
        return with_tilestack(in_format(decoder, SETTINGS[name].get("weights")), context, **SETTINGS[name])
    given = asked["model"] if asked["model"] and Path(asked["model"]).is_dir() else None
    folder = given or str(saved(decoder, Path(asked["folder"]) / "model"))
    return with_vllm(folder, context) if name == "vllm" else with_transformers(folder, asked["device"], dtype_of(asked))


def bytes_of_weights(decoder: models.Decoder, weights: str | None) -> int:
    """What a step reads of a decoder with weights of a format, of which all of int8's are codes, and of fp8's the layers'."""
    whole = sum(each.numel() * each.element_size() for each in decoder.parameters())
    codes = [] if weights is None else decoder.parameters() if weights == "int8" else decoder.layers.parameters()
    return whole - sum(each.numel() * (each.element_size() - 1) for each in codes)


def in_format(decoder: models.Decoder, weights: str | None) -> models.Decoder:
    """A decoder with weights of a format, beside the one given."""
    if weights is None:
        return decoder
    decoder = copy.deepcopy(decoder)
    pack_for_cpu(decoder, weights) if weights == "int8" else quantise_weights(decoder, weights)
    return decoder


def saved(decoder: models.Decoder, folder: Path) -> Path:
    if not folder.exists():
        models.save(decoder, folder)
    return folder


if __name__ == "__main__":
    check_values(False)  # as the command line does: the engine knows the tokens and pages it hands to operators
    asked = json.loads(Path(sys.argv[1]).read_text())
    try:
        for row in results(sys.argv[2:], asked):
            print("RESULT " + json.dumps(row), flush=True)
    except (ValueError, OSError) as problem:
        sys.exit(f"error: {problem}")
