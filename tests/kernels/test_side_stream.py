"""The head's second stream leaves the current device and stream as they were, also where tensors are on another GPU."""

from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from tilestack.kernels.loss import linear_cross_entropy as head


@dataclass
class Stream:
    device: torch.device
    name: str
    waited: list = field(default_factory=list)

    def wait_stream(self, other):
        self.waited.append(other.name)


class TwoGpus:
    """What torch.cuda knows of current devices and streams: setting a stream makes its device the current one."""

    def __init__(self):
        self.current = 0
        self.streams = {n: Stream(torch.device("cuda", n), f"main{n}") for n in (0, 1)}

    def index(self, device, *_):
        return self.current if device is None else torch.device(device).index

    def current_stream(self, device=None):
        return self.streams[self.index(device)]

    def set_stream(self, stream):
        self.current = stream.device.index
        self.streams[self.current] = stream

    @contextmanager
    def device(self, device):
        before, self.current = self.current, self.index(device)
        yield
        self.current = before


@pytest.fixture
def gpus(monkeypatch):
    fake = TwoGpus()
    monkeypatch.setattr(torch.cuda, "current_stream", fake.current_stream)
    monkeypatch.setattr(torch.cuda, "set_stream", fake.set_stream)
    monkeypatch.setattr(torch.cuda, "device", fake.device)
    monkeypatch.setattr(torch.cuda, "_get_device_index", fake.index)
    monkeypatch.setattr(head, "side_stream", lambda device: Stream(device, "side"))
    return fake


@pytest.mark.parametrize("where", [0, 1])
def test_device_and_streams_are_what_they_were(gpus, where):
    side = head.SideStream(torch.device("cuda", where))
    with side:
        assert gpus.current == where
        assert gpus.current_stream().name == "side"
    assert gpus.current == 0
    assert {n: stream.name for n, stream in gpus.streams.items()} == {0: "main0", 1: "main1"}
    assert side.stream.waited == [f"main{where}"]
    side.join()
    assert gpus.streams[where].waited == ["side"]


def test_a_cpu_has_no_second_stream():
    with head.SideStream(torch.device("cpu")) as entered:
        assert entered is None
