"""The HTML page in a real browser: it opens fast, is searched and folded, says why, runs nothing of the model's."""

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mpcompile
from examples.gpt import Shape, build
from mpcompile.inspection.report import Report
from tests.report_tools import HOSTILE, hostile_report, large_report, stack_report

pytestmark = pytest.mark.browser

FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync --window-size=1500,950""".split()
LAYERS = 12


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.fail("These tests need a browser: apt-get install chromium chromium-driver.")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=Service(driver))
    yield started
    started.quit()


@pytest.fixture(scope="module")
def gpt() -> Report:
    model = build(Shape(layers=LAYERS, width=64, context=32), 0, torch.device("cpu"))
    tokens = torch.randint(0, 256, (2, 32))
    return mpcompile.explain(model, tokens, tokens, options={"dtype": "bf16"})


class Page:
    """One report, open."""

    def __init__(self, browser: Any, report: Report, folder: Path) -> None:
        self.browser = browser
        browser.get("about:blank")
        browser.get_log("browser")
        browser.get(report.to_html(folder / "report.html").as_uri())

    def all(self, selector: str) -> list[Any]:
        return self.browser.find_elements("css selector", selector)

    def one(self, selector: str) -> Any:
        return self.browser.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        return self.one(selector).text

    def press(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.browser).send_keys(*keys).perform()

    def search(self, text: str) -> None:
        from selenium.webdriver import Keys

        self.press("/", *text, Keys.ENTER)

    def wait_for(self, selector: str, text: str) -> None:
        from selenium.webdriver.support.wait import WebDriverWait

        WebDriverWait(self.browser, 5).until(lambda _: self.text(selector) == text)

    def errors(self) -> list[Any]:
        return self.browser.get_log("browser")

    def paths(self) -> list[str]:
        return [row.get_attribute("data-path") for row in self.all("#tree .row")]


def test_a_newcomer_finds_why_a_norm_is_fp32_and_its_casts(browser: Any, gpt: Report, tmp_path: Path) -> None:
    page = Page(browser, gpt, tmp_path)
    page.search("layers.3.mlp_norm")
    assert page.text("#overview h2") == "layers.3.mlp_norm"
    why = page.text("#overview table")
    assert "reductions, normalisations, losses and steep functions compute in fp32" in why
    assert "var_mean, rsqrt" in why
    assert {chip.text for chip in page.all("#overview td .chip")} == {"float32"}
    part = gpt.within("layers.3.mlp_norm")
    for direction in ("forward", "backward"):
        count = sum(cast.direction == direction for cast in part.casts)
        assert f"{direction}: {count} cast{'' if count == 1 else 's'}" in page.text("#overview details")
    assert page.errors() == []


def test_the_tree_shows_low_operations_bytes_and_casts(browser: Any, gpt: Report, tmp_path: Path) -> None:
    page = Page(browser, gpt, tmp_path)
    assert page.paths() == ["", "tokens", "layers", "norm", "head", "positions"]
    rollup = gpt.rollups["layers"]
    cells = page.one("#tree [data-path='layers']").text.split("\n")
    assert cells[-3:] == [f"{rollup.low_matmuls}/{rollup.matmuls}", "24.1 MB", str(rollup.casts)]


def test_modules_fold_by_mouse_and_by_keyboard(browser: Any, gpt: Report, tmp_path: Path) -> None:
    from selenium.webdriver import Keys

    page = Page(browser, gpt, tmp_path)
    folded = page.paths()
    page.one("#tree [data-path='layers'] .fold").click()
    assert len(page.paths()) == len(folded) + LAYERS
    page.one("#tree [data-path='layers'] .fold").click()
    assert page.paths() == folded
    page.press(Keys.ARROW_RIGHT, Keys.ARROW_DOWN, Keys.ARROW_RIGHT)
    assert page.paths()[3:6] == ["layers.0", "layers.0.attention_norm", "layers.0.attention"]
    page.press(Keys.ENTER)
    assert page.text("#overview h2") == "layers.0"
    page.press(Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    assert page.paths() == folded
    assert page.errors() == []


def test_a_click_on_a_node_shows_its_records(browser: Any, gpt: Report, tmp_path: Path) -> None:
    page = Page(browser, gpt, tmp_path)
    page.search("layers.3.mlp_norm")
    (item,) = [item for item in page.all("#forward g.item") if "rsqrt" in item.text]
    item.click()
    (node,) = (n for n in gpt.within("layers.3.mlp_norm").nodes if n.op == "aten.rsqrt.default")
    assert page.text("#details h2") == node.name
    shown = page.text("#details")
    for fact in (node.reason, node.rule, node.op_class, node.source, node.user_op, "[2, 32, 1]", "256 B", "float32"):
        assert fact in shown, fact
    page.one("#details section .link").click()  # what it reads
    assert page.text("#details h2") == "add_25"
    page.browser.back()
    page.wait_for("#details h2", node.name)
    assert page.errors() == []


def test_the_graph_is_walked_with_arrow_keys(browser: Any, gpt: Report, tmp_path: Path) -> None:
    from selenium.webdriver import Keys

    page = Page(browser, gpt, tmp_path)
    page.search("layers.3.mlp")
    browser.execute_script("document.querySelector('#forward g.item').focus()")
    page.press(Keys.ARROW_DOWN, Keys.ENTER)
    assert page.text("#overview h2") == "layers.3.mlp.up"


def overlaps(page: Page, pane: str) -> int:
    """How many pairs of items overlap."""
    return page.browser.execute_script(
        """const boxes = [...document.querySelectorAll(arguments[0] + " g.item > rect:first-of-type")]
             .map((rect) => rect.getBoundingClientRect());
           let count = 0;
           boxes.forEach((a, i) => boxes.slice(i + 1).forEach((b) => {
             count += a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom; }));
           return count;""",
        pane,
    )


@pytest.mark.parametrize("module", ["", "layers", "layers.3", "layers.3.attention", "layers.3.mlp_norm"])
def test_items_do_not_overlap(browser: Any, gpt: Report, tmp_path: Path, module: str) -> None:
    page = Page(browser, gpt, tmp_path)
    browser.execute_script("show({module: arguments[0], node: null})", module)
    for pane in ("#forward", "#backward"):
        assert len(page.all(f"{pane} g.item")) > 2
        assert overlaps(page, pane) == 0


def test_views_are_shown_on_request_and_when_searched_for(browser: Any, tmp_path: Path) -> None:
    report = stack_report()
    page = Page(browser, report, tmp_path)
    (view, *_) = (v for v in report.values if v.kind == "view" and v.module == "head")
    page.search("head")
    before = len(page.all("#panes g.item"))
    page.one("#views").click()
    assert len(page.all("#panes g.item")) > before
    page.one("#views").click()
    assert len(page.all("#panes g.item")) == before
    page.search(view.name)
    assert page.text("#details h2") == view.name
    assert len(page.all("g.item.selected")) == 1
    assert page.errors() == []


def test_marks_are_those_of_the_records(browser: Any, tmp_path: Path) -> None:
    report = stack_report().within("head")
    page = Page(browser, report, tmp_path)
    page.search("head")
    drawn = [value for value in report.values if value.kind != "view"]
    assert len(page.all("#panes g.item circle.rounds")) == sum(value.rounds for value in drawn) > 0
    assert len(page.all("#panes g.item rect.saved")) == sum(value.saved_bytes != 0 for value in drawn)
    fills = browser.execute_script(
        """return ["low", "fp32"].map((kind) =>
             getComputedStyle(document.querySelector(`#panes g.item.${kind} > rect`)).fill)"""
    )
    assert fills[0] != fills[1]


def test_5000_nodes_open_in_under_three_seconds(browser: Any, tmp_path: Path) -> None:
    page = Page(browser, large_report(5000), tmp_path)
    opened = browser.execute_script("return performance.getEntriesByType('navigation')[0].loadEventEnd")
    assert 0 < opened < 3000
    assert len(page.all("g.item")) < 100
    assert len(page.all("#tree .row")) < 100
    page.search("node_4321")
    assert page.text("#details h2") == "node_4321"
    assert page.errors() == []


def test_5000_nodes_in_one_module_are_drawn_in_parts(browser: Any, tmp_path: Path) -> None:
    report = large_report(5000)
    (graph,) = report.graphs
    flat = tuple(dataclasses.replace(value, module="") for value in graph.values)
    report = dataclasses.replace(report, graphs=(dataclasses.replace(graph, values=flat),))
    page = Page(browser, report, tmp_path)
    assert browser.execute_script("return performance.getEntriesByType('navigation')[0].loadEventEnd") < 3000
    assert "part 1 of 9" in page.text("#forward .pager")
    page.all("#forward .pager button")[1].click()
    assert "part 2 of 9" in page.text("#forward .pager")
    assert page.errors() == []


def test_what_the_model_calls_things_is_shown_as_it_is(browser: Any, tmp_path: Path) -> None:
    page = Page(browser, hostile_report(), tmp_path)
    page.search("onerror")
    browser.execute_script("show({module: arguments[0], node: report.graphs[0].nodes[1]})", f"{HOSTILE}.{HOSTILE}")
    assert page.text("#overview h2") == f"{HOSTILE}.{HOSTILE}"
    assert page.text("#details h2") == f"{HOSTILE}2"
    assert page.text("#details dl").count(HOSTILE) >= 6
    assert HOSTILE in page.text("#overview table")
    assert HOSTILE in page.text("#facts")
    assert page.all("img") == []
    assert page.errors() == []  # an alert, or an image that is not there, would be one


def test_it_is_dark_where_the_reader_asks_for_it(browser: Any, tmp_path: Path) -> None:
    def ground(scheme: str) -> str:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        return browser.execute_script("return getComputedStyle(document.body).backgroundColor")

    Page(browser, stack_report(), tmp_path)
    assert ground("light") == "rgb(247, 247, 245)"
    assert ground("dark") == "rgb(20, 22, 26)"
    ground("light")


def test_a_report_of_several_graphs_shows_each(browser: Any, tmp_path: Path) -> None:
    one = stack_report()
    page = Page(browser, Report("bfloat16", (*one.graphs, *large_report(40).graphs)), tmp_path)
    assert len(page.all("#graph option")) == 2
    page.search("node_7")
    assert page.text("#details h2") == "node_7"
    assert page.one("#graph").get_attribute("value") == "1"
    assert page.errors() == []
