"""Names of the dtypes in which networks compute."""

from __future__ import annotations

from typing import Literal

ComputeDtype = Literal["float32", "float16", "bfloat16"]
