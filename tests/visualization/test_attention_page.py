"""Test the attention page in a real browser: clicks, keys, text, and the pixels of its pictures."""

import dataclasses
import shutil
import time
from collections import Counter

import numpy as np
import pytest
from picture_cases import HOSTILE, made_up

from transformer_jax.visualization.attention import View, attention_page

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    "--window-size=1200,900",
)
SOURCE = ["\u2581The", "\u2581dog", "\u2581runs", ".", "</s>"]
TARGET = ["\u2581Der", "\u2581Hund", "\u2581l", "\u00e4uft", ".", "</s>"]
HEBREW = ["\u05d4\u05db\u05dc\u05d1", "\u05e8\u05e5", "\u05de\u05d4\u05e8", "</s>"]


@pytest.fixture(scope="module")
def driver(optional_package, tmp_path_factory):
    """One browser for all tests of this file."""
    if not CHROMIUM or not DRIVER:
        pytest.skip("no browser here: apt-get install chromium chromium-driver")
    optional_package("selenium")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    yield driver
    driver.quit()


class Page:
    """An attention page open in the browser."""

    def __init__(self, driver, folder, attention, view=View()):  # noqa: B008  frozen
        self.driver, self.attention = driver, attention
        (folder / "page.html").write_text(attention_page(attention, view), encoding="utf-8")
        driver.get((folder / "page.html").as_uri())

    def run(self, script, *args):
        return self.driver.execute_script(script, *args)

    def choose(self, name, value):
        """Click one of the radio buttons."""
        self.run(
            "return document.querySelector(`input[name=${arguments[0]}][value='${arguments[1]}']`).parentElement",
            name,
            str(value),
        ).click()

    def press(self, *keys):
        for key in keys:
            self.driver.switch_to.active_element.send_keys(key)

    def token(self, side, index):
        return self.driver.find_elements("css selector", f"ol.{side} button")[index]

    def hover(self, element):
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).move_to_element(element).perform()

    @property
    def status(self):
        return self.run("return document.getElementById('status').textContent").translate({0x2068: None, 0x2069: None})

    @property
    def listed(self):
        """The list next to the picture: [(token, percent), ...]."""
        rows = self.run(
            "return [...document.querySelectorAll('#weights li')].map(li => [...li.children].map(x => x.textContent))"
        )
        return [(token, float(share.removesuffix(" %"))) for share, token in rows]

    @property
    def focused(self):
        return self.run("return document.activeElement.getAttribute('aria-label') ?? document.activeElement.tagName")


@pytest.fixture
def open_page(driver, tmp_path):
    def open_page(*args, **options):
        return Page(driver, tmp_path, *args, **options)

    driver.get_log("browser")
    yield open_page
    messages = [entry["message"] for entry in driver.get_log("browser")]
    assert all("getImageData" in message for message in messages)  # only the tests read pixels
    assert driver.execute_script("return performance.getEntriesByType('resource').length") == 0


def chosen_weights(attention, kind, layer, head):
    """Return the weights that the page's list shows: the chosen head, or the mean over heads."""
    heads = attention.maps[kind].weights[layer - 1]
    return heads.mean(0) if head in ("all", "mean") else heads[head - 1]


def check_list(page, tokens, weights):
    """Check that the list shows the ten largest weights, largest first."""
    order = np.argsort(-weights, kind="stable")[:10]
    shown = page.listed
    np.testing.assert_allclose([share for _, share in shown], 100 * weights[order], atol=0.06)
    assert sorted(token for token, _ in shown) == sorted(tokens[place] for place in order) or len(tokens) > 10


def test_every_choice_shows_its_weights(open_page):
    attention = made_up(SOURCE, TARGET)
    page = open_page(attention)
    for kind, layer, head in (("cross", 2, "all"), ("cross", 1, 3), ("encoder", 1, "mean"), ("decoder", 2, 1)):
        page.choose("kind", kind)
        page.choose("layer", layer)
        page.choose("head", head)
        maps, weights = attention.maps[kind], chosen_weights(attention, kind, layer, head)
        page.hover(page.token("query", 2))
        check_list(page, maps.keys, weights[2])
        assert page.status.startswith(f"\u201c{maps.queries[2]}\u201d attends to")
        page.hover(page.token("key", 1))
        check_list(page, maps.queries, weights[:, 1])
        assert page.status.startswith(f"\u201c{maps.keys[1]}\u201d is attended to")
        shown = page.run(
            "return [...document.querySelectorAll('ol.query small')].map(x => parseFloat(x.textContent) || 0)"
        )
        np.testing.assert_allclose(shown, np.where(weights[:, 1] < 0.005, 0, 100 * weights[:, 1]), atol=0.06)
        named = "all heads" if head == "all" else "mean of 3 heads" if head == "mean" else f"head {head}"
        assert f"Layer {layer} of 2, {named};" in page.driver.find_element("id", "caption").text
    assert page.run("return document.title") == f"Attention: {''.join(SOURCE)}"


