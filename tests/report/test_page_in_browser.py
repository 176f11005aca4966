"""The page in a real browser: what it shows, that it complains of nothing, and that it fits where it is looked at."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from itertools import pairwise

import pytest

from hotsplit.plan.evaluate import evaluate
from hotsplit.report.live import Run
from report.reports import HOSTILE, RATES, line_of, page_of, plan_of, skewed, snapshot_of, weighed

OWN, UNSEEN = skewed(num_layers=12, num_experts=48), skewed(num_layers=12, num_experts=48, tokens=500)
PLANS = [weighed(plan_of(OWN, fraction=fraction), tp=2, pp=2) for fraction in (0.25, 0.5)]
MIDDLE = "(() => { const r = document.querySelector('.cells').getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; })()"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page with two plans, a test, a forecast and a run of two ranks."""
    counts_LE = OWN.phases["decode"].counts
    lines = {rank: tuple(line_of(n, rank=rank, hit=0.4 + n / 100) for n in range(1, 31)) for rank in (0, 1)}
    run = Run(lines=lines, snapshots={0: snapshot_of(PLANS[0], counts=counts_LE)})
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_bytes(page_of(*PLANS, histogram=OWN, test=UNSEEN, rates=RATES, run=run))
    return path


def one_plan(path, plan, *, histogram=OWN, **more):
    path.write_bytes(page_of(plan, histogram=histogram, **more))
    return path


def at_cells(browser):
    """Bring the heat map into the window; its edges there."""
    browser.value("document.querySelector('.cells').scrollIntoView({block: 'center'})")
    browser.value(
        "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))"
    )  # it has scrolled
    return browser.value(MIDDLE)


def key_of(browser, name):
    """What the key below a chart says, by line."""
    texts = browser.value(
        f"[...document.querySelectorAll('#{name}-key li')].map(e => [...e.children].map(c => c.textContent))"
    )
    return {entry[1]: entry[2] for entry in texts if len(entry) == 3}


def test_the_page_complains_of_nothing_and_asks_for_nothing(browser, page):
    browser.open(page)
    assert [] == browser.complaints()


def test_a_request_is_refused_by_the_policy(browser, page):
    browser.open(page)
    assert "refused" == browser.value("fetch('https://example.org/').then(() => 'sent', () => 'refused')")
    assert browser.complaints()


def test_the_figures_are_those_of_the_evaluation(browser, page):
    browser.open(page)
    found = evaluate(PLANS[0], histogram=OWN, test=UNSEEN)
    rates = [found.null, found.in_sample, found.held_out, found.null, found.test.oracle_free]
    shown = browser.texts("[data-plan='0'] .figures dd")
    assert [f"{100 * rate:.1f}\u00a0%" for rate in rates] == shown


def test_the_coverage_key_rests_on_the_plan(browser, page):
    browser.open(page)
    found, key = evaluate(PLANS[0], histogram=OWN, test=UNSEEN), key_of(browser, "coverage")
    assert f"{100 * found.held_out:.1f} %" == key["this ranking, unseen traffic"]
    assert f"{100 * found.in_sample:.1f} %" == key["this ranking, traffic it was made from"]
    assert f"{100 * found.test.oracle_free:.1f} %" == key["best in hindsight, any layers"]
    assert f"{100 * found.null:.1f} %" == key["a blind choice"]


def test_the_coverage_curves_begin_at_nothing_and_end_at_everything(browser, page):
    browser.open(page)
    browser.value("document.querySelector('#coverage').focus()")
    browser.press("Home")
    assert {"0.0 %"} == set(key_of(browser, "coverage").values())
    browser.press("End")
    assert {"100.0 %"} == set(key_of(browser, "coverage").values())


def test_the_forecast_key_has_the_plans_bounds(browser, page):
    browser.open(page)
    low, high = browser.value("data.plans[0].forecast[0].plan.slice(1)")
    shown = key_of(browser, "forecast-0")["per step"]
    numbers = [float(number) for number in re.findall(r"[\d.]+", shown)]
    assert [low, high] == pytest.approx(numbers, rel=5e-3)


def test_the_run_shows_the_last_update_of_the_chosen_rank(browser, page):
    browser.open(page)
    assert "70.0 %" == key_of(browser, "hits")["served hot"]
    browser.value("document.querySelector('input[name=rank][value=\"1\"]').click()")
    assert "Last update, rank 1, step 3,000" == browser.texts("#hits-key .at")[0]


def test_hot_cells_are_as_many_as_the_plan_has(browser, page):
    browser.open(page)
    counted = "data.plans.map(p => hotOf(p).map(row => row.filter(n => n > 0).length))"
    assert [[len(hot) for hot in plan.hot] for plan in PLANS] == browser.value(counted)


