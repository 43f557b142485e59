"""Parts of parallel training one by one, as a process of a group runs them."""

import os
import signal
import time
from pathlib import Path
from unittest import mock

import pretraining
import torch
import torch.distributed as dist
from rich.console import Console
from safetensors.torch import load_file, save_file
from small_runs import batch, decoder

from tilestack import optim
from tilestack.kernels.loss import linear_cross_entropy
from tilestack.parallel import vocabulary
from tilestack.parallel.collectives import entered, summed
from tilestack.parallel.mesh import Layout, Mesh
from tilestack.parallel.placement import Placement, local_part
from tilestack.parallel.replicas import GradientBuckets
from tilestack.parallel.tensor import bounds
from tilestack.parallel.vocabulary import vocabulary_loss, vocabulary_losses
from tilestack.train.errors import Interrupted
from tilestack.train.next_token import next_token_loss
from tilestack.train.optimizers import AveragedWeights
from tilestack.train.pretrain import Pretraining, pretrain
from tilestack.train.whole_state import WholeState

WORDS, HIDDEN = 23, 8
MANY_ROWS = 300
LABELS = [0, 22, 11, 12, -100, 7, 10, -100]
DTYPES = {"float64": torch.float64, "bfloat16": torch.bfloat16}


def head(dtype: torch.dtype):
    """Hidden states, a head, and their labels."""
    numbers = torch.Generator().manual_seed(5)
    make = lambda *shape: torch.randn(*shape, generator=numbers, dtype=torch.float64).to(dtype)
    return make(len(LABELS), HIDDEN), make(WORDS, HIDDEN), torch.tensor(LABELS)


def divided_heads(group) -> dict[str, torch.Tensor]:
    """Losses and gradients of a head whose words are divided, in chunks of three rows, with and without a cap, in sum and single;
    what arrives at the loss in half precision; and labels that are none."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    start, end = bounds(WORDS, ranks)[rank : rank + 2]
    found = {}
    for name, dtype in DTYPES.items():
        for cap in (0.0, 2.0):
            x, weight, labels = head(dtype)
            x, weight = x.requires_grad_(), weight[start:end].clone().requires_grad_()
            with mock.patch.object(vocabulary, "rows_per_chunk", return_value=3):
                loss = vocabulary_loss(x, weight, labels, cap, start, WORDS, group)
            (loss * 3).backward()
            dist.all_reduce(x.grad, group=group)
            found |= {f"{name} {cap} loss": loss, f"{name} {cap} dx": x.grad, f"{name} {cap} dweight": weight.grad}
            with mock.patch.object(vocabulary, "rows_per_chunk", return_value=3):
                losses = vocabulary_losses(x, weight, labels, cap, start, WORDS, group)
                dx, dweight = torch.autograd.grad(losses, (x, weight), of_rows(losses))
            dist.all_reduce(dx, group=group)
            found |= {
                f"{name} {cap} losses": losses,
                f"{name} {cap} dx by rows": dx,
                f"{name} {cap} dweight by rows": dweight,
            }
    x, weight, labels = head(torch.bfloat16)
    leaves = x.requires_grad_(), weight[start:end].requires_grad_()
    loss = vocabulary_loss(*leaves, labels, 0.0, start, WORDS, group)
    for name, total in {"arriving 1": loss, "arriving 1 / 60000": loss / 60000}.items():
        dx, dweight = torch.autograd.grad(total, leaves, retain_graph=True)
        found |= {f"{name} dx": dx, f"{name} dweight": dweight}
    x, weight, labels = head(torch.float64)
    for number, unknown in enumerate((WORDS, -1)):
        labels[3] = unknown
        found[f"unknown {number}"] = vocabulary_loss(x, weight[start:end], labels, 0.0, start, WORDS, group)
    return found


def many_rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, a head, and labels, of logits so far apart that no dtype holds their exponentials."""
    numbers = torch.Generator().manual_seed(7)
    make = lambda *shape: torch.randn(*shape, generator=numbers, dtype=torch.float64)
    return make(MANY_ROWS, HIDDEN) * 500, make(WORDS, HIDDEN), torch.randint(WORDS, (MANY_ROWS,), generator=numbers)


