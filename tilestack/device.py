"""Where a command or a run works: the GPU where there is one, or what was asked for."""

import torch


def pick_device(name: str | None = None, asked_by: str = "--device") -> torch.device:
    """The device of a name, `auto` or none being the GPU where there is one; `asked_by` is what an error calls it."""
    if name in (None, "auto"):
        name = "cuda" if torch.cuda.is_available() else "cpu"
    assert name is not None
    if name.split(":")[0] not in ("cuda", "cpu"):
        raise ValueError(f"{asked_by} must be cuda or cpu, not {name!r}")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"{asked_by} is cuda, and no CUDA GPU is visible here; set it to cpu")
    return torch.device(name)
