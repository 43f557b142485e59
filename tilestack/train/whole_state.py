"""What a run learns as one process has it, whatever part of it this process holds: a checkpoint is the same for every layout.

    one process, or all with the whole model      tensors go to the disk as they are, and come from it
    a model that is divided                       tensor by tensor, parts are gathered on the first process's host, which
                                                  writes; coming back, every process takes its part

Optimizers number their parameters alike on every process, so their states are found by the same names. Of pipeline stages each
has a numbering of its own: what is saved has that of all parameters together, in the same order.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from tilestack.parallel.placement import Placement, local_part
from tilestack.train.optimizers import AveragedWeights, hidden_and_others, load_states


class WholeState:
    """Where a model is divided, every process asks for the same at the same time, and all but the first get nothing."""

    def __init__(self, placement: Placement, optimizer: Any, average: AveragedWeights | None):
        self.placement, self.optimizer, self.average = placement, optimizer, average
        names = {id(param): name for name, param in placement.parameters.items()}
        self.here = [
            [names[id(param)] for param in group["params"]] for group in optimizer.param_groups
        ]  # names by group
        self.groups = self.here  # and those of all processes
        if placement.owners:
            shaped = [(name, torch.empty(shape, device="meta")) for name, shape in placement.shapes.items()]
            self.groups = [[name for name, _ in kind] for kind in hidden_and_others(shaped)]
        self.numbers = {name: number for number, name in enumerate(chain(*self.groups))}

    def weights(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Some of a model's state dict, whole; what is no parameter is the same on all processes."""
        return self._gathered(state)

    def averages(self) -> dict[str, Tensor]:
        assert self.average is not None
        return self._gathered(self.average.state_dict())

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's state dict; what has the shape of a parameter is whole."""
        saved = self.optimizer.state_dict()
        if not self.placement.divided:
            return saved
        local = {name: number for number, name in enumerate(chain(*self.here))}
        states: dict[int, dict[str, Any]] = {}
        for names, here in zip(self.groups, self.here, strict=True):
            for name in names:
                # All of a group have taken the same steps, so that those of another stage have states like any of this one.
                like = name if name in local else here[0]
                shape = self.placement.parameters[like].shape
                made = {
                    key: self._host(name if value.shape == shape else None, value)
                    if isinstance(value, Tensor)
                    else value
                    for key, value in saved["state"].get(local[like], {}).items()
                }
                if made:
                    states[self.numbers[name]] = made
        groups = [
            group | {"params": [self.numbers[name] for name in names]}
            | ({"param_names": names} if "param_names" in group else {})
            for group, names in zip(saved["param_groups"], self.groups, strict=True)
        ]  # fmt: skip
        return {"state": states, "param_groups": groups}

    def shaped(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Tensors of the shapes that these have when they are whole."""
        if not self.placement.divided:
            return state
        shapes = {name: x.shape for name, x in state.items()} | self.placement.shapes
        return {name: torch.empty(shapes[name], device="meta") for name in self.placement.owners | dict(state)}

    def load_weights(self, saved: Mapping[str, Tensor]) -> None:
        model = self.placement.model
        if not self.placement.divided:
            model.load_state_dict(saved, strict=False)
            return
        for kept in (dict(model.named_parameters()), dict(model.named_buffers())):
            for name in kept.keys() & saved.keys():
                self._fill(name, local_part(kept[name]), saved[name])

    def load_averages(self, saved: Mapping[str, Tensor]) -> None:
        assert self.average is not None
        self.average.load_state_dict({name: self.placement.part(name, average) for name, average in saved.items()})

    def load_optimizer(self, saved: dict[str, Any]) -> None:
        if self.placement.divided:
            states = {}
            for number, name in enumerate(chain(*self.here)):
                shape = self.placement.shapes[name]
                if state := saved["state"].get(self.numbers[name]):
                    states[number] = {
                        key: self.placement.part(name, value).clone()
                        if getattr(value, "shape", None) == shape
                        else value
                        for key, value in state.items()
                    }
            saved = {"state": states, "param_groups": self.optimizer.state_dict()["param_groups"]}
        load_states(self.optimizer, saved)

    def _gathered(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not self.placement.divided:
            return dict(state)
        found, like = {}, next(iter(state.values()))
        for name in self.placement.owners | dict(state):
            whole = self._host(name if name in self.placement.shapes else None, local_part(state.get(name, like)))
            if self.placement.mesh.first:
                found[name] = whole
        return found

    def _host(self, name: str | None, local: Tensor) -> Tensor:
        """A copy of a tensor on the host of the first process, whole where it has the shape of the parameter `name`."""
        whole = local if name is None else self.placement.whole(name, local)
        return whole.to("cpu", copy=True) if self.placement.mesh.first else local

    @torch.no_grad()
    def _fill(self, name: str, local: Tensor, whole: Tensor) -> None:
        local.copy_(self.placement.part(name, whole) if name in self.placement.shapes else whole)