def test_another_plan_can_be_chosen(browser, page):
    shown = "[...document.querySelectorAll('[data-plan]:not([hidden])')].map(e => e.dataset.plan)"
    browser.open(page)
    assert {"0"} == set(browser.value(shown))
    browser.value("document.querySelector('input[name=plan][value=\"1\"]').click()")
    assert {"1"} == set(browser.value(shown))
    found = evaluate(PLANS[1], histogram=OWN, test=UNSEEN)
    assert f"{100 * found.held_out:.1f} %" == key_of(browser, "coverage")["this ranking, unseen traffic"]


def test_the_mouse_tells_of_a_cell(browser, page):
    browser.open(page)
    left, top, *_ = at_cells(browser)
    browser.move(left + 3, top + 3)
    counts_E = OWN.phases["decode"].counts[0]
    text = browser.value("document.querySelector('#tip').innerText")
    assert f"Layer 3, expert {counts_E.argmax()}" in text
    assert "hot, number 1 of" in text
    assert (
        f"its own traffic, decode: {int(counts_E.max()):,} pairs ({100 * counts_E.max() / counts_E.sum():.2f} % of its layer"
        in text
    )
    assert "1.0 MiB per rank; stage 0, ranks 0 to 1" in text


@pytest.mark.parametrize("window", [(1200, 900), (390, 700)])
@pytest.mark.parametrize("corner", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_the_tip_stays_in_the_window(browser, page, window, corner):
    browser.open(page, width=window[0], height=window[1])
    left, top, right, bottom = at_cells(browser)
    browser.move((left + 2, right - 2)[corner[0]], (max(top, 0) + 2, min(bottom, window[1]) - 2)[corner[1]])
    edges = browser.value(
        "(() => { const r = document.querySelector('#tip').getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; })()"
    )
    assert edges[2] > edges[0]
    assert 0 <= edges[0] <= edges[2] <= window[0]
    assert 0 <= edges[1] <= edges[3] <= window[1]


def test_a_finger_asks_for_a_cell_and_the_answer_stays(browser, page):
    browser.open(page, width=390, height=844, is_phone=True)
    left, top, *_ = at_cells(browser)
    browser.tap(left + 3, top + 3)
    assert not browser.value("document.querySelector('#tip').hidden")
    assert "hot, number 1 of" in browser.value("document.querySelector('#tip').innerText")
    browser.tap(200, 20)
    assert browser.value("document.querySelector('#tip').hidden")


def test_keys_tell_of_cells_aloud(browser, page):
    browser.open(page)
    browser.value("document.querySelector('.cells').focus()")
    for key in ("ArrowRight", "End", "ArrowDown"):
        browser.press(key)
    least = OWN.phases["decode"].counts[1]
    said = browser.texts("#spoken")[0]
    assert said.startswith("Layer 4, expert ")
    assert f"decode: {int(least.min()):,} pairs" in said
    browser.press("Escape")
    assert browser.value("document.querySelector('#tip').hidden")


def test_by_id_the_cells_stand_in_order_and_scroll_to_the_keys(browser, page):
    browser.open(page, width=390, height=800)
    browser.value("document.querySelector('input[value=id]').click(); document.querySelector('.cells').focus()")
    for key in ("ArrowRight", "End"):
        browser.press(key)
    assert browser.texts("#spoken")[0].startswith("Layer 3, expert 47; ")
    assert browser.value("document.querySelector('.cells').scrollLeft") > 0


def test_a_hot_cell_is_outlined_and_a_cold_one_is_not(browser, tmp_path):
    own = skewed(num_layers=4, num_experts=8, top_k=1)
    browser.open(one_plan(tmp_path / "small.html", plan_of(own), histogram=own))
    rim = """(() => { const c = document.querySelector('#cells'), w = c.width / 8, h = c.height / 4;
        const at = (column) => [...c.getContext('2d').getImageData(Math.round(column * w + w / 2), 3, 1, 1).data].slice(0, 3);
        return [at(0), at(7)]; })()"""
    hot, cold = browser.value(rim)
    assert [0xCF, 0x42, 0x0B] == hot
    assert [0xCF, 0x42, 0x0B] != cold


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 768, 390, 320])
def test_nothing_is_wider_than_the_window(browser, page, scheme, width):
    browser.open(page, width=width, height=844, scheme=scheme, is_phone=width < 500)
    assert width == browser.value("document.documentElement.scrollWidth")
    wide = """[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll, .cells') && e.getBoundingClientRect().right > innerWidth + 1)
        .map(e => e.tagName + '.' + e.className + '#' + e.id)"""
    assert [] == browser.value(wide)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(browser, page, scheme):
    browser.open(page, scheme=scheme)
    ratio = """(() => {
        const luminance = (c) => c.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4).reduce((s, v, i) => s + v * [0.2126, 0.7152, 0.0722][i], 0);
        const parse = (name) => { const n = parseInt(getComputedStyle(document.documentElement).getPropertyValue(name).trim().slice(1), 16); return [n >> 16, (n >> 8) & 255, n & 255]; };
        const paper = luminance(parse('--paper'));
        return Object.fromEntries(['--ink', '--soft', '--own', '--unseen', '--oracle', '--null', '--hot', '--good', '--bad', '--unsure'].map(name => {
            const other = luminance(parse(name)); return [name, (Math.max(paper, other) + 0.05) / (Math.min(paper, other) + 0.05)]; }));
    })()"""
    ratios = browser.value(ratio)
    assert [] == [name for name, value in ratios.items() if value < (3.0 if name == "--null" else 4.5)]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_colours_of_use_change_in_one_direction(browser, page, scheme):
    browser.open(page, scheme=scheme)
    steps = browser.value(
        "colours().map(c => c.match(/\\d+/g).map(Number)).map(([r, g, b]) => 0.2126 * r + 0.7152 * g + 0.0722 * b)"
    )
    differences = [later - earlier for earlier, later in pairwise(steps)]
    assert (
        all(step <= 1.01 for step in differences) if scheme == "light" else all(step >= -1.01 for step in differences)
    )
    assert abs(steps[-1] - steps[0]) > 120


