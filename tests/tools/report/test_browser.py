"""The page of a run in a real browser."""

import json
import os
import re
import shutil
from types import SimpleNamespace

import pytest
from made_run import HOSTILE, make_run
from picture_run import GONE, show_pictures
from playwright.sync_api import expect, sync_playwright

from prl.tools.report.curves import KINDS
from prl.tools.report.page import write_page

pytestmark = pytest.mark.slow

CLEAR = "rgba(0, 0, 0, 0)"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")  # playwright's loop runs as long as this is open: no async test can share it
def browser():
    """A headless Chromium, without which these tests fail."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    with sync_playwright() as playwright:
        if found is None and not os.path.exists(playwright.chromium.executable_path):
            pytest.fail(
                f"no browser: none of {', '.join(BROWSERS)} is on the PATH. scripts/test_packages installs Debian's "
                "where it may; or have playwright's own: python -m playwright install chromium"
            )
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        made = playwright.chromium.launch(executable_path=found, args=options)
        yield made
        made.close()


def open_page(browser, folder, **size):
    """The page of a made-up run in the browser, cut off from the network.

    With `run`, its directory; `requests`, what the page asked for; `printed`, what it wrote to the console and what it
    raised.
    """
    context = browser.new_context(viewport={"width": 1280, "height": 900}, offline=True)
    context.set_default_timeout(60_000)
    run = make_run(folder / "run", **size)
    path, page = write_page(run), context.new_page()
    opened = SimpleNamespace(run=run, path=path, page=page, requests=[], printed=[])
    page.on("request", lambda request: opened.requests.append(request.url))
    page.on("console", lambda message: opened.printed.append(message.text))
    page.on("pageerror", lambda error: opened.printed.append(str(error)))
    page.on("dialog", lambda dialog: (opened.printed.append(dialog.message), dialog.dismiss()))
    page.goto(path.as_uri())
    return opened


@pytest.fixture(scope="module")
def opened(browser, tmp_path_factory):
    return open_page(browser, tmp_path_factory.mktemp("page"), steps=3, rollouts=256, tokens_at=(1, 2, 3))


def quiet(opened):
    """Nothing in the console, nothing asked for but the page itself."""
    return (opened.printed, opened.requests) == ([], [opened.path.as_uri()])


def number(value):
    """As the page writes one."""
    return f"{value:.4g}".replace("-", "−")


def exported(opened):
    """The export's line of the rollout whose tokens the page shows first."""
    where = opened.page.locator(".detail").first.inner_text()
    step, group, rollout = map(int, re.search(r"step (\d+) .* group (\d+), rollout (\d+)", where).groups())
    lines = (opened.run / "tokens" / f"step_{step:06d}" / "rank_0.jsonl").read_text().splitlines()
    return next(line for line in map(json.loads, lines) if (line["group"], line["rollout"]) == (group, rollout))


def test_tokens_have_colours_and_numbers(opened):
    page, line = opened.page, exported(opened)
    tokens = page.locator(".tokens").first.locator(".t")
    assert tokens.all_inner_texts() == line["text"]

    def colours(mode):
        page.locator("#modes").get_by_role("button", name=mode, exact=True).click()
        script = "spans => spans.map(span => getComputedStyle(span).backgroundColor)"
        return tokens.evaluate_all(script)

    logs = [None if p is None else p - s for p, s in zip(line["trainer_logprobs"], line["inference_logprobs"])]
    divergence = [None if p is None else p - s for p, s in zip(line["trainer_logprobs"], line["ref_logprobs"])]
    signed = {"advantage": line["advantages"], "log-ratio": logs, "teacher divergence": divergence}
    for mode, values in signed.items():
        for shown, value in zip(colours(mode), values, strict=True):
            red, green, *_ = map(float, re.findall(r"[\d.]+", shown))
            assert (shown == CLEAR) if not value else (green > red) == (value > 0), (mode, value, shown)
    shown = colours("ref_kl weight")
    assert [colour == CLEAR for colour in shown] == [not weight for weight in line["ref_kl_weights"]]
    assert len(set(shown)) == len(set(line["ref_kl_weights"]))
    by_use = dict(zip(line["use"], colours("use")))
    assert by_use.pop("context") == CLEAR and len({*by_use.values(), CLEAR}) == len(by_use) + 1

    place = max(range(len(logs)), key=lambda i: abs(logs[i] or 0))
    tokens.nth(place).hover()
    readout = page.locator("#readout").inner_text().replace("\n", " ")
    for name, value in (*signed.items(), ("ratio", line["ratio"]), ("ref_kl weight", line["ref_kl_weights"])):
        assert f"{name} {number(value[place])}" in readout, readout
    assert f"id {line['token_ids'][place]}" in readout and f"use {line['use'][place]}" in readout
    page.locator(".tokens").first.focus()
    page.keyboard.press("ArrowLeft")
    assert f"place {place - 1} " in page.locator("#readout").inner_text().replace("\n", " ")
    page.get_by_role("tab", name="step 2").click()
    assert "step 2 " in page.locator(".detail").first.inner_text()
    assert quiet(opened), (opened.printed, opened.requests)