def uneven_shares(group) -> dict[str, torch.Tensor]:
    """The loss of those, where a chunk of what 11 words are multiplied with is of 256 rows, and of 12 words of 128."""
    start, end = bounds(WORDS, group.size())[group.rank() :][:2]
    x, weight, labels = many_rows()
    x, weight = x.requires_grad_(), weight[start:end].clone().requires_grad_()
    with mock.patch.object(linear_cross_entropy, "CHUNK_BYTES", 256 * 11 * x.element_size()):
        loss = vocabulary_loss(x, weight, labels, 0.0, start, WORDS, group)
    loss.backward()
    dist.all_reduce(x.grad, group=group)
    return {"uneven loss": loss, "uneven dx": x.grad, "uneven dweight": weight.grad}


def of_rows(losses: torch.Tensor) -> torch.Tensor:
    """What arrives at single losses, for each another number, which no dtype rounds."""
    return torch.arange(1.0, 1 + len(losses)).to(losses)


def late_gradients(group) -> dict[str, torch.Tensor]:
    """Sums in buckets of a few bytes, of parameters one of which has a gradient on one rank alone, and in the next step on all."""
    rank = dist.get_rank(group)
    params = [torch.nn.Parameter(torch.arange(3.0 + n)) for n in range(4)]
    buckets = GradientBuckets(params, group, size=28)
    found = {}
    for step in range(2):
        for param in params:
            param.grad = None
        used = [p for n, p in enumerate(params) if n != 2 or rank == 0 or step == 1]
        total = sum((p * (rank + 1)).sum() for p in used)
        if step == 0:
            total.backward(retain_graph=True)  # an earlier micro-batch, which sends nothing
            found["before"] = params[0].grad.clone()
        buckets.start()
        total.backward()
        buckets.finish()
        found |= {f"grad {n} of step {step}": p.grad for n, p in enumerate(params)}
    return found


def sums_of_shared(group) -> dict[str, torch.Tensor]:
    """A sum over ranks of what is used beside it, and the gradient where one arrives at both."""
    x = torch.full((3,), 2.0, requires_grad=True)
    together = summed(x * 1, group)
    mine = x * 1
    (summed(mine, group) * mine).sum().backward()
    first, x.grad = x.grad, None
    (entered(x, group) + x).sum().backward()
    return {"summed": together, "beside a sum": first, "beside what entered": x.grad}


def said(texts: list[str]) -> torch.Tensor:
    """Texts as a tensor, with a line for each."""
    return torch.tensor(list("\n".join(texts).encode()))


def finds_what_the_first_made(mesh: Mesh, path: Path) -> bool:
    with mesh.first_alone():
        if mesh.first:
            time.sleep(0.3)  # which others would be sooner than
            path.write_text("whole")
        return path.exists()


def placed_decoder(mesh: Mesh) -> dict[str, torch.Tensor]:
    """A decoder that is another on every rank before it is placed: its embeddings, also of words that it does not have, and
    the gradient of what its logits are made from."""
    model = decoder("qwen2", seed=mesh.rank)
    Placement(model, mesh)
    hidden, arriving = logits_and_gradient()
    (found,) = torch.autograd.grad(model.logits(hidden), hidden, arriving)
    with torch.no_grad():
        return {"embedded": model.embedded(torch.tensor([[0, 96, 97, -1, 48]])), "gradient by logits": found}


