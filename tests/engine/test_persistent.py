"""When a decode step may be one kernel: which models, shapes and devices, and that everything else goes on with a reason."""

import logging
from dataclasses import replace

import pytest
import torch
from engines import decoder as decoder_of

from tilestack import models
from tilestack.engine import LLM, Engine, EngineSettings, Request, SamplingParams
from tilestack.engine.persistent import shape_of, weights_of, why_not
from tilestack.engine.plain_decoder import PLAIN, linears_of
from tilestack.engine.quantised_weights import quantise_weights
from tilestack.kernels.cuda import decode_step
from tilestack.kernels.cuda.decode_step import DecoderShape, divides, layouts_of, shape_refused
from tilestack.models import ModelConfig, PagedCache
from tilestack.quant import Scheme
from tilestack.quant.linear import quantise_linear

QWEN3 = DecoderShape(28, 1024, 16, 8, 128, 3072, 151936, True)
LLAMA = DecoderShape(16, 2048, 32, 8, 64, 8192, 128256, False)
FITTING = dict(vocabulary=64, hidden=512, intermediate=1024, layers=1, heads=16, kv_heads=8, head_dim=64, positions=64)


def test_shapes_that_divide_evenly():
    assert layouts_of(QWEN3) == [(16, 8), (8, 16), (8, 8)]
    assert layouts_of(LLAMA) == [(8, 16), (8, 8)]
    assert not shape_refused(QWEN3)
    assert not shape_refused(LLAMA)
    assert layouts_of(replace(QWEN3, codes=True)) == [(16, 8), (8, 16), (8, 8)]
    assert layouts_of(replace(LLAMA, codes=True)) == [(16, 8), (8, 16), (8, 8)]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (dict(hidden=960), "hidden must be a multiple of 256 up to 2048, not 960"),
        (dict(hidden=4096), "hidden must be a multiple of 256 up to 2048, not 4096"),
        (dict(head_dim=96), "head_dim must be 64 or 128, not 96"),
        (dict(heads=12, kv_heads=4), "12 heads and 3072 units do not divide evenly"),
        (dict(intermediate=3000), "16 heads and 3000 units do not divide evenly"),
    ],
)
def test_shapes_that_do_not(changed, reason):
    assert reason in shape_refused(DecoderShape(**(QWEN3.__dict__ | changed)))


@pytest.mark.parametrize(
    ("rows", "columns", "even"),
    [(32, 1024, True), (64, 384, True), (48, 384, False), (24, 1024, False), (128, 192, True), (64, 192, False), (64, 24, False), (0.5, 256, False)],
)  # fmt: skip
def test_products_that_give_every_thread_as_much(rows, columns, even):
    assert divides(rows, columns) is even


@pytest.mark.parametrize(
    ("rows", "columns", "even"),
    [(32, 1024, True), (8, 1024, True), (64, 384, True), (48, 384, False), (128, 192, True), (64, 32, False), (0.5, 256, False)],
)  # fmt: skip
def test_products_of_codes_that_give_every_thread_as_much(rows, columns, even):
    assert divides(rows, columns, codes=True) is even


def made(dtype=torch.bfloat16, **changed):
    decoder = models.Decoder(ModelConfig(**(FITTING | changed))).to(dtype).eval()
    return decoder, PagedCache(decoder.config, 5, 16, dtype)


def test_a_model_that_fits_is_refused_for_the_device_alone():
    decoder, cache = made()
    assert why_not(decoder, cache) == "CUDA C++ kernels need a CUDA tensor, not one on cpu"
    shape = shape_of(decoder.config)
    assert shape.constants(16, 8) == dict(
        LAYERS=1, HIDDEN=512, HEADS=16, KV_HEADS=8, HEAD_DIM=64, INTERMEDIATE=1024, VOCABULARY=64, QK_NORM=0, CODES=0,
        CLUSTER=16, CLUSTERS=8,
    )  # fmt: skip
    weights = weights_of(decoder.layers[0])
    assert [None if each is None else tuple(each.shape) for each in weights] == [
        (2048, 512), (512, 1024), (2048, 512), (512, 1024), (512,), (512,), None, None
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (dict(qkv_bias=True), "the model has biases"),
        (dict(windows=(4,)), "the model has windows"),
        (dict(experts=2, top_k=1, expert_intermediate=64), "the model has experts"),
        (dict(logit_softcap=30.0), "the model has capped logits"),
        (dict(qk_norm="projection"), "the model normalises all its queries together"),
        (dict(rope_scaling=dict(rope_type="dynamic", factor=2.0)), "the model's rotation depends on the length of a text"),
        (dict(dtype=torch.float32), "weights, keys and values must all be bfloat16"),
        (dict(hidden=320), "hidden must be a multiple of 256"),
    ],
)  # fmt: skip
def test_what_the_kernel_has_no_code_for_is_named(changed, reason):
    assert why_not(*made(**changed)).startswith(reason)