@pytest.mark.parametrize(
    ("scheme", "width", "paper"),
    [("light", 1200, "rgb(251, 250, 246)"), ("dark", 1200, "rgb(20, 23, 27)"), ("dark", 390, "rgb(20, 23, 27)")],
)
def test_a_screenshot_is_as_wide_as_the_window_in_the_readers_scheme(browser, page, tmp_path, scheme, width, paper):
    browser.open(page, width=width, height=844, scheme=scheme, is_phone=width < 500)
    browser.screenshot(tmp_path / "page.png")
    png_width, png_height = struct.unpack(">II", (tmp_path / "page.png").read_bytes()[16:24])
    assert (2 * width, paper) == (png_width, browser.value("getComputedStyle(document.body).backgroundColor"))
    assert png_height > 2 * 844


def test_paper_is_light_and_fits_its_width_also_from_a_dark_screen(browser, page, tmp_path):
    browser.open(page, scheme="dark")
    browser.value(
        "printed = []; addEventListener('beforeprint', () => printed.push(style('--ramp-0'), document.querySelector('#coverage svg').viewBox.baseVal.width))"
    )
    browser.pdf(tmp_path / "page.pdf")
    assert ["#f3f0e6", 680] == browser.value("printed")
    assert "#1d2228" == browser.value("style('--ramp-0')")
    pdf = (tmp_path / "page.pdf").read_bytes()
    boxes = {tuple(map(float, box)) for box in re.findall(rb"/MediaBox\s*\[\s*0 0 ([\d.]+) ([\d.]+)\s*\]", pdf)}
    assert [(595.0, 842.0)] == [(round(w), round(h)) for w, h in boxes]


def test_nothing_is_wider_than_paper_with_all_tables_open(browser, page):
    browser.open(page, width=688)
    browser.value("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    browser.prefer("light", media="print")
    browser.value("dispatchEvent(new Event('beforeprint'))")
    assert 688 == browser.value("document.documentElement.scrollWidth")


def test_hostile_names_run_nothing(browser, tmp_path):
    plan = plan_of(OWN)
    histogram = replace(OWN, name=HOSTILE, quantisation=HOSTILE)
    path = one_plan(tmp_path / "hostile.html", plan, histogram=histogram, names=[HOSTILE])
    browser.open(path)
    assert [] == browser.complaints()
    assert browser.value("document.title").startswith("</script><img src=x")
    assert 0 == browser.value("document.images.length")


def test_without_a_script_the_tables_say_it_all(browser, page):
    text = re.sub(rb"<script>.*?</script>", b"", page.read_bytes(), flags=re.DOTALL)
    bare = page.parent / "bare.html"
    bare.write_bytes(text)
    browser.open(bare)
    found = evaluate(PLANS[0], histogram=OWN, test=UNSEEN)
    rows = browser.value(
        "[...document.querySelectorAll('#budget [data-plan=\"0\"] tbody tr')].map(r => [...r.children].map(c => c.textContent))"
    )
    assert 12 == len(rows)
    assert [f"{100 * rate:.1f} %" for rate in (found.in_sample, found.held_out, found.null)] == rows[-1][1:4]


def test_every_figure_can_be_reached_by_keys_and_has_a_name(browser, page):
    browser.open(page)
    reached = "[...document.querySelectorAll('.chart, .cells, .scroll')].filter(e => e.tabIndex !== 0 || !e.getAttribute('aria-label')).length"
    assert 0 == browser.value(reached)


def test_a_published_histogram_gives_the_published_rate(browser, shared_data, tmp_path):
    from hotsplit.plan.dialects import load_histogram

    histogram, _ = load_histogram(shared_data / "histograms" / "mimo-v2.6-pro.8prompt.json")
    browser.open(one_plan(tmp_path / "mimo.html", plan_of(histogram, fraction=0.3), histogram=histogram))
    assert [] == browser.complaints()
    assert "64.5\u00a0%" == browser.texts(".figures dd")[1]  # 30 % of all cells
    assert 7948 == browser.value("hotOf(data.plans[0]).reduce((n, row) => n + row.filter(x => x > 0).length, 0)")
