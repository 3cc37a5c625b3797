"""The report in a real browser: every figure drawn, nothing fetched, no script, no error, and no page wider than its
screen."""

import pytest

from depthlaw.platform.bundled import bundled
from depthlaw.platform.report import report

SCRIPT = "<script>alert(1)</script>"

pytestmark = pytest.mark.browser


@pytest.fixture(params=[390, 1400])
def opened(browser, made, request):
    """(page, requests, messages) of the report at this width."""
    page = browser.new_page()
    page.set_viewport_size({"width": request.param, "height": 900})
    requests, messages = [], []
    page.on("request", lambda r: requests.append(r.url))
    page.on("console", lambda m: messages.append(m.text))
    page.on("pageerror", lambda e: messages.append(str(e)))
    page.on("dialog", lambda d: (messages.append(d.message), d.dismiss()))
    page.goto(made.report.page.as_uri(), wait_until="load")
    yield page, requests, messages
    page.close()


def test_every_figure_is_drawn(opened, made):
    page, _, _ = opened
    sizes = page.eval_on_selector_all(
        "img", "all => all.map(i => [i.complete, i.naturalWidth, i.naturalHeight, i.getBoundingClientRect().width])"
    )
    assert len(sizes) == len(made.report.figures)
    assert all(done and width > 300 and height > 200 and shown > 280 for done, width, height, shown in sizes)


def test_nothing_is_fetched_and_nothing_goes_wrong(opened, made):
    _, requests, messages = opened
    assert [url for url in requests if not url.startswith("data:")] == [made.report.page.as_uri()]
    assert messages == []


def test_a_name_that_is_a_script_is_shown_as_text(opened):
    page, _, messages = opened
    assert page.locator("script").count() == 0
    assert page.locator("tbody th", has_text=SCRIPT).first.inner_text() == SCRIPT
    assert "onerror=alert(2)>" in page.locator("h1").inner_text()
    assert messages == []


def test_no_script_would_run_even_if_one_got_in(opened):
    """The page's own policy: a script that is put into it is refused."""
    page, _, _ = opened
    page.evaluate(
        "() => { const s = document.createElement('script'); s.textContent = 'window.ran = 1';"
        " document.body.append(s); }"
    )
    assert page.evaluate("() => window.ran") is None


def test_the_page_is_never_wider_than_the_screen_and_wide_tables_scroll_in_their_box(opened):
    page, _, _ = opened
    width = page.viewport_size["width"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    boxes = page.eval_on_selector_all(".scroll", "all => all.map(b => [b.clientWidth, b.scrollWidth, b.tabIndex])")
    assert all(box <= width and tab == 0 for box, _, tab in boxes)
    if width == 390:
        assert any(inner > box for box, inner, _ in boxes)


def test_in_print_no_picture_is_cut_and_no_table_is_left_in_a_box(opened):
    page, _, _ = opened
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 690, "height": 1000})  # A4 less its margins
    style = "e => { const s = getComputedStyle(e); return [s.breakInside, s.overflowX, s.color]; }"
    assert {page.eval_on_selector("img", style)[0], page.eval_on_selector("tr", style)[0]} == {"avoid"}
    assert page.eval_on_selector(".scroll", style)[1] == "visible"
    assert page.eval_on_selector("figcaption", style)[2] == "rgb(0, 0, 0)"
    assert page.evaluate("document.documentElement.scrollWidth") <= 690
    tallest = page.eval_on_selector_all("img", "all => Math.max(...all.map(i => i.getBoundingClientRect().height))")
    assert tallest < 900
    page.emulate_media(media="screen")


@pytest.mark.parametrize("width", [390, 1400])
def test_the_page_of_a_bundled_table_opens_with_its_limits_and_fits_the_screen(browser, tmp_path, width):
    data = bundled("published-400m")
    written = report(data, None, tmp_path / "r")
    page = browser.new_page()
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(written.page.as_uri(), wait_until="load")
    box = page.locator("header .lacks")
    assert data.limits in box.inner_text()
    assert box.bounding_box()["y"] < page.locator(".answer").bounding_box()["y"] < 900  # both seen without scrolling
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    sizes = page.eval_on_selector_all("img", "all => all.map(i => [i.complete, i.naturalWidth])")
    assert len(sizes) == len(written.figures) > 10
    assert all(done and wide > 300 for done, wide in sizes)
    page.close()