def logits_and_gradient() -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states, and the gradient that arrives at their logits."""
    numbers = torch.Generator().manual_seed(6)
    make = lambda size: torch.randn(1, 3, size, generator=numbers, dtype=torch.float64)
    return make(decoder("qwen2").config.hidden).requires_grad_(), make(97)


def half_mixtures() -> dict[str, torch.Tensor]:
    """Gradients of a mixture of experts in bfloat16, its router in float32, whole on both processes and sharded; and whether
    what an optimizer steps is what the sharded model has."""
    mesh, found = Mesh(Layout(data=2)), {}
    for shard in (False, True):
        model = decoder("qwen3_moe").float().bfloat16()
        placement = Placement(model, mesh, shard)
        model.to(torch.bfloat16)  # again, as a trainer does
        placement.start_backward(last=True)
        next_token_loss(model, batch(dist.get_rank())).backward()
        placement.finish_backward()
        for name, param in placement.parameters.items():
            found[f"{shard} {name}"] = placement.whole(name, param.grad)
    shared = [param.data_ptr() == local_part(of_model).data_ptr() for param, of_model in zip(
        placement.parameters.values(), model.parameters(), strict=True)]  # fmt: skip
    return found | {"shared": torch.tensor(shared)}


def saved_and_loaded(folder: Path) -> dict[str, torch.Tensor]:
    """Whether a sharded model has its weights, biases of routers among them, its averages and momenta again, once the first
    process has written them and every process has read them; and whether what was written follows the model meanwhile."""
    mesh = Mesh(Layout(data=2))
    model = decoder("qwen3_moe")
    model.layers[1].mlp.router.bias = torch.arange(8.0)
    placement = Placement(model, mesh, shard=True)
    learned = placement.parameters
    optimizer, average = optim.SGD(list(learned.values()), lr=0.5, momentum=0.9), AveragedWeights(learned, 0.5)
    numbers = torch.Generator().manual_seed(mesh.rank)
    for param in learned.values():
        param.grad = torch.randn(param.shape, generator=numbers, dtype=param.dtype)
    routers = {"router.bias": model.layers[1].mlp.router.bias}
    optimizer.step()
    for mean in average.averages.values():
        mean.normal_(generator=numbers)
    whole = WholeState(placement, optimizer, average)
    momenta = lambda: {f"{name}.momentum": optimizer.state[x]["momentum_buffer"] for name, x in learned.items()}
    here = lambda: learned | routers | {f"{name}.mean": x for name, x in average.averages.items()} | momenta()
    before = {name: x.detach().clone() for name, x in here().items()}
    groups = {"weights": whole.weights(model.state_dict()), "averages": whole.averages()}
    states = whole.optimizer_state()
    kept = {name: {key: x.clone() for key, x in group.items()} for name, group in groups.items()}
    with torch.no_grad():
        for x in here().values():
            x.zero_()
    follows = [key for name, group in groups.items() for key, x in group.items() if not torch.equal(x, kept[name][key])]
    if mesh.first:
        groups["momenta"] = {str(n): state["momentum_buffer"] for n, state in states["state"].items()}
        for name, group in groups.items():
            save_file(group, folder / f"{name}.safetensors")
    mesh.wait_for_all()
    read = {name: load_file(folder / f"{name}.safetensors") for name in ("weights", "averages", "momenta")}
    whole.load_weights(read["weights"])
    whole.load_averages(read["averages"])
    whole.load_optimizer(states | {"state": {int(n): {"momentum_buffer": x} for n, x in read["momenta"].items()}})
    again = [name for name, x in here().items() if not torch.equal(x, before[name])]
    return {"follows": torch.tensor(len(follows)), "not as before": torch.tensor(len(again))}


class AskedOnce(Pretraining):
    """One process is asked to stop in its third step; the others are not."""

    def next_batch(self):
        self.taken = getattr(self, "taken", 0) + 1
        if self.taken == 3 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().next_batch()


def stopped_by_one(texts: Path, folder: Path) -> dict[str, torch.Tensor]:
    """The texts are there for the first process alone, which prepares them."""
    from tilestack.train import pretrain as module

    module.Pretraining = AskedOnce
    try:
        texts = texts if dist.get_rank() == 0 else texts.with_name("not on this machine.jsonl")
        pretrain(pretraining.recipe(texts, 50, 1), folder / "stopped", console=Console(quiet=True))
    except Interrupted as stopped:
        return {"code": torch.tensor(stopped.code), "seed": torch.tensor(torch.initial_seed())}
    finally:
        module.Pretraining = Pretraining
    return {}


def pieces(group, texts: Path, folder: Path) -> dict[str, torch.Tensor]:
    mesh = Mesh(Layout(tensor=dist.get_world_size(group)))
    found = (
        divided_heads(group)
        | uneven_shares(group)
        | late_gradients(group)
        | sums_of_shared(group)
        | placed_decoder(mesh)
    )
    found["many"] = mesh.sums({"tokens": torch.tensor(2**24 + 1)}, "tensor")["tokens"]
    found |= {"texts": said(mesh.texts("é" * (dist.get_rank(group) + 1)))}
    found["largest"] = torch.tensor(mesh.largest(dist.get_rank(group) * 7 + 2))
    found["there"] = torch.tensor(finds_what_the_first_made(mesh, folder / "made"))
    found |= {f"mixture {name}": x for name, x in half_mixtures().items()}
    return found | saved_and_loaded(folder) | stopped_by_one(texts, folder)
