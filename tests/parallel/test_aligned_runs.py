"""Runs of alignment on several processes: continued to the bit on the same layout, and by one process within rounding."""

import json
from types import SimpleNamespace

import aligning
import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file

from tilestack import models
from tilestack.data import DataError, Tokenizer
from tilestack.train.align.kinds import refuse_other_examples


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folders of all runs; see `aligning`."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "rewards.py").write_text(aligning.REWARD)
    (folder / "ranks").mkdir()
    run_ranks(aligning.in_two_processes, 2, folder / "ranks", folder)
    for kind in ("dpo", "grpo"):
        aligning.run(kind, folder, f"{kind} moving", 3, 4)
        aligning.run(kind, folder, f"{kind} one", 3, 4)
    return folder


def figures(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "grad_norm" in row]


@pytest.mark.parametrize("name", aligning.RUNS)
def test_a_run_is_continued_to_the_bit_on_the_same_layout(runs, name):
    at_once, in_two = (runs / f"{name} {how}" for how in ("at once", "in two"))
    for what in ("weights", "optimizer", "rng"):
        file = f"checkpoints/step-000003/{what}.safetensors"
        assert (at_once / file).read_bytes() == (in_two / file).read_bytes()
    assert figures(at_once) == figures(in_two)
    assert [row["step"] for row in figures(at_once)] == [1, 2, 3]  # one set, though there were two processes


@pytest.mark.parametrize("kind", ["dpo", "grpo"])
def test_one_process_goes_on_with_the_run_of_two_and_ends_as_if_it_had_begun_it(runs, kind):
    """With the reference of DPO, and with the answers to which GRPO has not yet learned all."""
    moving, one = (load_file(runs / f"{kind} {how}" / "checkpoints/step-000003/weights.safetensors") for how in ("moving", "one"))  # fmt: skip
    start = load_file(runs / f"{kind} one" / "checkpoints/step-000001/weights.safetensors")
    assert moving.keys() == one.keys()
    for name, x in one.items():
        # Three updates, of gradients that are sums of some thousand products in another order.
        assert (moving[name] - x).abs().max() <= 2**7 * torch.finfo(torch.float32).eps * x.abs().max(), name
    assert max(float((one[name] - start[name]).abs().max()) for name in one) > 1e-3  # it has gone somewhere
    for ours, theirs in zip(figures(runs / f"{kind} moving"), figures(runs / f"{kind} one"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    papers = json.loads((runs / f"{kind} moving" / "run.json").read_text())
    assert [entry.get("processes", {}).get("shard") for entry in papers] == [True, None]


def test_answers_that_wait_for_further_steps_are_those_of_all_processes(runs):
    saved = json.loads((runs / "grpo sharded at once/checkpoints/step-000001/state.json").read_text())["objective"]
    (made,) = saved["made"]
    assert (len(made["rewards"]), len(made["ids"])) == (4, 12)  # two prompts of each process, three answers to each
    assert made["ids"][:6] != made["ids"][6:]


def test_what_the_reference_says_is_kept_once_for_all_layouts(runs):
    assert (
        len(list((runs / ".reference").iterdir())) == 1
    )  # of DPO on one process, two that share layers, two with shards


def test_a_divided_run_leaves_a_whole_chat_model_and_its_adapters(runs):
    folder = runs / "sft sharded adapters at once"
    kept = load_file(folder / "checkpoints/step-000003/weights.safetensors")
    assert all(".lora_" in name for name in kept)
    assert len(load_file(folder / "adapter/adapter_model.safetensors")) > len(kept)  # of a fused qkv, one for each
    merged, tokenizer = models.load(folder / "model"), Tokenizer.load(folder / "model")
    start = models.load(runs / "dpo one/model").state_dict()
    assert {name: x.shape for name, x in merged.state_dict().items()} == {name: x.shape for name, x in start.items()}
    assert set(tokenizer.stops) <= set(merged.config.eos)  # what ends an answer is known to whoever runs it
    tensor = models.load(runs / "dpo tensor at once/model")
    learned = load_file(runs / "dpo tensor at once/checkpoints/step-000003/weights.safetensors")
    assert all(torch.equal(x, learned[name]) for name, x in tensor.named_parameters())
    assert set(Tokenizer.load(runs / "dpo tensor at once/model").stops) <= set(tensor.config.eos)


def test_processes_that_have_read_other_examples_are_refused():
    refuse_other_examples("a", SimpleNamespace(texts=lambda digest: [digest, "a"]))
    with pytest.raises(DataError, match="rank 1 has read other examples than rank 0"):
        refuse_other_examples("a", SimpleNamespace(texts=lambda digest: [digest, "b"]))
