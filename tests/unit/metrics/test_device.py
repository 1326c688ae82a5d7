from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from rlsandbox.metrics.device import DeviceBusy, _visible


class NvmlError(Exception):
    pass


class Nvml:
    """The calls of NVML that are used, over two devices."""

    NVMLError = NvmlError

    def __init__(self) -> None:
        self.asked = 0
        self.shut = 0
        self.read = threading.Event()

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None:
        self.shut += 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        if index > 3:
            raise NvmlError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        return uuid

    def nvmlDeviceGetUtilizationRates(self, device: Any) -> Any:
        self.asked += 1
        if self.asked > 8:
            self.read.set()
        return SimpleNamespace(gpu=50)


def test_without_nvml_there_is_a_reason_and_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with DeviceBusy() as busy:
        assert busy.share() is None
        assert "nvidia-ml-py" in busy.why


def test_the_share_is_a_mean_over_devices_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with DeviceBusy(period_s=0.001) as busy:
        assert nvml.read.wait(30)
        assert busy.share() == 0.5
        assert busy.pop() == 0.5
    assert nvml.shut == 1


def test_no_device_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
    with DeviceBusy() as busy:
        assert busy.share() is None
        assert "Invalid Argument" in busy.why
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with DeviceBusy() as busy:
        assert busy.share() is None
        assert busy.why == "no device is visible"
    assert nvml.shut == 2


@pytest.mark.parametrize(
    ("named", "devices"),
    [(None, [0, 1]), ("1", [1]), ("3, 0", [3, 0]), ("GPU-abc", ["GPU-abc"]), ("1,-1,0", [1]), ("", [])],
)
def test_only_the_devices_that_this_process_sees(named: str | None, devices: list[Any]) -> None:
    assert _visible(Nvml(), named) == devices
