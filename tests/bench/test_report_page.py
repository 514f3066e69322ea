"""The report in a real headless browser."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sweep_documents import document, result, run

from trtllm_dflash.bench.predict_requests import predict_curve
from trtllm_dflash.bench.sweep_report import write_report

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if path is None:
        pytest.skip("no Chromium on PATH")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = [
        run(
            label, users, repeat,
            result(users * rate / (1 + users / 8), rate / (1 + users / 8) + repeat, ttft_ms=20.0 * users,
                   histogram=None if label == "plain" else (10, 20, 30, 40)),
        )
        for label, rate in (("plain", 40), ("a <b>bold</b> label</script>", 90))
        for users in (1, 2, 4, 8)
        for repeat in range(2)
    ]  # fmt: skip
    results = document(runs)
    results["predictions"].append(predict_curve(results, "al=4", concurrencies=(1, 2, 4, 8)))
    folder = tmp_path_factory.mktemp("report")
    write_report(results, folder)
    return folder / "report.html"


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_draws_its_chart_without_errors_or_network(browser: Any, report: Path, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: request.url.startswith(("file:", "data:")) or problems.append(request.url))
    page.goto(report.as_uri())
    assert page.locator("#chart svg circle").count() == 3 * 4
    assert page.locator("#chart svg path.measured").count() == 2
    assert page.locator("#chart svg path.predicted[stroke-dasharray]").count() == 1
    assert page.locator("#points tbody tr").count() == 8
    # Readable: nothing sticks out of the window, and text is not smaller than about 10 pixels.
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    shrink = page.evaluate("(s => s.clientWidth / s.viewBox.baseVal.width)(document.querySelector('#chart svg'))")
    assert 12 * shrink >= 10
    picture = page.screenshot(full_page=True)
    assert len(set(picture)) > 100
    page.locator("#legend button").first.click()
    assert page.locator("#chart svg circle").count() == 2 * 4
    page.select_option("#x", "ttft")
    page.check("#log-x")
    assert page.locator("#chart svg circle").count() == 4
    page.locator("#chart svg circle").first.hover()
    assert page.locator("#tip").evaluate("tip => getComputedStyle(tip).visibility") == "visible"
    assert "concurrency" in page.locator("#tip").inner_text()
    page.locator("#points th").nth(2).click()
    first = page.locator("#points tbody tr").first.locator("td").nth(2).inner_text()
    assert float(first.split()[0]) == min(
        float(text.split()[0]) for text in page.locator("#points tbody tr td:nth-child(3)").all_inner_texts()
    )
    assert problems == []
    page.close()


def test_an_axis_that_spans_much_begins_logarithmic_and_can_be_switched(browser: Any, tmp_path: Path) -> None:
    places = {1: (900.0, 5000.0), 8: (2000.0, 400.0), 128: (4900.0, 42.0), 256: (5000.0, 40.0)}
    # Of repeats far apart, the interval of which is wider than the chart.
    runs = [
        run("fast", users, repeat, result(y * shift, x * shift, ttft_ms=20.0 + users / 100))
        for users, (y, x) in places.items()
        for repeat, shift in enumerate((0.3, 1.0, 1.7))
    ]
    write_report(document(runs), tmp_path)
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto((tmp_path / "report.html").as_uri())
    assert page.is_checked("#log-x")
    assert not page.is_checked("#log-y")
    assert page.locator("#chart text", has_text="tokens/s per user (logarithmic)").count() == 1
    numbers = [box.bounding_box() for box in page.locator("#chart text.number").all()]
    assert len(numbers) == 4
    for a, b in itertools.combinations(numbers, 2):
        apart_x = a["x"] + a["width"] <= b["x"] or b["x"] + b["width"] <= a["x"]
        assert apart_x or a["y"] + a["height"] <= b["y"] + 3 or b["y"] + b["height"] <= a["y"] + 3
    x_of_points = [float(circle.get_attribute("cx")) for circle in page.locator("#chart circle").all()]
    assert max(x_of_points) - min(x_of_points) > 800, "points fill the chart, whatever their uncertainty"
    page.uncheck("#log-x")
    linear = [float(circle.get_attribute("cx")) for circle in page.locator("#chart circle").all()]
    assert linear != x_of_points
    # Another figure chooses anew.
    page.select_option("#x", "ttft")
    assert not page.is_checked("#log-x")
    page.select_option("#x", "tok_s_user")
    assert page.is_checked("#log-x")
    page.close()
