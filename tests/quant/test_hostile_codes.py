"""Quantised folders that are broken, that mean harm, or that hold what cannot be read: each is one clear line."""

import copy
import json
import random
import re

import pytest
import tiny_models as tiny
import torch
from code_models import ALL, SIZES, quantised
from published import change_config, change_tensors, publish

from tilestack import models
from tilestack.models.checkpoints import code_formats
from tilestack.models.quantised_config import formats_of

HOSTILE = [
    None, True, "", "text", 0, -1, 3, 2**31, 2**62, 10**30, -0.5, 1e300, float("inf"), float("nan"), [], [[]], [2**40],
    ["x"], {}, {"num_bits": 4},
]  # fmt: skip
ERRORS = (models.CheckpointError, models.ConfigError)
Q = "model.layers.0.self_attn.q_proj"


def written(folder, name, family="llama3"):
    """A folder of codes, by one of our schemes or as others publish it."""
    if name in ALL:
        models.save(quantised(family, ALL[name]), folder)
    else:
        models.save(tiny.ours(family, **SIZES), folder)
        publish(folder, name)
    return folder


def said_of(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def line_of(call):
    """The one line of an error of ours that a call ends in; empty where it ends well."""
    try:
        call()
    except ERRORS as error:
        message = str(error)
    else:
        return ""
    assert len(message.splitlines()) == 1
    assert len(message) < 1500
    return message


def lose(*names):
    return lambda tensors: [tensors.pop(name) for name in names]


def put(name, change):
    return lambda tensors: tensors.update({name: change(tensors.get(name))})


BROKEN = {
    "without a scale": ("w8a8", lose(f"{Q}.weight_scale"), f"1 missing: {Q}.weight_scale"),
    "without words": ("w4a16", lose(f"{Q}.weight_packed"), f"1 missing: {Q}.weight_packed"),
    "without zeros": ("int4 groups with zeros", lose(f"{Q}.weight_zero_point"), f"1 missing: {Q}.weight_zero_point"),
    "without qzeros": ("gptq", lose(f"{Q}.qzeros"), f"1 missing: {Q}.qzeros"),
    "with a scale of another shape": (
        "w4a16", put(f"{Q}.weight_scale", lambda t: t[:, :0]), rf"1 of the wrong shape: {Q}.weight_scale is \(128, 0\)",
    ),
    "with a huge scale": (
        "fp8 by DeepSeek", put(f"{Q}.weight_scale_inv", lambda t: torch.ones(1000, 1000)), "wrong shape.*1000, 1000",
    ),
    "with words of another shape": ("awq", put(f"{Q}.qweight", lambda t: t.T.contiguous()), f"wrong shape: {Q}.qweight"),
    "with words of another dtype": ("gptq", put(f"{Q}.qweight", torch.Tensor.float), f"{Q}.qweight is F32 instead of I32"),
    "with codes of another dtype": (
        "fp8", put(f"{Q}.weight", lambda t: t.view(torch.int8)), f"{Q}.weight is I8 instead of F8_E4M3",
    ),
    "with a scale of another dtype": (
        "w8a8", put(f"{Q}.weight_scale", torch.Tensor.long), f"{Q}.weight_scale is I64 instead of F32 or BF16 or F16",
    ),
    "with a scale that is no number": (
        "w8a16", put(f"{Q}.weight_scale", lambda t: t * torch.nan), f"{Q}: weight_scale holds numbers that are not finite",
    ),
    "with an infinite scale": ("gptq", put(f"{Q}.scales", lambda t: t / 0), f"{Q}: scales holds numbers that are not f"),
    "with another shape in words": (
        "w4a16", put(f"{Q}.weight_shape", lambda t: t * 2**40), rf"{Q}: weight_shape says .* instead of \[128, 64\]",
    ),
    "with zeros that sym has not": ("gptq", put(f"{Q}.qzeros", torch.zeros_like), f"{Q}: qzeros are not 8 throughout"),
    "in the order of activations": (
        "gptq", put(f"{Q}.g_idx", lambda t: t.flip(0)), f"{Q}: g_idx puts numbers into groups in the order of activations",
    ),
    "with groups of another order": (
        "w4a16", put(f"{Q}.weight_g_idx", lambda _: torch.arange(64).int()), f"{Q}: weight_g_idx puts numbers into groups",
    ),
    "with a bias that the model has not": (
        "gptq", put(f"{Q}.bias", torch.ones_like), f"1 unexpected: {Q}.bias",
    ),
    "with more than a layer has": ("awq", put(f"{Q}.extra", lambda _: torch.ones(1)), f"1 unexpected: {Q}.extra"),
    "with a plain matrix beside codes": (
        "w8a16",
        lambda tensors: [lose(*(f"{Q}.weight_{kind}" for kind in ("packed", "scale", "shape")))(tensors),
                         put(f"{Q}.weight", lambda _: torch.ones(128, 64))(tensors)],
        "k_proj and .*q_proj are kept in different ways, and here they are one matrix",
    ),
    "with codes of its head": (
        "w8a8", put("lm_head.weight", lambda t: t.to(torch.int8)), "lm_head holds codes, and of these only the projections",
    ),
    "with codes of its embedding": (
        "w8a8", put("model.embed_tokens.weight", lambda t: t.to(torch.int8)), "embed_tokens holds codes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_folder(what, tmp_path):
    name, change, message = BROKEN[what]
    folder = written(tmp_path / "model", name)
    models.load(folder)
    change_tensors(folder, change)
    assert re.search(message, line_of(lambda: models.load(folder)))


def with_groups(**changes):
    """A change of the groups of compressed-tensors."""
    return lambda config: [group.update(changes) for group in config["config_groups"].values()]


def weights(**changes):
    """A change of what they say of weights."""
    return lambda config: [group["weights"].update(changes) for group in config["config_groups"].values()]


UNREADABLE = {
    "another method": ("gptq", dict(quant_method="bitsandbytes"), "quant_method 'bitsandbytes' is not read; compressed-"),
    "no method": ("gptq", dict(quant_method=None), "quant_method None is not read"),
    "gptq of 3 bits": ("gptq", dict(bits=3), "bits must be 4 or 8, not 3"),
    "gptq of some other layout": ("gptq", dict(checkpoint_format="marlin"), "must be gptq or gptq_v2, not 'marlin'"),
    "gptq in groups that are not there": ("gptq", dict(group_size=-1), "wrong shape: .*qzeros is"),
    "gptq in absurd groups": ("gptq", dict(group_size=2**40), "group_size must be -1 or a positive whole number"),
    "gptq in small groups": ("gptq", dict(group_size=16), "read in groups of a multiple of 32 numbers, and these are of 16"),
    "gptq in groups that are not whole": ("gptq", dict(group_size=56), "rows of 64 numbers are no whole groups of 56"),
    "awq of 3 bits": ("awq", dict(bits=3), "bits must be 4, not 3"),
    "awq for another kernel": ("awq", dict(version="gemv"), "version must be gemm, not 'gemv'"),
    "fp8 in other blocks": ("fp8 by DeepSeek", dict(weight_block_size=[64, 128]), r"must be \[128, 128\], not \[64, 128\]"),
    "fp8 of the other kind": ("fp8 by AutoFP8", dict(fmt="e5m2"), "fmt must be e4m3, not 'e5m2'"),
    "sparse weights": ("w8a8", dict(sparsity_config=dict(format="sparse-24-bitmask")), "sparsity_config is not read"),
    "transforms": ("w8a8", dict(transform_config=dict(config_groups={})), "transform_config is not read"),
    "no groups": ("w8a8", dict(config_groups={}), "config_groups must have a group or a few, not 0"),
    "a group by name": ("w8a8", dict(config_groups=dict(W8A8=["Linear"])), "'W8A8': it must be an object"),
    "another format": ("w8a8", with_groups(format="marlin-24"), "format 'marlin-24' of int8 is not read; float-quan"),
    "outputs of codes": ("w8a8", with_groups(output_activations=dict(num_bits=8)), "output_activations are not read"),
    "weights of 2 bits": ("w4a16", weights(num_bits=2), "type 'int' of 2 bits is not read; float of 8 bits, int of 8"),
    "weights of fp4": ("w4a16", weights(type="float"), "type 'float' of 4 bits is not read"),
    "another strategy": ("w8a8", weights(strategy="tensor_group"), "strategy must be one of tensor, channel, group, block"),
    "groups of no size": ("w8a8", weights(strategy="group"), "strategy group needs a group_size"),
    "blocks of int8": ("w8a8", weights(strategy="block", block_structure=[128, 128]), "strategy block is read of fp8"),
    "fp8 with zeros": ("fp8", weights(symmetric=False), "fp8 has no zero points"),
    "other bits than its tensors": ("w8a16", weights(num_bits=4), "wrong shape: .*weight_packed"),
    "other numbers than its tensors": ("w8a8", weights(type="float"), "I8 instead of F8_E4M3"),
}  # fmt: skip


@pytest.mark.parametrize("what", UNREADABLE)
def test_a_config_of(what, tmp_path):
    name, change, message = UNREADABLE[what]
    folder = written(tmp_path / "model", name)
    config = said_of(folder)
    change(config) if callable(change) else config.update(change)
    change_config(folder, config)
    assert re.search(message, line_of(lambda: models.load(folder)))


def every_key(config, path=()):
    """The paths of all keys of nested objects."""
    for key, value in config.items():
        yield (*path, key)
        yield from every_key(value, (*path, key)) if isinstance(value, dict) else ()


@pytest.mark.parametrize("said", ["awq", ["awq"], 3])
def test_a_config_that_is_no_object_is_refused_by_its_file(said, tmp_path):
    folder = written(tmp_path / "model", "awq")
    change_config(folder, said)
    for call in (models.load, code_formats):
        message = line_of(lambda call=call: call(folder))
        assert message.startswith(f"{folder / 'config.json'}: quantization_config must be an object, not ")


@pytest.mark.parametrize("name", ["w4a16", "fp8 blocks", "gptq", "awq", "fp8 by DeepSeek"])
def test_no_value_of_a_key_is_a_surprise(name, tmp_path):
    config = said_of(written(tmp_path / "model", name))
    refused = 0
    for path in every_key(config):
        for value in HOSTILE:
            changed = copy.deepcopy(config)
            *above, last = path
            inner = changed
            for key in above:
                inner = inner[key]
            inner[last] = value
            message = line_of(lambda given=changed: formats_of({"quantization_config": given}))
            refused += bool(message)
            assert len(message) < 500
    assert refused > 10


@pytest.mark.parametrize("name", ["w4a16", "w8a8", "gptq", "awq", "fp8 by DeepSeek"])
def test_a_hostile_config_beside_real_codes_is_refused_or_harmless(name, tmp_path):
    folder = written(tmp_path / "model", name)
    given, draw, outcomes = said_of(folder), random.Random(0), set()
    for _ in range(40):
        changed = copy.deepcopy(given)
        path = draw.choice([*every_key(changed)])
        inner = changed
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = draw.choice(HOSTILE)
        change_config(folder, changed)
        outcomes.add(bool(line_of(lambda: models.load(folder))))
    assert outcomes == {True, False}
