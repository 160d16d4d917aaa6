"""What a user sees in a real browser: MLflow's pages of runs made with the tracker, and the page of a report."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mantissa.page import Section, page
from tests.serving import served
from tests.tracked import open_tracker, tracked
from trainer.tracking.plots import bare_figure
from trainer.tracking.ui import comparison_address, curves_address, newest_runs, share_view, table_address

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = [
    pytest.mark.browser,
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"),
]

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--window-size=1600,1200"),
    *("--disable-quic", "--disable-sync", "--disable-background-networking", "--disable-component-update"),
)
WAIT_S = 120


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    from selenium.webdriver.chrome.service import Service

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("no chromium and chromedriver on the path")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    # A named driver keeps selenium from looking for one in the network.
    chrome = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield chrome
    finally:
        chrome.quit()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two runs like those of a sweep over precisions."""
    folder = tmp_path_factory.mktemp("runs")
    uri = f"sqlite:///{folder}/mlflow.db"
    for precision, loss in (("fp32", 3.125), ("bf16", 3.25)):
        params = {"precision.mode": precision, "optimizer.lr": 6e-4}
        tracker = open_tracker(
            folder / f"gpt2-{precision}-s0", uri=uri, experiment="gpt2", params=params, tags={"precision": precision}
        )
        for step in range(1, 21):
            tracker.log(step, {"loss": loss + (20 - step) / 10, "tokens_per_s": 1000.0 + step})
        tracker.log(20, {"valid/loss": loss + 0.5})
        best = {"step": 20, "value": loss + 0.5}
        tracker.close("FINISHED", {"best": best, "units_per_s": 1000.0 * loss, "peak_memory_bytes": 700 << 20})
    other = tracked(folder / f"bert-{'with-a-long-name-' * 2}s0", uri=uri, experiment="bert", tags={"team": "vision"})
    assert other.run_id
    return uri


@pytest.fixture(scope="module")
def server(store: str) -> Iterator[str]:
    """The address of ``scripts/ui.py`` over these runs."""
    with served(store) as address:
        yield address


def assert_shows(browser: Chrome, address: str, *texts: str) -> None:
    """Open a page, and wait until all of these can be read on it."""
    from selenium.common.exceptions import TimeoutException
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    def missing() -> list[str]:
        page = browser.execute_script("return document.body.innerText")
        return [text for text in texts if text not in page]

    try:
        for again in (True, False):  # where MLflow is slow, its page sometimes goes to another one
            browser.get("about:blank")  # a change behind the # alone would not load anything
            browser.get(address)
            with suppress(TimeoutException) if again else nullcontext():
                WebDriverWait(browser, WAIT_S).until(lambda _: not missing())
                break
    except TimeoutException:
        shown = browser.find_element(By.TAG_NAME, "body").text
        pytest.fail(f"{address} does not show {missing()}, but:\n{shown}")
    finally:
        if folder := os.environ.get("MANTISSA_SCREENSHOTS"):
            name = browser.current_url.partition("#/")[2].partition("?")[0].replace("/", "-")
            browser.save_screenshot(str(Path(folder) / f"{name}{'-curves' * ('CHART' in address)}.png"))


def test_the_runs_are_listed_drawn_and_compared(browser: Chrome, server: str, store: str) -> None:
    experiment, newest = newest_runs(store, "gpt2")
    own = [*experiment]
    names, ids = [run.info.run_name for run in newest], [run.info.run_id for run in newest]
    assert names == ["gpt2-bf16-s0", "gpt2-fp32-s0"]
    assert_shows(browser, table_address(server, own), *names, "Model registry", "2 matching runs")
    assert_shows(browser, curves_address(server, own), *names, "2 matching runs", "Model metrics")
    one = curves_address(server, own, ids[:1])
    assert_shows(browser, one, "1 matching run", names[0], "Model metrics", "final", "best")
    params = ("precision.mode", "fp32", "bf16", "optimizer.lr", "0.0006")
    metrics = ("loss", "3.125", "3.25", "tokens_per_s", "valid/loss", "3.75")
    address = comparison_address(server, own, ids)
    assert_shows(browser, address, "Comparing 2 Runs", *names, *params, *metrics)


def test_all_experiments_are_one_table_of_what_differs(browser: Chrome, server: str, store: str) -> None:
    from selenium.webdriver.common.by import By

    experiments, every = newest_runs(store)
    assert sorted(experiments.values()) == ["bert", "gpt2"]
    query = share_view(store, [*experiments], every)
    headings = ("Experiment Name", "precision.mode", "bf16", "team", "vision")
    names = [run.info.run_name for run in every]
    assert_shows(browser, table_address(server, [*experiments]) + query, *headings, *names, "3 matching runs")
    assert "optimizer.lr" not in browser.find_element(By.TAG_NAME, "body").text  # the same in all of them
    cut = "e => e.clientWidth && e.scrollWidth > e.clientWidth + 1"
    cells = "[...document.querySelectorAll('.ag-cell')].filter(c => c.querySelector('a'))"
    found = f"return {cells}.filter(c => [c, ...c.querySelectorAll('*')].some({cut})).map(c => c.innerText)"
    assert not set(names) & set(browser.execute_script(found))


def test_a_report_does_not_scroll_sideways_on_a_phone(browser: Chrome, tmp_path: Path) -> None:
    name = "encoder.block.0.layer.1.DenseReluDense.wo" * 3
    table = [[name] * 12] * 3
    details = Section("Details", [name], [name], table, f"  {name} = {name}", [(name, bare_figure(5, 3)[0])])
    (tmp_path / "report.html").write_text(page("Report", name, [name], name, name, [details]), encoding="utf-8")
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        assert_shows(browser, (tmp_path / "report.html").as_uri(), "Details")
        assert browser.execute_script("return document.documentElement.scrollWidth") == 390
        assert browser.execute_script("const e = document.querySelector('.wide'); return e.scrollWidth") > 390
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
