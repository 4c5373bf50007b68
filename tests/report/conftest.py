"""A browser, and pages of made-up runs in it."""

import os
import shutil
from types import SimpleNamespace

import pytest
from made_run import make_run
from playwright.sync_api import sync_playwright

from prl.report.page import write_page

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")  # playwright's loop runs as long as this is open: no async test can share it
def browser():
    """A headless Chromium, without which these tests fail."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    with sync_playwright() as playwright:
        if found is None and not os.path.exists(playwright.chromium.executable_path):
            pytest.fail(
                f"no browser: none of {', '.join(BROWSERS)} is on the PATH. Install one (Debian: apt-get install "
                "chromium; scripts/test does so where it may) or playwright's own: python -m playwright install chromium"
            )
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        made = playwright.chromium.launch(executable_path=found, args=options)
        yield made
        made.close()


@pytest.fixture
def open_page(browser, tmp_path):
    """`open_page(steps=…, rollouts=…)`: the page of a made-up run in the browser.

    With `run`, its directory; `requests`, what the page asked for; `said`, what it wrote to the console and what it
    raised. The network is cut off.
    """
    context = browser.new_context(viewport={"width": 1280, "height": 900}, offline=True)
    context.set_default_timeout(60_000)

    def open_(**size):
        run = make_run(tmp_path / "run", **size)
        path = write_page(run)
        page, found = context.new_page(), SimpleNamespace(run=run, path=path, requests=[], said=[])
        page.on("request", lambda request: found.requests.append(request.url))
        page.on("console", lambda message: found.said.append(message.text))
        page.on("pageerror", lambda error: found.said.append(str(error)))
        page.on("dialog", lambda dialog: (found.said.append(dialog.message), dialog.dismiss()))
        page.goto(path.as_uri())
        found.page = page
        return found

    yield open_
    context.close()
