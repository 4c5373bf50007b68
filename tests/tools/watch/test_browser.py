"""The live page in a real browser, with the server as a process of its own."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from made_run import HOSTILE, make_run
from picture_run import show_pictures
from playwright.sync_api import expect, sync_playwright

from prl.tools.report.statistics import band

pytestmark = pytest.mark.slow

ENV = {**os.environ, "PRL_WATCH_TOKEN": "token-of-the-tests"}
WAIT_MS = 30_000


def start(folder, port=0):
    """The command in a process, once it has printed its address: (process, address)."""
    command = [sys.executable, "-m", "prl.tools.watch", str(folder), "--port", str(port)]
    process = subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said = process.stdout.readline()
    return process, re.search(r"http://127\.0\.0\.1:\d+/[\w-]+/", said)[0]


@pytest.fixture
def page(tmp_path):
    """A page of the runs `a` and `b`; with `folder`, `process`, `address`, and `printed` to its console."""
    folder = tmp_path / "my runs"
    make_run(folder / "a", steps=4, rollouts=16, text=HOSTILE, tokens_at=(2,))
    process, address = start(folder)
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=options)
        made = browser.new_page()
        made.set_default_timeout(WAIT_MS)
        expect.set_options(timeout=WAIT_MS)
        opened = SimpleNamespace(page=made, folder=folder, process=process, address=address, printed=[])
        made.on("console", lambda message: opened.printed.append(message.text))
        made.on("pageerror", lambda error: opened.printed.append(str(error)))
        made.on("dialog", lambda dialog: (opened.printed.append(dialog.message), dialog.dismiss()))
        made.goto(address)
        yield opened
        browser.close()
    opened.process.kill()
    opened.process.wait()


def write(run, **line):
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def newest(page, title):
    """The values that the legend of a panel shows for the newest step."""
    return page.locator("figure.panel", has_text=title).locator(".legend")


def test_a_number_follows_the_file(page):
    run, legend = page.folder / "a", newest(page.page, "Entropy")
    expect(legend).to_contain_text("step 4")
    took = []
    for step in (5, 6, 7):
        write(run, step=step, **{"entropy/all/mean": step / 8, "pool/math_easy": 0.25})
        began = time.monotonic()
        expect(legend).to_contain_text(f"entropy {step / 8:.3g}")
        took.append(time.monotonic() - began)
    assert min(took) < 2
    page.page.locator(
        "figure.panel", has_text="Difficulty pools"
    ).scroll_into_view_if_needed()  # drawn where it is seen
    expect(newest(page.page, "Difficulty pools")).to_contain_text("math_easy 0.25")
    expect(page.page.locator("#runs")).to_contain_text("7/4")
    expect(page.page.locator(".verdict")).to_contain_text("reward")
    # A run that goes on writes its file anew, without what came after its checkpoint.
    kept = (run / "metrics.jsonl").read_text().splitlines(keepends=True)[:3]
    (run / ".new").write_text("".join(kept))
    os.replace(run / ".new", run / "metrics.jsonl")
    expect(legend).to_contain_text("step 2")
    assert page.printed == []


def test_a_server_that_is_killed_or_sleeps_is_told_and_comes_back(page):
    legend, state = newest(page.page, "Entropy"), page.page.locator("#connection")
    expect(state).to_have_text("live")
    expect(legend).to_contain_text("step 4")
    page.process.kill()
    page.process.wait()
    expect(state).to_have_text("disconnected, trying again")
    write(page.folder / "a", step=5, **{"entropy/all/mean": 0.125})
    page.process, again = start(page.folder, int(page.address.split(":")[2].split("/")[0]))
    assert again == page.address
    expect(state).to_have_text("live")
    expect(legend).to_contain_text("entropy 0.125")
    page.process.send_signal(signal.SIGSTOP)
    expect(state).to_have_text("disconnected, trying again")
    page.process.send_signal(signal.SIGCONT)
    expect(state).to_have_text("live")
    page.process.send_signal(signal.SIGINT)
    assert page.process.wait(timeout=30) == 130
    assert "Traceback" not in page.process.stderr.read()


def test_a_tab_that_nobody_sees_gives_its_connection_back(page):
    legend = newest(page.page, "Entropy")
    expect(legend).to_contain_text("step 4")
    see(page.page, hidden=True)
    page.page.wait_for_timeout(1500)  # the clock that connects again has ticked
    assert page.page.evaluate("source.readyState === EventSource.CLOSED")
    write(page.folder / "a", step=5, **{"entropy/all/mean": 0.625})
    see(page.page, hidden=False)
    expect(legend).to_contain_text("entropy 0.625")


def see(page, hidden):
    """Turn to the tab or away from it, as a browser tells its page."""
    page.evaluate(
        """hidden => {
            Object.defineProperty(document, "hidden", { get: () => hidden, configurable: true });
            document.dispatchEvent(new Event("visibilitychange"));
        }""",
        hidden,
    )


def test_rollouts_are_searched_and_texts_stay_texts(page):
    opened = page.page
    expect(opened.locator("#count")).to_have_text("64 rollouts")
    opened.get_by_label("lowest reward").fill("1")
    rows = opened.locator("#window .row span:nth-child(5)")
    expect(opened.locator("#count")).not_to_have_text("64 rollouts")
    expect(rows.first).to_have_text("1")
    assert set(rows.all_inner_texts()) == {"1"}
    opened.get_by_label("filter by text").fill("ONERROR=")
    opened.locator("#window .row").first.click()
    assert HOSTILE[:80] in opened.locator("#chosen").inner_text()
    opened.get_by_label("step of the example groups").select_option("2")
    expect(opened.locator(".tokens .t").first).to_be_attached()
    for kind in ("img", "svg:not(.chart svg)", "[onload]", "[onerror]", "script:not([type]) ~ script"):
        assert opened.locator(kind).count() == 0, kind
    assert page.printed == [] and opened.title() == "a · prl"


def test_pictures_come_from_the_server(page):
    digest = show_pictures(page.folder / "a")
    page.page.reload()
    image = page.page.locator(".detail img").first
    image.scroll_into_view_if_needed()
    expect(image).to_have_js_property("naturalWidth", 6)
    assert image.get_attribute("src") == f"picture?run=a&digest={digest}"
    expect(page.page.locator(".detail .pictures").first).to_contain_text("20x10: its file is not there")
    assert {text.partition(":")[0] for text in page.printed} == {"Failed to load resource"}


def test_seeds_are_compared_and_a_new_run_shows_up(page):
    opened = page.page
    expect(opened.locator("#runs li")).to_have_count(1)
    for seed in range(5):
        run = page.folder / "sweep" / f"seed={seed}"
        run.mkdir(parents=True)
        (run / "config.yaml").write_text(f"seed: {seed}\n")
        for step in (1, 2):
            write(run, step=step, **{"entropy/all/mean": step * (seed + 1) ** 2 / 10})
    expect(opened.locator("#runs li")).to_have_count(6)
    for seed in range(5):
        opened.get_by_label(f"compare sweep/seed={seed}").check()
    opened.get_by_label("compare a").uncheck()
    expect(opened.get_by_text("Nothing, but for seeds")).to_be_visible()
    for count in (5, 3):  # an interval from four seeds on, the range below
        expect(opened.get_by_role("heading", name=f"{count} runs")).to_be_visible()
        values = pd.DataFrame({seed: {2: 2 * (seed + 1) ** 2 / 10} for seed in range(5 - count, 5)})
        mean, low, high = band(values).loc[2]
        expect(newest(opened, "Entropy")).to_contain_text(f"{mean:.3g} ({low:.3g} to {high:.3g})".replace("-", "−"))
        for seed in (0, 1):
            opened.get_by_label(f"compare sweep/seed={seed}").uncheck()
    opened.reload()
    expect(opened.get_by_role("heading", name="3 runs")).to_be_visible()
    assert page.printed == []


def test_a_folder_without_runs_waits(page):
    shutil.rmtree(page.folder / "a")
    page.page.reload()
    expect(page.page.locator("#content")).to_contain_text("No run yet")
    make_run(Path(page.folder) / "first", steps=1, rollouts=2)
    expect(page.page.get_by_role("heading", name="first")).to_be_visible()


def make_short(folder, name, status, steps):
    """A run that is only its config, its metrics and how it ended; with a divergence if its name says so."""
    run = folder / name
    run.mkdir()
    (run / "config.yaml").write_text(f"name: {name}\n")
    (run / "result.json").write_text(json.dumps({"status": status, "steps": steps, "seconds": 1.0}))
    for step in range(1, steps + 1):
        write(run, step=step, **{"entropy/all/mean": step / 10} | ({"grad_norm": 1.0} if "norm" in name else {}))


def entry(page, title, name):
    """What the legend of a panel has for a curve."""
    return newest(page, title).locator("> span", has_text=name)


def test_runs_that_are_compared_keep_their_colours_and_show_where_they_ended(page):
    for name, status, steps in (("plain", "completed", 3), ("with-norm", "failed", 2)):
        make_short(page.folder, name, status, steps)
    opened = page.page
    expect(opened.locator("#runs li")).to_have_count(3)
    for name in ("plain", "with-norm"):
        opened.get_by_label(f"compare {name}").check()
    opened.get_by_label("compare a").uncheck()
    expect(opened.get_by_role("heading", name="2 runs")).to_be_visible()
    expect(entry(opened, "Entropy", "with-norm")).to_contain_text("with-norm (failed) 0.2 (step 2)")
    expect(entry(opened, "Entropy", "plain").locator("b")).to_have_text("0.3")
    looks = [entry(opened, title, "with-norm").locator("i").get_attribute("class") for title in ("Entropy", "Gradient")]
    assert looks[0] == looks[1] != entry(opened, "Entropy", "plain").locator("i").get_attribute("class")
    dashes = opened.locator("figure.panel", has_text="Entropy").locator("path.line:not(.dot)")
    expect(dashes).to_have_count(2)
    assert sorted(line.get_attribute("stroke-dasharray") for line in dashes.all()) == ["", "6 4"]
    opened.reload()  # the curves may be there before the list says how runs ended
    expect(entry(opened, "Entropy", "with-norm")).to_contain_text("with-norm (failed) 0.2 (step 2)")
    assert page.printed == []


def make_fork(folder, name, steps):
    """A run of `steps` steps that went on after step 3 of the run `source`, or will."""
    make_short(folder, name, "completed", steps)
    forked = {"checkpoint": str(folder / "source" / "checkpoints" / "step_000003"), "step": 3, "changed": {}}
    (folder / name / "resumes.jsonl").write_text(json.dumps(forked) + "\n")
    (folder / name / "metrics.jsonl").touch()
    lines = (folder / name / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / name / "metrics.jsonl").write_text("".join(lines[3:]))


def test_a_fork_that_is_compared_begins_with_its_source(page):
    """Also where the page was open before its first step."""
    make_short(page.folder, "source", "completed", 3)
    make_fork(page.folder, "fork", 0)
    opened, caption = page.page, page.page.get_by_text("Dotted: the run that one forked.")
    for name in ("source", "fork"):
        opened.get_by_label(f"compare {name}").check()
    opened.get_by_label("compare a").uncheck()
    expect(opened.get_by_role("heading", name="2 runs")).to_be_visible()
    panel = opened.locator("figure.panel", has_text="Entropy")
    expect(entry(opened, "Entropy", "source")).to_be_visible()
    expect(caption).to_be_hidden()
    expect(panel.locator("path.before")).to_have_count(0)
    write(page.folder / "fork", step=4, **{"entropy/all/mean": 0.4})
    expect(panel.locator("path.before")).to_have_count(1)
    expect(caption).to_be_visible()
    opened.get_by_label("compare source").uncheck()
    expect(opened.get_by_role("heading", name="fork")).to_be_visible()
    expect(panel.locator("path.before")).to_have_count(1)
    assert page.printed == []


def test_the_mean_over_seeds_begins_with_what_they_forked(page):
    make_short(page.folder, "source", "completed", 3)
    for seed in (1, 2):
        make_fork(page.folder, f"fork{seed}", 5)
        (page.folder / f"fork{seed}" / "config.yaml").write_text(f"name: fork\nseed: {seed}\n")
    opened = page.page
    for seed in (1, 2):
        opened.get_by_label(f"compare fork{seed}").check()
    opened.get_by_label("compare a").uncheck()
    expect(opened.get_by_role("button", name="mean over seeds")).to_be_visible()
    expect(opened.locator("figure.panel", has_text="Entropy").get_by_role("img")).to_have_accessible_name(
        re.compile(r"Entropy.*: .* 0\.1 to 0\.5")
    )
    expect(opened.get_by_text("Dotted: the run that one forked.")).to_be_hidden()
    assert page.printed == []


def test_a_run_that_is_gone_is_said_to_be(page):
    make_short(page.folder, "short", "completed", 3)
    opened, box = page.page, page.page.get_by_label("compare short")
    opened.get_by_role("button", name="short").click()
    expect(box).to_be_checked()
    box.click()  # the last one stays
    expect(box).to_be_checked()
    shutil.move(page.folder / "short", page.folder.parent / "elsewhere")
    expect(opened.locator("#content")).to_have_text("There is no run short any more.")
    assert opened.locator("#runs .chosen").count() == 0
    shutil.move(page.folder.parent / "elsewhere", page.folder / "short")
    expect(opened.get_by_role("heading", name="short")).to_be_visible()
