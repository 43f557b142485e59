"""A model placed on a mesh: which part of each parameter this process has, and what the processes tell each other in a step.

    pipeline  a rank has some of the layers (stages.py)
    tensor    parameters are cut among the ranks of a model, or of a stage (tensor.py)
    expert    the experts of mixtures are dealt to ranks that read other texts (experts.py); those with the same experts sum
              their gradients, and shard leaves them as they are
    shard     what a rank has is cut once more, by rows, among the ranks that train it on other texts: FSDP2 gathers a layer
              when it is needed, and sums its gradients on their way back into shards. Adapters (LoRA) are few and thin, and
              stay as they are: what is divided is the frozen model beside them
    else      those ranks have it whole, and sum gradients in buckets (replicas.py)

Optimizers and averages work on `parameters`, plain tensors in which this process's part lies, whatever the layout.
`whole` and `part` go between them and the tensors of one process, which is what checkpoints hold.
"""

import copy
import dataclasses
import math
import warnings
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilestack.models.decoder import Decoder
from tilestack.nn.lora import lora_parameters
from tilestack.nn.router import Router
from tilestack.optim.clip import coefficient_of
from tilestack.optim.exact_scale import scale_exactly_
from tilestack.parallel.collectives import gathered
from tilestack.parallel.experts import expert_cuts, refuse_experts, split_experts
from tilestack.parallel.mesh import Mesh
from tilestack.parallel.replicas import GradientBuckets
from tilestack.parallel.stages import StageDecoder, owner_of, split_stages
from tilestack.parallel.tensor import Cut, adapter_cuts, cuts, partial, refuse_split, split_decoder


