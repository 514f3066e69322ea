"""Energy of NVIDIA GPUs by NVML, where it is there (package ``nvidia-ml-py``, extra ``bench``)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

logger = logging.getLogger(__name__)


class EnergyMeter:
    """Joules of the GPUs between :meth:`begin` and :meth:`end`.

    Args:
        uuids: the GPUs, as ``GPU-…`` (indices of CUDA and NVML differ under CUDA_VISIBLE_DEVICES).
    """

    def __init__(self, uuids: Sequence[str]) -> None:
        self._handles: list[Any] = []
        self._begin: list[int] | None = None
        self._nvml: Any = None
        if not uuids:
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
            for handle in handles:
                pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        except Exception as error:
            # No package, no driver, or a GPU (before Volta) that has no energy counter: energy is simply not known.
            logger.debug("no energy counter: %s", error)
            return
        self._nvml, self._handles = pynvml, handles

    @property
    def available(self) -> bool:
        """Whether every GPU has an energy counter."""
        return bool(self._handles)

    def begin(self) -> None:
        """Note the counters."""
        self._begin = self._counters()

    def end(self) -> float | None:
        """Joules since :meth:`begin`, or None without counters."""
        if not self.available or self._begin is None:
            return None
        return sum(now - before for now, before in zip(self._counters(), self._begin, strict=True)) / 1e3

    def _counters(self) -> list[int]:
        """Millijoules since the driver was loaded, per GPU."""
        return [int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) for handle in self._handles]
