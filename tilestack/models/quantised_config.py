"""What `quantization_config` in a config.json says of codes: which formats the layers may have. Read for compressed-tensors,
fp8, gptq and awq; written for compressed-tensors.

Which layers are codes is not asked of the lists and patterns of names that such configurations have: the tensors tell. Of a
configuration with several groups, a layer has the first format that its tensors fit.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from tilestack.models.keys import (
    COUNT,
    FLAG,
    LARGEST,
    NAME,
    OBJECT,
    WHOLES,
    ConfigError,
    Kind,
    check_kinds,
    is_token,
    shown,
)
from tilestack.ops.quantised_linear import BLOCK
from tilestack.quant.formats import AWQCodes, CodeFormat, GPTQCodes, PackedCodes, PlainCodes
from tilestack.quant.schemes import Scheme

GROUP = Kind(
    "-1 or a positive whole number",
    lambda value: is_token(value) and (value == -1 or 0 < value <= LARGEST["intermediate"]),
)
GROUPS_KINDS = dict(config_groups=OBJECT, format=NAME, sparsity_config=OBJECT, transform_config=OBJECT)
GROUP_KINDS = dict(weights=OBJECT, input_activations=OBJECT, output_activations=OBJECT, format=NAME)
ARGUMENT_KINDS = dict(
    num_bits=COUNT, type=NAME, symmetric=FLAG, strategy=NAME, group_size=GROUP, block_structure=WHOLES
)
PLAIN_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")
PACKED_FORMAT = "pack-quantized"
MIXED_FORMAT = "mixed-precision"  # each group names its own
STRATEGIES = ("tensor", "channel", "group", "block")
MOST_GROUPS = 1000


def formats_of(config: Mapping[str, Any]) -> list[CodeFormat]:
    """The formats that layers may have by a config.json; none where the model is not quantised."""
    check_kinds(config, dict(quantization_config=OBJECT))
    if not (given := config.get("quantization_config")):
        return []
    try:
        check_kinds(given, dict(quant_method=NAME))
        method = given.get("quant_method")
        if method not in METHODS:
            raise ConfigError(
                f"quant_method {shown(method)} is not read; {', '.join(METHODS)} are. Take such a checkpoint, or the "
                "model that it was made from"
            )
        return METHODS[method](given)
    except ConfigError as problem:
        raise ConfigError(f"quantization_config: {problem}") from problem


def compressed_tensors(given: Mapping[str, Any]) -> list[CodeFormat]:
    check_kinds(given, GROUPS_KINDS)
    for key in ("sparsity_config", "transform_config"):
        if given.get(key):
            raise ConfigError(f"{key} is not read: the weights are more than codes and scales")
    groups = given.get("config_groups") or {}
    if not 0 < len(groups) <= MOST_GROUPS:
        raise ConfigError(f"config_groups must have a group or a few, not {len(groups)}")
    found = []
    for name, group in groups.items():
        try:
            if not isinstance(group, Mapping):
                raise ConfigError(f"it must be an object, not {shown(group)}")
            check_kinds(group, GROUP_KINDS)
            if group.get("weights"):  # otherwise it is about keys and values
                found.append(group_format(group, group.get("format") or given.get("format") or ""))
        except ConfigError as problem:
            raise ConfigError(f"config_groups, {shown(name)}: {problem}") from problem
    if not found:
        raise ConfigError("config_groups has none with weights")
    return found


def group_format(group: Mapping[str, Any], format: str) -> CodeFormat:
    weights, inputs = group["weights"], group.get("input_activations") or {}
    for arguments in (weights, inputs):
        check_kinds(arguments, ARGUMENT_KINDS)
    if group.get("output_activations"):
        raise ConfigError("output_activations are not read")
    kind = kind_of(weights)
    symmetric = weights.get("symmetric") is not False
    strategy, size = weights.get("strategy"), weights.get("group_size") or -1
    strategy = strategy or ("group" if size > 0 else "channel")
    if strategy not in STRATEGIES:
        raise ConfigError(f"strategy must be one of {', '.join(STRATEGIES)}, not {shown(strategy)}")
    if strategy == "group" and size < 0:
        raise ConfigError("strategy group needs a group_size")
    blocks = strategy == "block"
    if blocks and (kind != "fp8" or weights.get("block_structure") != [BLOCK, BLOCK]):
        raise ConfigError(f"strategy block is read of fp8 with a block_structure of {[BLOCK, BLOCK]}")
    if kind == "fp8" and not symmetric:
        raise ConfigError("fp8 has no zero points, so symmetric must be true")
    # Inputs become codes where there is a product of such codes, and stay as they are otherwise.
    by_row = strategy in ("tensor", "channel") and symmetric
    coded = inputs and inputs.get("num_bits") == 8 and kind != "int4" and kind_of(inputs) == kind
    scheme = Scheme(
        kind,
        group=BLOCK if blocks else size if strategy == "group" else 0,
        symmetric=symmetric,
        activations=kind if coded and (by_row or blocks) else None,
        blocks=blocks,
    )
    if format in PLAIN_FORMATS and kind != "int4":
        return PlainCodes(scheme)
    if format == PACKED_FORMAT and kind != "fp8":
        return PackedCodes(scheme)
    known = ", ".join((*PLAIN_FORMATS, PACKED_FORMAT))
    raise ConfigError(f"format {shown(format)} of {kind} is not read; {known} are")


def kind_of(arguments: Mapping[str, Any]) -> str:
    """What numbers are, by their type and bits."""
    kinds = {("float", 8): "fp8", ("int", 8): "int8", ("int", 4): "int4"}
    kind = arguments.get("type") or "int", arguments.get("num_bits") or 8
    if kind not in kinds:
        accepted = ", ".join(f"{name} of {bits} bits" for name, bits in kinds)
        raise ConfigError(f"type {shown(kind[0])} of {kind[1]} bits is not read; {accepted} are")
    return kinds[kind]


def fp8(given: Mapping[str, Any]) -> list[CodeFormat]:
    check_kinds(given, dict(fmt=NAME, weight_block_size=WHOLES))
    if given.get("fmt") not in (None, "e4m3"):
        raise ConfigError(f"fmt must be e4m3, not {shown(given['fmt'])}")
    block = given.get("weight_block_size")
    if block is None:
        return [PlainCodes(Scheme("fp8", activations="fp8"), name) for name in ("weight_scale", "weight_scale_inv")]
    if list(block) != [BLOCK, BLOCK]:
        raise ConfigError(f"weight_block_size must be {[BLOCK, BLOCK]}, not {shown(block)}")
    return [PlainCodes(Scheme("fp8", BLOCK, activations="fp8", blocks=True), "weight_scale_inv")]


def gptq(given: Mapping[str, Any]) -> list[CodeFormat]:
    check_kinds(given, dict(bits=COUNT, group_size=GROUP, sym=FLAG, checkpoint_format=NAME, format=NAME))
    kind, offsets = {4: "int4", 8: "int8"}.get(given.get("bits", 0)), dict(gptq=1, gptq_v2=0)
    if kind is None:
        raise ConfigError(f"bits must be 4 or 8, not {shown(given.get('bits'))}; take a checkpoint with such codes")
    format = given.get("checkpoint_format") or given.get("format") or "gptq"
    if format not in offsets:
        raise ConfigError(f"checkpoint_format must be {' or '.join(offsets)}, not {shown(format)}")
    scheme = Scheme(kind, max(given.get("group_size") or -1, 0), given.get("sym") is not False)
    return [GPTQCodes(scheme, offsets[format])]


def awq(given: Mapping[str, Any]) -> list[CodeFormat]:
    check_kinds(
        given, dict(bits=COUNT, w_bit=COUNT, group_size=GROUP, q_group_size=GROUP, zero_point=FLAG, version=NAME)
    )
    bits = given.get("bits") or given.get("w_bit") or 4
    if bits != 4:
        raise ConfigError(f"bits must be 4, not {shown(bits)}")
    if (version := str(given.get("version") or "gemm").lower()) != "gemm":
        raise ConfigError(f"version must be gemm, not {shown(version)}; other versions pack codes in other orders")
    group = given.get("group_size") or given.get("q_group_size") or 128
    # Files of symmetric codes may have qzeros all the same, of 8 throughout, as AutoRound writes them.
    symmetric = (False, True) if given.get("zero_point") is False else (False,)
    return [AWQCodes(Scheme("int4", max(group, 0), each)) for each in symmetric]


METHODS = {"compressed-tensors": compressed_tensors, "fp8": fp8, "gptq": gptq, "awq": awq}


def written_config(layers: Mapping[str, PlainCodes | PackedCodes], ignored: Iterable[str]) -> dict[str, Any]:
    """The `quantization_config` of linear layers by their Hugging Face names or patterns of these, beside those that are no
    codes."""
    schemes = list(dict.fromkeys(layers.values()))
    formats = {format_name(each) for each in schemes}
    groups = {}
    for number, each in enumerate(schemes):
        targets = ["Linear"] if len(schemes) == 1 else [name for name, own in layers.items() if own == each]
        groups[f"group_{number}"] = {"targets": targets, **group_arguments(each.scheme), "format": format_name(each)}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else MIXED_FORMAT,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(ignored),
    }


def format_name(format: PlainCodes | PackedCodes) -> str:
    if isinstance(format, PackedCodes):
        return PACKED_FORMAT
    return "float-quantized" if format.scheme.weights == "fp8" else "int-quantized"


def group_arguments(scheme: Scheme) -> dict[str, Any]:
    """The weights and inputs of a group of compressed-tensors."""
    numbers: dict[str, Any] = {
        "num_bits": 4 if scheme.weights == "int4" else 8,
        "type": "float" if scheme.weights == "fp8" else "int",
    }
    weights = numbers | {"symmetric": scheme.symmetric, "dynamic": False}
    if scheme.blocks:
        weights |= {"strategy": "block", "block_structure": [BLOCK, BLOCK]}
    else:
        weights |= {"strategy": "group", "group_size": scheme.group} if scheme.group else {"strategy": "channel"}
    inputs = numbers | {"symmetric": True, "dynamic": True}
    inputs |= {"strategy": "group", "group_size": BLOCK} if scheme.blocks else {"strategy": "token"}
    return {"weights": weights, "input_activations": inputs if scheme.activations else None}
