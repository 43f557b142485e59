"""Checkpoints as others publish them, packed number by number from the definitions of their formats.

`publish` replaces the projections of a folder by random codes and says what numbers they are.
"""

import json
import random

import torch
from safetensors.torch import load_file, save_file

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj")
PROJECTIONS += ("w1", "w2", "w3")  # Mixtral's gate, down and up
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the output of eight whose code is in the bits 4i to 4i + 3 of a word
draw = random.Random(0)


def int32(words):
    """Unsigned words as a tensor of int32."""
    return torch.tensor([[word - 2**32 if word >= 2**31 else word for word in row] for row in words], dtype=torch.int32)


def in_words(rows, bits, order=None):
    """Lists of codes with several neighbours in each word, the first in its lowest bits or in an order of their own."""
    each = 32 // bits
    order = order or range(each)
    word = lambda codes: sum(codes[place] << bits * i for i, place in enumerate(order))
    return int32([[word(row[start : start + each]) for start in range(0, len(row), each)] for row in rows])


def transposed(rows):
    return [list(column) for column in zip(*rows, strict=True)]


def integers(rows, columns, high):
    return [[draw.randrange(high) for _ in range(columns)] for _ in range(rows)]


def spread(values, inner):
    """[out, groups] as [out, in]."""
    return values.repeat_interleave(inner // values.shape[1], 1)


def integer_codes(out, inner, bits, group, zeros):
    """Codes and zero points as lists, a scale in float16, and the numbers that they are."""
    groups = inner // group if group > 0 else 1
    codes = integers(out, inner, 2**bits)
    zero = integers(out, groups, 2**bits) if zeros else [[2 ** (bits - 1)] * groups for _ in range(out)]
    scale = (0.5 + torch.rand(out, groups)).half() * 2.0**-bits * inner**-0.5
    scale = scale.half()
    numbers = (torch.tensor(codes) - spread(torch.tensor(zero), inner)) * spread(scale.float(), inner)
    return codes, zero, scale, numbers


def gptq(out, inner, bits=4, group=32, zeros=False, version=1):
    codes, zero, scale, numbers = integer_codes(out, inner, bits, group, zeros)
    kept = [[(each - 1) % 2**bits for each in row] for row in zero] if version == 1 else zero
    size = group if group > 0 else inner
    tensors = {
        "qweight": in_words(codes, bits).T.contiguous(),  # words along a column of [in, out]
        "qzeros": in_words(transposed(kept), bits),
        "scales": scale.T.contiguous(),
        "g_idx": torch.tensor([place // size for place in range(inner)], dtype=torch.int32),
        "bias": torch.zeros(out),  # which AutoGPTQ keeps of every layer
    }
    return tensors, numbers


def awq(out, inner, group=32, zeros=True):
    codes, zero, scale, numbers = integer_codes(out, inner, 4, group, zeros)
    tensors = {"qweight": in_words(transposed(codes), 4, AWQ_ORDER), "scales": scale.T.contiguous()}
    return tensors | ({"qzeros": in_words(transposed(zero), 4, AWQ_ORDER)} if zeros else {}), numbers


def fp8_blocks(out, inner):
    """float8 with a scale for 128 by 128, those at the edges smaller."""
    codes = torch.randn(out, inner).to(torch.float8_e4m3fn)
    scale = (0.5 + torch.rand(-(-out // 128), -(-inner // 128))) * inner**-0.5
    numbers = codes.float()
    for row in range(out):
        for column in range(0, inner, 128):
            numbers[row, column : column + 128] *= scale[row // 128, column // 128]
    return {"weight": codes, "weight_scale_inv": scale}, numbers


def fp8_tensors(out, inner, scale_name="weight_scale"):
    codes, scale = torch.randn(out, inner).to(torch.float8_e4m3fn), (0.5 + torch.rand(())) * inner**-0.5
    return {"weight": codes, scale_name: scale, "input_scale": torch.tensor(0.1)}, codes.float() * scale


# By name: the config, and the tensors of a layer.
FORMATS = {
    "gptq": (dict(quant_method="gptq", bits=4, group_size=32, sym=True, desc_act=False), gptq),
    "gptq with zeros": (
        dict(quant_method="gptq", bits=4, group_size=32, sym=False, checkpoint_format="gptq"),
        lambda *size: gptq(*size, zeros=True),
    ),
    "gptq v2": (
        dict(quant_method="gptq", bits=4, group_size=-1, sym=False, checkpoint_format="gptq_v2"),
        lambda *size: gptq(*size, group=-1, zeros=True, version=2),
    ),
    "gptq of 8 bits": (
        dict(quant_method="gptq", bits=8, group_size=-1, sym=True, desc_act=True),
        lambda *size: gptq(*size, bits=8, group=-1),
    ),
    "gptq of 8 bits with zeros": (
        dict(quant_method="gptq", bits=8, group_size=32, sym=False),
        lambda *size: gptq(*size, bits=8, zeros=True),
    ),
    "awq": (dict(quant_method="awq", bits=4, group_size=32, zero_point=True, version="gemm"), awq),
    "awq without zeros": (
        dict(quant_method="awq", bits=4, group_size=32, zero_point=False),
        lambda *size: awq(*size, zeros=False),
    ),
    "awq by AutoRound": (  # symmetric, with the zero points written out
        dict(quant_method="awq", bits=4, group_size=32, zero_point=False, version="gemm", sym=True),
        lambda *size: awq(*size, zeros=True),
    ),
    "fp8 by DeepSeek": (
        dict(quant_method="fp8", weight_block_size=[128, 128], fmt="e4m3", activation_scheme="dynamic"),
        fp8_blocks,
    ),
    "fp8 by AutoFP8": (dict(quant_method="fp8", activation_scheme="static", ignored_layers=["lm_head"]), fp8_tensors),
    "fp8 by transformers": (
        dict(quant_method="fp8", weight_block_size=None),
        lambda *size: fp8_tensors(*size, scale_name="weight_scale_inv"),
    ),
}


def publish(folder, name):
    """Make codes of the projections of a folder, in place; the weights that they are, by their names."""
    config, pack = FORMATS[name]
    torch.manual_seed(0)
    draw.seed(0)
    tensors, numbers = load_file(folder / "model.safetensors"), {}
    for weight in [key for key in tensors if key.split(".")[-2] in PROJECTIONS and key.endswith(".weight")]:
        layer = weight.removesuffix(".weight")
        kept, numbers[weight] = pack(*tensors.pop(weight).shape)
        tensors |= {f"{layer}.{kind}": tensor for kind, tensor in kept.items() if f"{layer}.{kind}" not in tensors}
    save_file(tensors, folder / "model.safetensors")
    change_config(folder, config)
    return numbers


def change_config(folder, quantization_config):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization_config}))


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