def test_page_opens_with_the_requested_view(open_page):
    page = open_page(made_up(SOURCE, TARGET), View("decoder", 1, 2, "map"))
    checked = page.run(
        "return Object.fromEntries([...document.querySelectorAll('input:checked')].map(x => [x.name, x.value]))"
    )
    assert checked == {"kind": "decoder", "layer": "1", "head": "2", "style": "map"}
    assert page.run("return document.querySelectorAll('#picture canvas').length") == 1


def test_markup_in_tokens_is_shown_as_text(open_page):
    page = open_page(made_up(HOSTILE, [*HOSTILE, "</s>"]))
    assert page.run("return window.broken ?? null") is None
    assert page.run("return [document.scripts.length, document.images.length]") == [2, 0]
    assert page.run("return [...document.querySelectorAll('ol.key button')].map(x => x.textContent)") == HOSTILE
    assert page.run("return document.getElementById('source').textContent") == "".join(HOSTILE)
    page.hover(page.token("query", 1))
    page.choose("style", "map")
    page.choose("head", 1)
    page.press("\ue004", "\ue015")
    assert page.run("return window.broken ?? null") is None


def test_line_pixels_match_the_weights(open_page):
    """Check the pixel half way along each line of the token under the pointer."""
    attention = made_up(SOURCE, TARGET, seed=3)
    page = open_page(attention, View("cross", 1, 2))
    weights = chosen_weights(attention, "cross", 1, 2)
    page.hover(page.token("query", 0))
    alphas = page.run(
        """const canvas = document.querySelector('#picture canvas'), context = canvas.getContext('2d');
        const row = canvas.height / arguments[0];
        return [...Array(arguments[1]).keys()].map(key =>
          context.getImageData(canvas.width / 2, (key + 1) / 2 * row, 1, 1).data[3] / 255);""",
        *(len(TARGET), len(SOURCE)),
    )
    shares = weights[0] / weights.max()
    assert np.all(np.array(alphas)[shares < 0.01] == 0)
    assert alphas[int(shares.argmax())] > 0.3 * shares.max()
    assert np.argsort(alphas)[-2:].tolist() == np.argsort(shares)[-2:].tolist()
    page.hover(page.driver.find_element("id", "caption"))
    count = """const canvas = document.querySelector('#picture canvas');
        const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        return pixels.filter((part, i) => i % 4 == 3 && part).length;"""
    everything = page.run(count)
    page.hover(page.token("query", 0))
    assert 0 < page.run(count) < everything / 2


CELLS = """
  const canvas = document.querySelector('#picture canvas'), box = canvas.getBoundingClientRect(), found = [];
  const context = canvas.getContext('2d'), scale = canvas.width / box.width;
  for (let y = 0; y < box.height; y += 5) for (let x = 0; x < box.width; x += 5) {
    canvas.dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + x, clientY: box.top + y}));
    const status = document.getElementById('status').textContent.replace(/[\\u2068\\u2069]/g, '');
    const pixel = [...context.getImageData(x * scale, y * scale, 1, 1).data];
    if (/attends to .* %/.test(status) && status.includes('attends to \\u201c')) found.push([status, x, pixel]);
  }
  return found;"""


