"""What the accelerators measured of themselves: the share of time in which a kernel ran, by NVML.

It stands beside the idle ratio and replaces nothing: a device is also idle for reasons that have nothing
to do with sandboxes. Without NVML the share is None and ``why`` says what is missing; never 0.
"""

from __future__ import annotations

import importlib
import os
import threading
from types import TracebackType
from typing import Any, Self


class DeviceBusy:
    """Samples the visible devices' utilization on a thread of its own, from entering to leaving.

    NVML averages over its own period (a sixth of a second to a second), so a window of a few seconds is
    the shortest that says something.
    """

    def __init__(self, *, period_s: float = 0.2) -> None:
        self.why = ""
        self._period_s = period_s
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._sum = 0.0
        self._n = 0
        self._thread: threading.Thread | None = None
        self._nvml: Any = None
        self._devices: list[Any] = []

    def __enter__(self) -> Self:
        try:
            pynvml: Any = importlib.import_module("pynvml")
        except ImportError:
            self.why = "NVML is not importable (pip install nvidia-ml-py)"
            return self
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self.why = f"NVML answered: {error}"
            return self
        self._nvml = pynvml
        try:
            self._devices = _visible(pynvml, os.environ.get("CUDA_VISIBLE_DEVICES"))
            for device in self._devices:
                pynvml.nvmlDeviceGetUtilizationRates(device)
        except pynvml.NVMLError as error:
            self.why = f"NVML answered: {error}"
            return self
        if not self._devices:
            self.why = "no device is visible"
            return self
        self._thread = threading.Thread(target=self._sample, name="rlsandbox-nvml", daemon=True)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(self._period_s):
            try:
                rates = [self._nvml.nvmlDeviceGetUtilizationRates(device).gpu for device in self._devices]
            except self._nvml.NVMLError as error:
                self.why = f"NVML answered: {error}"
                return
            with self._lock:
                self._sum += sum(rates) / len(rates) / 100
                self._n += 1

    def share(self) -> float | None:
        """The mean share over the devices and the time since entering; None without a measurement."""
        with self._lock:
            return self._sum / self._n if self._n else None

    def pop(self) -> float | None:
        """The share since the last :meth:`pop`."""
        with self._lock:
            share = self._sum / self._n if self._n else None
            self._sum, self._n = 0.0, 0
            return share

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
            self._nvml = None


def _visible(nvml: Any, named: str | None) -> list[Any]:
    """Handles of the devices that this process may use: NVML itself ignores CUDA_VISIBLE_DEVICES."""
    if named is None:
        return [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    found = []
    for name in (part.strip() for part in named.split(",")):
        if name.isdigit():
            found.append(nvml.nvmlDeviceGetHandleByIndex(int(name)))
        elif name.startswith(("GPU-", "MIG-")):
            found.append(nvml.nvmlDeviceGetHandleByUUID(name))
        else:  # like CUDA: what follows a name that means nothing (-1, empty) is hidden
            break
    return found
