"""Small random models of transformers, built from a configuration: patched, they must be as good as before."""

import copy

import pytest
import torch
import transformers
from transformers.activations import ACT2CLS
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

import tilestack
from tilestack.lab.proof.oracle import judge, own_error

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, head_dim=8, max_position_embeddings=64)
GPT2_SIZES = dict(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0)
GPT2_SIZES |= dict(attn_pdrop=0, bos_token_id=0, eos_token_id=0)
MODELS = {
    "Llama": (SIZES, dict(linear=15, rms_norm=5, silu=2)),
    "Qwen3": (SIZES | dict(tie_word_embeddings=True), dict(linear=15, rms_norm=9, silu=2)),
    "Gemma": (SIZES, dict(linear=15, gelu=2)),
    "GPT2": (GPT2_SIZES, dict(linear=9, layer_norm=5, gelu=2)),
}


def build(family, dtype=torch.float32):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**MODELS[family][0])
    model = getattr(transformers, f"{family}LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if "norm" in name or "ln_" in name:  # initialised with ones or zeros, which hide a wrong use of them
            torch.nn.init.normal_(parameter, mean=1, std=0.5)
    return model.to(dtype)


def gradients_of(model, ids):
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("family", MODELS)
def test_logits_and_gradients_are_as_good_as_before(family, as_good_as):
    theirs, ours, exact = build(family), build(family), build(family, torch.float64)
    batches = torch.randint(64, (6, 2, 11))
    assert tilestack.patch(ours).counts == MODELS[family][1]
    as_good_as(*(model(batches[0]).logits for model in (ours, theirs, exact)))
    # The model before may be exact by luck in a gradient of few elements, so its error is the worst of several batches.
    before = [list(zip(gradients_of(theirs, ids), gradients_of(exact, ids), strict=True)) for ids in batches]
    for position, gradient in enumerate(gradients_of(ours, batches[0])):
        errors = [own_error(*found[position]) for found in before]
        verdict = judge(gradient, *before[0][position], tuple(map(max, zip(*errors, strict=True))))
        assert not verdict.message, verdict.message


@pytest.mark.parametrize("family", MODELS)
def test_unpatch_restores_the_model(family):
    model, ids = build(family), torch.randint(64, (2, 11))
    before, classes = model(ids).logits, [type(module) for module in model.modules()]
    tilestack.patch(model)
    assert torch.equal(copy.deepcopy(model)(ids).logits, model(ids).logits)
    tilestack.unpatch(model)
    assert [type(module) for module in model.modules()] == classes
    assert torch.equal(model(ids).logits, before)


def test_a_patched_model_generates_trains_and_saves(tmp_path):
    model, ids = build("Qwen3"), torch.randint(64, (2, 11))
    tilestack.patch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    generated = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(loaded.generate(ids, max_new_tokens=4, do_sample=False), generated)


def test_a_patched_model_compiles_into_one_graph(as_good_as):
    model, ids = build("Llama"), torch.randint(64, (2, 11))
    before, truth = model(ids, use_cache=False).logits, build("Llama", torch.float64)(ids, use_cache=False).logits
    tilestack.patch(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    as_good_as(compiled(ids, use_cache=False).logits, before, truth)


def test_gemmas_norms_are_left_alone():
    report = tilestack.patch(build("Gemma"))
    assert list(report.left.values()) == 5 * ["its values or result dtypes are not those of rms_norm"]


class PlusOneRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states) + super().forward(hidden_states) / self.weight


class OutsideRMSNorm(LlamaRMSNorm):
    """Adds eps to the root instead of under it."""

    def forward(self, hidden_states):
        root = hidden_states.float().square().mean(-1, keepdim=True).sqrt()
        return self.weight * (hidden_states / (root + self.variance_epsilon)).to(hidden_states.dtype)


class CentredRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))


class UnweightedRMSNorm(LlamaRMSNorm):
    """Has a weight, and does not use it; while that is still ones, nobody would notice."""

    def forward(self, hidden_states):
        return super().forward(hidden_states) / self.weight


class GatedRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states, gate=None):
        return super().forward(hidden_states) * (1 if gate is None else gate)


class BrokenRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states):
        raise RuntimeError("not here")


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (PlusOneRMSNorm, "its values or result dtypes are not those of rms_norm"),
        (OutsideRMSNorm, "its values or result dtypes are not those of rms_norm"),
        (CentredRMSNorm, "its values or result dtypes are not those of rms_norm"),
        (UnweightedRMSNorm, "its values or result dtypes are not those of rms_norm"),
        (GatedRMSNorm, "it is not a function of one tensor, as rms_norm is"),
        (BrokenRMSNorm, "trying it out as rms_norm raised RuntimeError: not here"),
    ],
)
@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-12])
def test_a_name_alone_convinces_nobody(norm, reason, eps):
    module = norm(32, eps)
    assert tilestack.patch(module).left == {"": reason}
    assert type(module) is norm


@pytest.mark.parametrize("norm", [LlamaRMSNorm, Olmo2RMSNorm, T5LayerNorm])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_norms_keep_their_own_result_dtype(norm, weight_dtype, x_dtype):
    module, x = norm(32).to(weight_dtype), torch.randn(2, 32, dtype=x_dtype)
    expected = module(x).dtype
    assert tilestack.patch(module).counts == dict(rms_norm=1)
    assert module(x).dtype == expected


FAMILIAR = {"gelu", "gelu_python", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh"}
FAMILIAR |= {"silu", "swish", "relu", "sigmoid", "tanh"}


@pytest.mark.parametrize("name", sorted(ACT2CLS))
def test_activations_are_recognised_by_their_values(name, as_good_as):
    torch.manual_seed(0)
    kind, options = ACT2CLS[name] if isinstance(ACT2CLS[name], tuple) else (ACT2CLS[name], {})
    module, x = kind(**options), torch.randn(4, 300) * 4
    report = tilestack.patch(module)
    if name not in FAMILIAR:
        assert not report.swapped
        assert type(module) is kind
        return
    assert report.swapped[""] == ("gelu" if "gelu" in name else name.replace("swish", "silu"))
    as_good_as(module(x), kind(**options)(x), kind(**options)(x.double()))


def test_models_without_memory_are_patched():
    with torch.device("meta"):
        model = build("Llama")
    assert tilestack.patch(model).counts == MODELS["Llama"][1]