def test_what_a_model_wrote_stays_text(browser, tmp_path):
    opened = open_page(browser, tmp_path, steps=2, rollouts=16, text=HOSTILE, tokens_at=(1, 2))
    page = opened.page
    for kind in ("script", "img", "svg:not(.chart svg)", "[onload]", "[onerror]"):
        assert page.locator(kind).count() == (2 if kind == "script" else 0), kind
    written = page.locator(".message pre").nth(1).inner_text()
    assert HOSTILE[:100] in written and r"\u202eright to left\u202c \u2028 \x1b[31m ]]>" in written
    assert page.locator(".tokens .t", has_text="</script><img").count() == 1
    assert page.title() == "run · prl" and not set("\u202e\u2028\x1b") & set(page.content())
    page.get_by_placeholder("text, task").fill("onerror=")
    page.get_by_text("32 of 32").wait_for()
    page.locator("#window .row").first.click()
    assert HOSTILE[:100] in page.locator("#chosen").inner_text()
    assert quiet(opened), (opened.printed, opened.requests)
    # Even what did get into the page would not run.
    page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'}))"
    )
    assert page.evaluate("window.ran") is None and "Content Security Policy" in opened.printed[0]


def test_the_picture_stands_beside_the_prompt(browser, tmp_path):
    """Drawn a whole number of times as large: 128 // 6. The page asks for nothing but files of its run."""
    opened = open_page(browser, tmp_path / "a folder", steps=1, rollouts=8, tokens_at=(1,))
    page, digest = opened.page, show_pictures(opened.run)
    write_page(opened.run)
    page.reload()
    image, prompt = page.locator(".detail img").first, page.locator(".detail .message").first
    prompt.scroll_into_view_if_needed()  # a picture is read as it comes into sight
    expect(image).to_have_js_property("naturalWidth", 6)
    assert image.get_attribute("alt") == f"picture {digest[:8]} 6x4" and image.get_attribute("title") == digest
    assert image.evaluate("image => [image.naturalWidth, image.naturalHeight, image.clientWidth]") == [6, 4, 126]
    assert image.evaluate("image => getComputedStyle(image).imageRendering") == "pixelated"
    prompt.get_by_text(f"picture {GONE[:8]} 20x10: its file is not there").wait_for()
    assert re.fullmatch(
        rf"\d\[picture {digest[:8]} 6x4\].*=\[picture {GONE[:8]} 20x10\]", prompt.locator("pre").inner_text()
    )
    assert page.locator(".group > .pictures img").first.get_attribute("title") == digest
    files = {f"{opened.run.as_uri()}/pictures/{each}.png" for each in (digest, GONE)}
    assert set(opened.requests) == {opened.path.as_uri(), *files}
    page.evaluate("document.body.append(Object.assign(new Image(), {src: 'http://127.0.0.1:9/x.png'}))")
    assert all("ERR_FILE_NOT_FOUND" in text or "Content Security Policy" in text for text in opened.printed)


def test_placeholder_tokens_are_one_sign(browser, tmp_path):
    opened = open_page(browser, tmp_path, steps=1, rollouts=8, tokens_at=(1,))
    page, digest = opened.page, show_pictures(opened.run)
    write_page(opened.run)
    page.reload()
    tokens, line = page.locator(".tokens").first.locator(".t"), exported(opened)
    name = f"picture {digest[:8]} 6x4, 3 tokens"
    assert tokens.all_inner_texts() == [*line["text"][:2], name, *line["text"][5:]]
    tokens.nth(3).hover()
    assert "place 5 " in page.locator("#readout").inner_text().replace("\n", " ")
    page.locator(".tokens").first.focus()
    page.keyboard.press("ArrowLeft")
    assert "place 2 " in page.locator("#readout").inner_text().replace("\n", " ")


def test_a_curve_shows_its_values(opened):
    page = opened.page
    metrics = [json.loads(line) for line in (opened.run / "metrics.jsonl").read_text().splitlines()]
    chart = page.locator("figure.panel", has_text="Entropy")
    chart.locator(".chart").focus()
    for step, key in ((3, "Shift"), (2, "ArrowLeft"), (3, "ArrowRight")):
        page.keyboard.press(key)
        assert chart.locator(".at").inner_text() == f"step {step}"
        assert float(chart.locator(".legend b").inner_text()) == pytest.approx(
            metrics[step]["entropy/all/mean"], rel=2e-3
        )
    box = chart.locator(".chart").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + box["height"] / 2)
    assert chart.locator(".at").inner_text() in ("step 1", "step 2")
    assert quiet(opened), (opened.printed, opened.requests)


