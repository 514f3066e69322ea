"""``report.html``: one self-contained page with chart, table, settings and how to reproduce; it loads nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from trtllm_dflash.bench.sweep_chart import COLOURS
from trtllm_dflash.bench.sweep_journal import written_whole

_PLACE = "/*RESULTS*/null"


def write_report(document: Mapping[str, Any], folder: Path) -> None:
    """Write ``report.html`` of a results document into ``folder``; single runs stay in ``results.json``."""
    shown = {key: value for key, value in document.items() if key != "runs"} | {"colours": list(COLOURS)}
    # "</script>" inside a label would end the script, "<!--" would begin a comment.
    data = json.dumps(shown).replace("<", "\\u003c")
    page = files("trtllm_dflash.bench").joinpath("report_page.html").read_text(encoding="utf-8")
    assert page.count(_PLACE) == 1
    with written_whole(folder / "report.html") as partial:
        partial.write_text(page.replace(_PLACE, data), encoding="utf-8")
