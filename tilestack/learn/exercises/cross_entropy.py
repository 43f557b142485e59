"""A loss without probabilities: cross-entropy over a large vocabulary.

    loss[r] = log(sum over v of exp(logits[r, v])) - logits[r, label[r]]     torch.nn.functional.cross_entropy

    logits[r]   ┌─────────┬─────────┬─────────┬───────┐
                │ chunk   │ chunk ▼ │ chunk   │ chunk │         ▼ the label's logit, one load
                └────┬────┴────┬────┴────┬────┴───┬───┘
                     └── top and total, as in online_softmax ──▶  top + log(total) - logit of the label

softmax followed by a logarithm would write as many probabilities as there are logits, for 150 000 words and 8000 tokens
more than the model's weights, to read one of each row. Here a row is read once, and one number is written.

Two kinds of labels are no word. `ignore_index` marks a row that does not count: its loss is 0. Any other number outside
0 … classes - 1 is somebody's bug, which must be seen: its loss is NaN. Neither may be used as an address.

The launcher sums up. Label smoothing, the z-loss and the soft cap are left out, which `when` says.
"""

import torch
import triton
import triton.language as tl

from tilestack import implements, ops


@triton.jit
def cross_entropy_kernel(logits_ptr, labels_ptr, loss_ptr, classes, ignore_index, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    # begin: yours
    # | # Yours: the label; top and total of the row; the loss, 0 where ignored, NaN where there is no such class.
    # | pass
    label = tl.load(labels_ptr + row).to(tl.int64)
    top = tl.full((), -float("inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    for start in range(0, classes, CHUNK):
        column = start + tl.arange(0, CHUNK)
        x = tl.load(logits_ptr + row * classes + column, mask=column < classes, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        top = higher
    known = (label >= 0) & (label < classes)
    target = tl.load(logits_ptr + row * classes + label, mask=known, other=float("nan")).to(tl.float32)
    tl.store(loss_ptr + row, tl.where(label == ignore_index, 0.0, top + tl.log(total) - target))
    # end


def plain_loss(label_smoothing, z_loss, softcap):
    return not (label_smoothing or z_loss or softcap) or "no label smoothing, z-loss or soft cap"


@implements(
    ops.cross_entropy, backend="mine", when=plain_loss, dtypes=[torch.float16, torch.bfloat16, torch.float32]
)  # `when` says what this backend leaves out
def cross_entropy(logits, labels, ignore_index, label_smoothing, z_loss, softcap, reduction, inplace):
    logits, labels = logits.contiguous(), labels.contiguous()
    loss = torch.empty(labels.shape, dtype=torch.float32, device=logits.device)
    if loss.numel():
        cross_entropy_kernel[(loss.numel(),)](logits, labels, loss, logits.shape[-1], ignore_index, CHUNK=1024)
    if reduction == "none":
        return loss
    return loss.sum() / (labels != ignore_index).sum() if reduction == "mean" else loss.sum()


# begin: tutor
HINTS = [
    "The loop is the first one of `online_softmax`; log of the sum of exponentials is top + tl.log(total).",
    "known = (label >= 0) & (label < classes) is the mask of the one load that the label is an address for; with "
    'other=float("nan") the wrong label is NaN by itself.',
    "loss = tl.where(label == ignore_index, 0.0, top + tl.log(total) - target), and tl.store(loss_ptr + row, loss).",
]


def reduced(reduction, loss, labels, ignore_index):
    return {"none": loss, "sum": loss.sum(), "mean": loss.sum() / (labels != ignore_index).sum()}[reduction]


def target_of(logits, labels):
    return logits.gather(-1, labels.clamp(0, logits.shape[-1] - 1).long()[..., None]).squeeze(-1)


MISTAKES = {
    "the sign is turned around": (
        lambda logits, labels, ignore_index, reduction: reduced(
            reduction,
            torch.where(labels == ignore_index, 0, target_of(logits, labels) - logits.logsumexp(-1)),
            labels,
            ignore_index,
        )
    ),
    "ignored rows count": (
        lambda logits, labels, ignore_index, reduction: reduced(
            reduction, logits.logsumexp(-1) - target_of(logits, labels), labels, ignore_index
        )
    ),
    "the label's logit is not subtracted": (
        lambda logits, labels, ignore_index, reduction: reduced(
            reduction, torch.where(labels == ignore_index, 0, logits.logsumexp(-1)), labels, ignore_index
        )
    ),
}
# end