@pytest.mark.parametrize("source", [SOURCE, HEBREW], ids=["left to right", "right to left"])
def test_cell_pixels_match_the_weights(open_page, source):
    attention = made_up(source, TARGET, seed=1)
    page = open_page(attention, View("cross", 1, 1, "map"))
    weights = chosen_weights(attention, "cross", 1, 1)
    pixels, columns = {}, {}
    for status, x, pixel in page.run(CELLS):
        pixels.setdefault(status, []).append(tuple(pixel))
        columns.setdefault(status, []).append(x)
    expected = {
        f"\u201c{query}\u201d attends to \u201c{key}\u201d: {100 * weights[i, j]:.1f} %.": (i, j)
        for i, query in enumerate(TARGET)
        for j, key in enumerate(source)
    }
    assert len(set(expected) & set(pixels)) >= len(expected) - 2, "a rounding may differ in its last digit"
    soft, full = np.array([0xF1, 0xF2, 0xF6]), np.array([188, 27, 27])  # --soft, and hsl(0 75% 42%)
    for status, (i, j) in expected.items():
        if status in pixels:
            share = weights[i, j] / weights.max()
            ((inner, _),) = Counter(pixels[status]).most_common(1)  # others are of the frame around what is pointed at
            np.testing.assert_allclose(inner[:3], soft + share * (full - soft), atol=4, err_msg=status)
    first, last = (
        np.mean([np.mean(x) for text, x in columns.items() if f"to \u201c{key}\u201d" in text])
        for key in (source[0], source[-1])
    )
    assert (first < last) == (source is SOURCE)