def panels_of(page, metrics):
    """The curves of each panel that a page would show of these metrics: {title: {name: values}}."""
    script = "metrics => panelsOf(metrics).map(({title, curves}) => [title, curves().map(({name, ys}) => [name, ys])])"
    columns = {key: [list(range(1, len(values) + 1)), values] for key, values in metrics.items()}
    return {title: dict(drawn) for title, drawn in page.evaluate(script, columns)}


def test_a_line_stands_where_the_reward_fell(opened):
    line, told = opened.page.locator("figure.panel path.fell"), opened.page.get_by_text("where the reward fell")
    assert line.count() == 0 and not told.is_visible()
    opened.page.evaluate("showPanels(panelsOf(data.metrics, data.before, [1, 2]))")
    expect(line.first).to_have_attribute("d", re.compile(r"^M221(\.\d+)? "))  # in the middle, of steps 1 to 3
    expect(told).to_be_visible()
    opened.page.evaluate("showPanels(panelsOf(data.metrics, data.before))")
    expect(line).to_have_count(0)


def test_the_panels_by_env(opened):
    metrics = {
        **{"reward/m/mean": [0.5], "reward/m/arrived": [0.4], "reward/m/p50": [0.5], "off_policy/mean": [0.0]},
        **{"metric/m/correct": [0.25], "ref_kl/m/mean": [-1.0], "ref_kl/is_masked": [0.1], "reward/all/mean": [0.5]},
    }
    assert panels_of(opened.page, metrics) == {
        "Reward": {"m": [0.5]},  # what all envs have together is that of the only one
        "Parts and metrics": {"m correct": [0.25]},
        "Divergence from the reference": {"m": [1.0]},
    }
    two = {"reward/all/mean": [0.5], "reward/b/mean": [0.25], "reward/a/mean": [0.75]}
    assert list(panels_of(opened.page, two)["Reward"].items()) == [("b", [0.25]), ("a", [0.75]), ("all", [0.5])]


def test_zero_rewards_are_drawn_and_zero_counts_are_not(opened):
    zeros = {"reward/math/mean": [0.0, 0.0], "truncated/math": [0.0, 0.0], "loss/rl": [0.0, 0.1], "loss/ce": [0.0, 0.0]}
    assert panels_of(opened.page, zeros) == {"Reward": {"math": [0.0, 0.0]}, "Loss": {"rl": [0.0, 0.1]}}


def test_a_page_has_each_panel_once_in_their_order(opened):
    titles = [text.split("\n")[0] for text in opened.page.locator("figcaption").all_inner_texts()]
    known = [kind.title for kind in KINDS]
    places = [next(place for place, title in enumerate(known) if text.startswith(title)) for text in titles]
    assert places == sorted(set(places)) and len(places) > 9


@pytest.mark.parametrize(
    ("options", "values", "ticks"),
    [
        ({"zero": True}, [0.3, 0.9], ["0", "0.25", "0.5", "0.75"]),
        ({"zero": True}, [0.0, 0.0], ["0", "0.25", "0.5", "0.75", "1"]),
        ({"zero": False}, [-0.02, 0.01], ["−0.02", "−0.01", "0", "0.01"]),
        ({"zero": False, "options": {"log": True}}, [1e-5, 1e-2], ["1e−5", "1e−4", "0.001", "0.01"]),
        ({"zero": True, "options": {"peaks": True}}, [500.0, *[1.0] * 39], ["0", "0.5", "1"]),
    ],
    ids=["from zero", "nothing but zero", "below zero", "logarithmic", "a peak cut off"],
)
def test_the_ticks_of_an_axis(opened, options, values, ticks):
    script = """([kind, values]) => {
        const chart = new Chart(), curves = [{name: "x", xs: values.map((_, place) => place), ys: values}];
        chart.update({title: "made", unit: "", kind, curves: () => curves});
        chart.draw();
        return [...chart.figure.querySelectorAll("text[text-anchor=end]")].map(text => text.textContent);
    }"""
    assert opened.page.evaluate(script, [options, values]) == ticks


def test_the_table_of_rollouts_is_searched_filtered_and_sorted(opened):
    page = opened.page
    page.get_by_text("768 of 768").wait_for()
    assert page.locator("#window .row").count() < 60, "only what is in sight is drawn"
    page.get_by_label("step", exact=True).last.select_option("3")
    page.get_by_text("256 of 768").wait_for()
    page.get_by_role("button", name="reward").click()
    page.locator("#scroll").evaluate("box => { box.scrollTop = box.scrollHeight }")
    # Not page.wait_for_function: where it has to wait it evaluates a text, which the page's policy forbids.
    expect(page.locator("#window .row:last-child span:nth-child(5)")).to_have_text("1", timeout=60_000)
    assert quiet(opened), (opened.printed, opened.requests)