class Placement:
    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh | None = None,
        shard: bool = False,
        device: torch.device | None = None,
        schedule: str = "1f1b",
    ):
        """Place a model, which is the same on all processes: where it is to be divided it may lie on the host, and goes to the
        device in parts. `schedule` is that of pipeline stages, where there are some."""
        self.model, self.mesh = model, mesh or Mesh()
        self.shard = shard and self.mesh.size("replicas") > 1
        self.adapters = {param for _, param in lora_parameters(model)}
        everything = dict(model.named_parameters())
        self.shapes = {name: param.shape for name, param in everything.items()}  # of the whole model
        self.cuts: dict[str, Cut] = {}
        self.partial: set[str] = set()
        self.expert_cuts: dict[str, Cut] = {}
        if self.shard or any(self.mesh.size(side) > 1 for side in ("tensor", "pipeline", "expert")):
            self.whole_without_weights = without_weights(model)
        if self.mesh.size("tensor") > 1:
            assert isinstance(model, Decoder)
            refuse_split(model.config, self.mesh.size("tensor"))
            self.cuts, self.partial = cuts(model.config) | adapter_cuts(model), partial(model)
            split_decoder(model, self.mesh.group("tensor"))
        if (ranks := self.mesh.size("expert")) > 1:
            refuse_experts(cast(Any, model).config, ranks)
            self.expert_cuts = expert_cuts(model)
            split_experts(model, self.mesh.group("expert"))
        # Beside what FSDP2 divides.
        self.undivided = self.adapters | {everything[name] for name in self.expert_cuts}
        self.owners: dict[str, int] = {}  # of pipeline stages: the process that has a parameter, the first of two
        self.tied: dist.ProcessGroup | None = None  # of the two that have the weight of embedding and head
        if (processes := self.mesh.size("pipeline")) > 1:
            assert isinstance(model, Decoder)
            split_stages(model, self.mesh.group("pipeline"), schedule)
            assert isinstance(model, StageDecoder)
            self.owners = {name: owner_of(name, model.stages, processes) for name in self.shapes}
            if model.config.tied and self.mesh.index("pipeline") in (0, processes - 1):
                self.tied = ends_of(self.mesh.group("pipeline"))
        if self.mesh.world > 1:
            self._distribute(everything, device or torch.device("cpu"))
        named = dict(model.named_parameters())
        self.sharded = {name for name, param in named.items() if self.shard and param not in self.undivided}
        self.of_model = {name: param for name, param in named.items() if param.requires_grad}
        self.parameters: dict[str, Any] = {
            name: nn.Parameter(local_part(param)) if name in self.sharded else param
            for name, param in self.of_model.items()
        }
        self.buckets: list[GradientBuckets] = []
        replicated = [name for name in self.parameters if name not in self.sharded]
        for side, names in (
            ("replicas", [name for name in replicated if name not in self.expert_cuts]),
            ("copies", [name for name in replicated if name in self.expert_cuts]),
        ):
            if names and self.mesh.size(side) > 1:
                summed = [self.parameters[name] for name in names]
                self.buckets.append(GradientBuckets(summed, self.mesh.group(side)))

    @property
    def divided(self) -> bool:
        """Whether this process has only a part of the model."""
        return self.shard or bool(self.cuts) or bool(self.owners) or bool(self.expert_cuts)

    def _distribute(self, left: dict[str, nn.Parameter], device: torch.device) -> None:
        """Give every process its part of rank 0's weights, a layer at a time; `left` are all parameters of the whole model."""
        here = {name for name, _ in self.model.named_parameters()}
        numbers = sorted({int(name.split(".")[1]) for name in left if name.startswith("layers.")})
        for prefix in (*(f"layers.{number}." for number in numbers), ""):  # the model itself last: what no layer has
            for name in [name for name in left if name.startswith(prefix)]:
                param = left.pop(name)
                whole = param.detach().to(device)
                dist.broadcast(whole, 0)
                if name in here:
                    param.data = self._cut(name, whole)
            if not any(name.startswith(prefix) for name in here):
                continue  # another stage's
            unit = self.model.get_submodule(prefix.removesuffix("."))
            unit.to(device)
            if self.shard:
                for router in float32_routers(unit) if unit is not self.model else ():
                    self._shard(router, root=False)
                self._shard(unit, root=unit is self.model)
        for module in self.model.modules() if self.cuts else ():
            if isinstance(module, nn.Linear):
                module.out_features, module.in_features = module.weight.shape

    def _shard(self, unit: nn.Module, root: bool) -> None:
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

        # A mixture's result is a view, of which FSDP2 warns, as changes in place would lose its hooks: nobody makes any.
        warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(FSDPLayer\) returned a view tensor", UserWarning)
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32) if half(unit) else MixedPrecisionPolicy()
        made = fully_shard(
            unit, mesh=self.mesh.sides["replicas"], mp_policy=policy, ignored_params=cast(Any, self.undivided)
        )
        assert isinstance(made, FSDPModule)
        made.set_gradient_divide_factor(1.0)  # a sum: the step divides by the tokens of all
        made.set_force_sum_reduction_for_comms(True)  # and by gloo, which knows no other
        if root:
            register_fsdp_forward_method(unit, "run_stage" if self.owners else "hidden")
            if (
                self.owners
            ):  # losses of several micro-batches may wait for their backward, which begins with the head's weight
                made.set_reshard_after_backward(False, recurse=False)

    @property
    def _tensor_place(self) -> tuple[int, int]:
        return self.mesh.index("tensor"), self.mesh.size("tensor")

    def _cut(self, name: str, whole: Tensor) -> Tensor:
        """What a process has of a tensor of a parameter's shape, before `shard` divides it."""
        if (cut := self.cuts.get(name)) is not None:
            whole = cut.part(whole, *self._tensor_place)
        if (cut := self.expert_cuts.get(name)) is not None:
            whole = cut.part(whole, self.mesh.index("expert"), self.mesh.size("expert"))
        return whole

    def start_backward(self, last: bool, times: int = 1) -> None:
        """Before each backward of a step; in the `last` one gradients are sent as they come. Where several come together, it is
        the last of so many `times`."""
        for buckets in self.buckets if last else ():
            buckets.start(times)

    def finish_backward(self) -> None:
        """After the last backward of a step: let every parameter have its part of the gradient of all processes' losses."""
        for buckets in self.buckets:
            buckets.finish()
        if self.owners:
            self.reshard()
        for name, param in self.of_model.items():
            if name in self.sharded:
                self.parameters[name].grad = None if param.grad is None else local_part(param.grad)
        for name in sorted(self.partial & self.parameters.keys()):
            if (grad := self.parameters[name].grad) is not None:
                self.mesh.sum(grad, "tensor")
        if self.tied is not None:
            dist.all_reduce(self.parameters["embedding.weight"].grad, group=self.tied)

    def drop_gradients(self) -> None:
        """Beside those of `parameters`, which the optimizer drops."""
        for name in self.sharded & self.of_model.keys():
            self.of_model[name].grad = None

    def clip(self, most: float) -> Tensor:
        """The norm of the gradient of all processes, of which each parameter counts once; above `most` it is scaled down,
        unless that is 0."""
        found = [(name, param.grad) for name, param in self.parameters.items() if param.grad is not None]
        stage, first = self.mesh.index("pipeline"), self.mesh.index("tensor") == 0
        counted = [
            (name, grad)
            for name, grad in found
            if (first or name in self.cuts) and self.owners.get(name, stage) == stage
        ]
        parts = sum_of_squares([grad for name, grad in counted if name in self.sharded], found[0][1])
        if self.shard:
            self.mesh.sum(parts, "replicas")
        experts = sum_of_squares([grad for name, grad in counted if name in self.expert_cuts], found[0][1])
        self.mesh.sum(experts, "expert")
        others = [grad for name, grad in counted if name not in self.sharded and name not in self.expert_cuts]
        square = parts + experts + sum_of_squares(others, found[0][1])
        self.mesh.sum(square, "tensor")
        self.mesh.sum(square, "pipeline")
        norm = square.sqrt()
        if most:
            scale_exactly_([grad for _, grad in found], coefficient_of(norm, most))
        return norm

    def whole(self, name: str, local: Tensor) -> Tensor:
        """All of what this process has a part of: a parameter, or something of its shape. Every process asks for it; where
        another stage has the parameter, `local` is any tensor of the same dtype."""
        if name in self.of_model or not self.owners:
            local = self._whole_of_stage(name, local)
        if name in self.owners:
            mine = self.owners[name] == self.mesh.index("pipeline")
            local = local.contiguous() if mine else local.new_empty(self.shapes[name])
            dist.broadcast(local, group_src=self.owners[name], group=self.mesh.group("pipeline"))
        return local

    def _whole_of_stage(self, name: str, local: Tensor) -> Tensor:
        shape, cut = tuple(self.shapes[name]), self.cuts.get(name)
        rank, ranks = self._tensor_place
        mine = shape if cut is None else cut.shape(shape, rank, ranks)
        if (by_expert := self.expert_cuts.get(name)) is not None:
            shares = self.mesh.size("expert")
            shapes = [by_expert.shape(mine, r, shares) for r in range(shares)]
            local = by_expert.join(gathered(local, shapes, self.mesh.group("expert")))
        if name in self.sharded:
            group = self.mesh.group("replicas")
            local = torch.cat(
                gathered(local, [chunk_shape(mine, r, self._replicas) for r in range(self._replicas)], group)
            )
        if cut is not None:
            local = cut.join(
                gathered(local, [cut.shape(shape, r, ranks) for r in range(ranks)], self.mesh.group("tensor"))
            )
        return local

    def part(self, name: str, whole: Tensor) -> Tensor:
        """What this process has of a tensor of a parameter's shape."""
        whole = self._cut(name, whole)
        if name in self.sharded:
            rows = chunk_rows(len(whole), self._replicas)
            whole = whole[self.mesh.index("replicas") * rows :][:rows]
        return whole

    @property
    def _replicas(self) -> int:
        return self.mesh.size("replicas")

    def reshard(self) -> None:
        """Forget what was gathered and is kept: for forwards without a backward, and for those of a pipeline."""
        if self.shard:
            self.model.reshard()  # type: ignore[operator]

    def whole_copy(self, model: Any) -> Any:
        """A model that this process can run by itself: the placed one as it is, or where that is divided, a whole copy of it on
        the device. Every process asks."""
        return self.whole_model(everywhere=True) if self.divided else model

    def whole_state(self) -> Iterator[tuple[str, Tensor]]:
        """The model's state dict as one process has it, a tensor at a time. Every process asks for all of it."""
        here = {name: local_part(value) for name, value in self.model.state_dict().items()}
        another = next(local_part(param) for param in self.model.parameters())  # in place of what other stages have
        for name in self.shapes:
            yield name, self.whole(name, here.get(name, another))
        yield from ((name, value) for name, value in here.items() if name not in self.shapes)

    def whole_model(self, everywhere: bool = False) -> Any:
        """The model as one process has it, on the host of the first, or `everywhere` on the device: parameters are gathered
        one by one. Every process asks."""
        if not self.divided:
            return self.model
        made, here = copy.deepcopy(self.whole_without_weights), cast(Any, self.model)
        made.config = dataclasses.replace(made.config, eos=here.config.eos)  # which training may add to
        for name, tensor in self.whole_state():
            if everywhere or self.mesh.first:
                path, _, attribute = name.rpartition(".")
                given = tensor if everywhere else tensor.cpu()
                given = nn.Parameter(given, requires_grad=False) if name in self.shapes else given
                setattr(made.get_submodule(path), attribute, given)
        return made.to(next(self.model.parameters()).device) if everywhere else made