@pytest.mark.parametrize("path", ["layers.0", "layers.0.mlp.down"])
def test_a_module_that_is_listened_to_is_seen(path):
    decoder, cache = made()
    decoder.get_submodule(path).register_forward_hook(lambda *_: None)
    assert why_not(decoder, cache) == "modules of the model are wrapped or listened to"


def test_codes_of_fp8_fit_as_they_are_made():
    decoder, cache = made()
    quantise_weights(decoder, "fp8")
    assert why_not(decoder, cache) == "CUDA C++ kernels need a CUDA tensor, not one on cpu"
    assert shape_of(decoder.config, codes=True).constants(16, 8)["CODES"] == 1
    weights = weights_of(decoder.layers[0])
    assert [None if each is None else (each.dtype, *each.shape) for each in weights] == [
        *((torch.float8_e4m3fn, *shape) for shape in [(2048, 512), (512, 1024), (2048, 512), (512, 1024)]),
        (torch.bfloat16, 512), (torch.bfloat16, 512), None, None,
        *((torch.float32, rows, 1) for rows in (2048, 512, 2048, 512)),
    ]  # fmt: skip


OTHER_CODES = "linear layers of the model are of other codes than fp8 with a scale for each output"


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_weights_of_other_codes_are_a_reason(format):
    decoder, cache = made()
    quantise_weights(decoder, format)
    assert why_not(decoder, cache) == OTHER_CODES


def test_layers_of_codes_that_differ_are_a_reason():
    decoder, cache = made()
    blocks = Scheme("fp8", group=128, activations="fp8", blocks=True)
    qkv, output, gate_up, down = linears_of(decoder.layers[0])
    for layer in (qkv, gate_up, down):
        quantise_linear(layer, Scheme("fp8"))
    assert why_not(decoder, cache) == "some linear layers of the model are quantised, and others are not"
    quantise_linear(output, blocks)
    assert why_not(decoder, cache) == OTHER_CODES
    numbers = torch.randn(512, 1024)
    output.codes, output.code_scale, output.code_zero = Scheme("fp8").round_to_nearest(numbers)
    assert why_not(decoder, cache).startswith("CUDA C++ kernels need")
    output.codes = torch.empty(512 * 1024 + 1, dtype=torch.float8_e4m3fn)[1:].view(512, 1024)
    assert why_not(decoder, cache) == "codes and scales must lie contiguously, on 16 bytes"


def test_every_setting_that_the_kernel_ignores_is_a_setting():
    fields = ModelConfig.__dataclass_fields__
    assert set(PLAIN) <= set(fields)
    # The rest it knows of, or looks at by another name.
    known = {
        "vocabulary",
        "hidden",
        "intermediate",
        "layers",
        "heads",
        "kv_heads",
        "head_dim",
        "family",
        "positions",
        "norm_eps",
        "tied",
        "qk_norm",
    }
    known |= {"attention_scale", "initial_std", "bos", "eos", "pad"}
    known |= {"rope_base", "rope_scaling", "local_rope_base"}  # in the tables of angles
    of_experts_and_latents = {name for name in fields if name.startswith(("expert", "group", "top_", "shared", "dense", "normalise"))}  # fmt: skip
    of_experts_and_latents |= {"kv_rank", "q_rank", "nope_dim", "rope_dim", "value_dim"}
    assert set(fields) == set(PLAIN) | known | of_experts_and_latents


@pytest.mark.parametrize("settings", [dict(graphs=True), dict()])
def test_where_there_is_none_decoding_goes_on_and_says_why(settings, caplog):
    decoder = decoder_of()
    answers = {}
    for decode in ("operators", "persistent"):
        with caplog.at_level(logging.WARNING, "tilestack.engine"):
            engine = Engine(decoder, None, EngineSettings(page=4, max_sequences=2, kv_memory=1 << 16, decode=decode, **settings))  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        answers[decode] = LLM(engine).run([Request("one", [1, 2, 3], params)])[0].completions[0].ids
    assert answers["operators"] == answers["persistent"]
    (record,) = caplog.records
    assert record.message.startswith("decoding is not persistent: ")


def test_another_way_to_decode_is_refused():
    with pytest.raises(
        ValueError, match="no way to decode is called 'fast'; choose persistent or operators, or leave it out"
    ):
        EngineSettings(decode="fast")


def test_a_layout_without_room_on_the_gpu_gives_way_to_the_next(monkeypatch):
    asked = []

    class Functions:
        def __init__(self, source, **constants):
            asked.append(constants["CLUSTER"])
            self.decode_step_fits = constants["CLUSTER"]

    def call(function, device):
        if function == 16:
            raise RuntimeError("decode_step_fits: no room")

    monkeypatch.setattr(decode_step, "library", Functions)
    monkeypatch.setattr(decode_step, "call", call)
    assert decode_step.fitting_library(QWEN3, torch.device("cuda"))[1] == 16
    assert asked == [16, 8]
    monkeypatch.setattr(decode_step, "LAYOUTS", ((16, 8),))
    with pytest.raises(ValueError, match="8 clusters of 16 blocks: decode_step_fits: no room"):
        decode_step.fitting_library(QWEN3, torch.device("cuda"))