def test_keys_move_the_visible_focus(open_page):
    attention = made_up(SOURCE, TARGET)
    page = open_page(attention, View("cross", 1, 1))
    up, down, left, right, home, end = "\ue013\ue015\ue012\ue014\ue011\ue010"
    for _ in range(9):
        page.press("\ue004")  # Tab
        if "of 6" in page.focused:
            break
    assert page.focused == "\u2581Der, 1 of 6", "one stop in the tab order, after the controls"
    page.press(down, down, up)
    assert page.focused == "\u2581Hund, 2 of 6"
    check_list(page, SOURCE, chosen_weights(attention, "cross", 1, 1)[1])
    assert page.run("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert page.run("return parseFloat(getComputedStyle(document.activeElement).outlineWidth)") >= 2
    page.press(right)
    assert page.focused == "\u2581dog, 2 of 5"
    page.press(end, down)
    assert page.focused == "</s>, 5 of 5"
    page.press(home, left)
    assert page.focused == "\u2581Der, 1 of 6"
    page.press("\ue00f", "+")  # Page down: the next layer
    assert page.focused == "\u2581Der, 1 of 6"
    check_list(page, SOURCE, chosen_weights(attention, "cross", 2, 2)[0])
    page.press("\ue00c")  # Escape
    assert (page.status, page.listed) == ("All tokens.", [])
    page.token("key", 3).click()
    page.choose("head", 3)
    check_list(page, TARGET, chosen_weights(attention, "cross", 2, 3)[:, 3])
    page.token("key", 3).click()
    assert page.status == "All tokens.", "a second click lets go"


@pytest.mark.parametrize("source", [SOURCE, HEBREW], ids=["left to right", "right to left"])
def test_keys_move_over_the_heat_map(open_page, source):
    attention = made_up(source, TARGET)
    page = open_page(attention, View("cross", 1, 1, "map"))
    page.run("document.querySelector('#picture canvas').focus()")
    towards_second = "\ue014" if source is SOURCE else "\ue012"
    page.press("\ue015", "\ue015", towards_second)
    weights = chosen_weights(attention, "cross", 1, 1)
    assert page.status == f"\u201c{TARGET[1]}\u201d attends to \u201c{source[1]}\u201d: {100 * weights[1, 1]:.1f} %."
    page.press("+", "+", "\ue010")
    weights = chosen_weights(attention, "cross", 1, 3)
    assert page.status == f"\u201c{TARGET[1]}\u201d attends to \u201c{source[-1]}\u201d: {100 * weights[1, -1]:.1f} %."
    assert page.focused.startswith("Heat map")
    page.press("-", "-", "-", "-")
    assert page.run("return document.querySelectorAll('.heads button').length") == 3, "all heads"
    assert page.focused == "BUTTON"
    page.press("\ue004", "\ue007")  # to the second one; Enter
    assert page.run("return document.querySelector('input[name=head]:checked').value") == "2"
    assert page.focused.startswith("Heat map")


def test_all_controls_have_accessible_names(open_page):
    page = open_page(made_up(SOURCE, TARGET))
    tree = page.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    named = {
        (node["role"]["value"], node["name"]["value"])
        for node in tree
        if not node["ignored"]
        and node.get("name")
        and node["role"]["value"] in ("button", "radio", "combobox", "list", "group", "form")
    }
    assert not {role for role, name in named if not name.strip()} - {"list"}
    assert {("group", "Attention"), ("group", "Layer"), ("group", "Head"), ("group", "Picture")} <= named
    assert {("radio", "encoder self"), ("radio", "heat map"), ("radio", "mean"), ("radio", "3")} <= named
    assert {("list", "tokens that attend"), ("list", "tokens that are attended to")} <= named
    assert ("button", "\u2581dog, 2 of 5") in named
    assert any(role == "combobox" and name.startswith("Colors") for role, name in named)


def test_dark_and_light_themes(open_page):
    from selenium.webdriver.support.ui import Select

    page = open_page(made_up(SOURCE, TARGET))
    switch = Select(page.driver.find_element("id", "theme"))

    def brightness():
        return sum(int(x) for x in page.run("return getComputedStyle(document.body).backgroundColor.match(/\\d+/g)"))

    def prefer(scheme):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        time.sleep(0.1)

    try:
        prefer("dark")
        assert brightness() < 150, "follows the system at once"
        switch.select_by_value("light")
        assert brightness() > 600, "the switch overrides the system"
        prefer("light")
        switch.select_by_value("dark")
        assert brightness() < 150
    finally:
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_right_to_left_text(open_page):
    page = open_page(made_up(HEBREW, TARGET))
    is_rtl = page.run("return [...document.querySelectorAll('ol.key bdi')].map(x => x.matches(':dir(rtl)'))")
    assert is_rtl == [True, True, True, False]
    assert page.run("return document.getElementById('source').matches(':dir(rtl)')")
    page.hover(page.token("key", 0))
    assert page.status.startswith(f"\u201c{HEBREW[0]}\u201d is attended to")


def test_hundred_tokens_are_drawn_in_time(open_page):
    """Check with six layers of eight heads that changes are drawn within 5 seconds and fit the page."""
    source, target = ([f"{word}{i}" for i in range(99)] + ["</s>"] for word in ("\u2581source", "\u2581target"))
    attention = made_up(source, target, layers=6, heads=8)
    page = open_page(attention)
    page.hover(page.token("query", 99))
    check_list(page, source, chosen_weights(attention, "cross", 6, "all")[99])
    choices = (
        ("layer", 3),
        ("style", "map"),
        ("head", "mean"),
        ("kind", "encoder"),
        ("style", "lines"),
        ("head", "all"),
    )
    for name, value in choices:
        start = page.run("return performance.now()")
        page.choose(name, value)
        taken = page.run("return performance.now()") - start
        assert taken < 5000, f"{name} {value}: {taken:.0f} ms"
        assert page.run("return document.documentElement.scrollWidth <= innerWidth"), (name, value)
    page.token("query", 0).click()
    page.press("\ue010")
    assert page.focused == "</s>, 100 of 100"
    box = page.run(
        "const box = document.activeElement.getBoundingClientRect(); return [box.top, box.bottom, innerHeight]"
    )
    assert 0 <= box[0] <= box[1] <= box[2], "the focused element is visible"
    least = page.run(
        """const controls = document.querySelector('form');
        let least = Infinity;
        for (let i = 0; i < 60; i++) {
          const up = new KeyboardEvent('keydown', {key: 'ArrowUp', bubbles: true, cancelable: true});
          document.activeElement.dispatchEvent(up);
          const top = document.activeElement.getBoundingClientRect().top;
          least = Math.min(least, top - controls.getBoundingClientRect().bottom);
        }
        return least"""
    )
    assert page.focused == "\u2581source39, 40 of 100"
    assert least >= 0, "the focused element is not under the controls"


def test_omitted_lines_are_reported(open_page):
    attention = made_up(SOURCE * 20, TARGET * 16, layers=1, heads=2)
    maps = attention.maps["encoder"]
    flat = maps._replace(weights=np.full_like(maps.weights, 0.01))
    page = open_page(dataclasses.replace(attention, maps={"encoder": flat}), View("encoder"))
    assert page.driver.find_element("id", "caption").text.endswith("Only the 10000 strongest lines are drawn.")
    page.choose("head", 1)
    assert page.driver.find_element("id", "caption").text.endswith("is a weight of 1.0 %.")
