"""Replicated data parallelism: every rank has the whole model and other texts, and gradients are summed over the ranks.

    backward      layer 3 ──── layer 2 ──── layer 1 ──── embedding
    buckets       [ layer 3, half of 2 ][ the rest of 2, 1 ][ embedding ]
    all-reduce          ├─────────────────┤ ├──────────────┤ ├─────────┤     while the backward goes on

A bucket is sent as soon as the last of its gradients is there, after those before it, so that all ranks send the same ones in
the same order. A sum over ranks is finished before anything is divided by the number of tokens, which is that of all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 25 << 20


@dataclass
class Bucket:
    parameters: list[Tensor] = field(default_factory=list)
    bytes: int = 0
    missing: int = 0  # gradients that are not there yet
    flat: Tensor | None = None  # all gradients, as they are sent
    work: Any = None


class GradientBuckets:
    """Sums the gradients of parameters over a group, a bucket at a time, in the backward after `start`."""

    def __init__(self, parameters: Sequence[Tensor], group: dist.ProcessGroup, size: int = BUCKET_BYTES):
        self.group, self.buckets, self.bucket_of = group, list[Bucket](), dict[Tensor, Bucket]()
        for parameter in reversed(parameters):  # about as the backward reaches them
            last = self.buckets[-1] if self.buckets else None
            if last is None or last.bytes >= size or last.parameters[0].dtype != parameter.dtype:
                self.buckets.append(last := Bucket())
            last.parameters.append(parameter)
            last.bytes += parameter.nbytes
            self.bucket_of[parameter] = last
            parameter.register_post_accumulate_grad_hook(self._note)
        self.sent = len(self.buckets)

    def start(self, times: int = 1) -> None:
        """Let the next backward send, or the last of the next so many."""
        self.sent = 0
        for bucket in self.buckets:
            bucket.missing = times * len(bucket.parameters)

    def _note(self, parameter: Tensor) -> None:
        self.bucket_of[parameter].missing -= 1
        while self.sent < len(self.buckets) and not self.buckets[self.sent].missing:
            self._send()

    def _send(self) -> None:
        bucket = self.buckets[self.sent]
        self.sent += 1
        for parameter in bucket.parameters:
            if parameter.grad is None:  # which on another rank it may have
                parameter.grad = torch.zeros_like(parameter)
        bucket.flat = torch.cat([gradient_of(parameter).flatten() for parameter in bucket.parameters])
        bucket.work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)

    def finish(self) -> None:
        """Wait until every gradient is the sum over the group."""
        while self.sent < len(self.buckets):
            self._send()
        for bucket in self.buckets:
            bucket.work.wait()
            assert bucket.flat is not None
            gradients = [gradient_of(parameter) for parameter in bucket.parameters]
            parts = bucket.flat.split([grad.numel() for grad in gradients])
            torch._foreach_copy_(gradients, [part.view_as(grad) for part, grad in zip(parts, gradients, strict=True)])
            bucket.flat = bucket.work = None


def gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
