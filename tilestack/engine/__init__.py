"""Inference: requests come, a scheduler chooses what each step computes, a runner computes it, and text streams back.

    LLM            many prompts at once, offline (llm.py)
    AsyncEngine    requests that stream into asyncio (asynchronous.py); RemoteEngine (remote.py) and EngineHost (host.py)
                   are the two ends of the same between processes
    Engine         add a request, take a step, read what came (engine.py)
    Scheduler      which tokens the next step computes (scheduler.py), in which pages (pages.py)
    Runner         one forward over a flat batch, and the tokens drawn after it (runner.py, sampling.py)

docs/engine.md follows a request through it.
"""

from tilestack.engine.asynchronous import AsyncEngine, EngineClosed, Stream
from tilestack.engine.engine import Engine, EngineStats, QueueFull
from tilestack.engine.llm import LLM
from tilestack.engine.outputs import Completion, Delta, RequestOutput, TokenLogprob, Usage
from tilestack.engine.params import RequestError, SamplingParams, Structure
from tilestack.engine.sequence import Request
from tilestack.engine.settings import EngineSettings

__all__ = [
    "LLM", "AsyncEngine", "Completion", "Delta", "Engine", "EngineClosed", "EngineSettings", "EngineStats", "QueueFull",
    "Request", "RequestError", "RequestOutput", "SamplingParams", "Stream", "Structure", "TokenLogprob", "Usage",
]  # fmt: skip