def without_weights(model: nn.Module) -> Any:
    """A copy of a model, whose parameters are on the meta device."""
    empty = lambda param: nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=False)
    return copy.deepcopy(model, {id(param): empty(param) for param in model.parameters()})


def ends_of(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the first rank of another and its last, which both ask for it."""
    ends = [dist.get_global_rank(group, place) for place in (0, group.size() - 1)]
    return dist.new_group(ends, use_local_synchronization=True)


def local_part(tensor: Any) -> Tensor:
    """The tensor of this process behind one that FSDP2 has divided; the tensor itself where it has not."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def chunk_rows(rows: int, ranks: int) -> int:
    """Rows of a shard, the last of which may be shorter or empty, as FSDP2 divides them."""
    return math.ceil(rows / ranks)


def chunk_shape(shape: tuple[int, ...], rank: int, ranks: int) -> tuple[int, ...]:
    rows = chunk_rows(shape[0], ranks)
    return (max(0, min(rows, shape[0] - rank * rows)), *shape[1:])


def sum_of_squares(grads: list[Tensor], like: Tensor) -> Tensor:
    """At least in float32."""
    wide = torch.promote_types(like.dtype, torch.float32)
    if not grads:
        return torch.zeros((), dtype=wide, device=like.device)
    return torch.stack(torch._foreach_norm(grads, 2, dtype=wide)).square().sum()


def float32_routers(layer: nn.Module) -> list[nn.Module]:
    """Routers that stay in float32 in a layer of half precision: a unit of FSDP2 has one dtype, so they are units of their
    own."""
    return [module for module in layer.modules() if isinstance(module, Router)] if half(layer) else []


def half(module: nn.Module) -> bool:
    return any(param.dtype.itemsize < 4 for param in module.parameters())
