"""A load generator for any OpenAI endpoint: what is asked (`workload`), when (`arrivals`), how it is answered (`client`), and
what that comes to (`figures`, `plot`). No PyTorch and no tokenizer: prompts are token ids or words, and the server counts."""

from tilestack.lab.serving.load.arrivals import run_load
from tilestack.lab.serving.load.client import Outcome, Target
from tilestack.lab.serving.load.figures import Objectives, summary
from tilestack.lab.serving.load.workload import Ask, make_workload

__all__ = ["Ask", "Objectives", "Outcome", "Target", "make_workload", "run_load", "summary"]
