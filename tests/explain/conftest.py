"""A browser for the tests that need one: Debian's Chromium, driven by Playwright, offline."""

import shutil

import pytest

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")


@pytest.fixture(scope="session")
def browser():
    """The browser, or a reason why there is none."""
    driver = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (pip install '.[browser-test]')"
    )
    found = next((path for path in map(shutil.which, BROWSERS) if path), None)
    if found is None:
        pytest.skip(f"no browser on this machine: one of {', '.join(BROWSERS)} is needed")
    with driver.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def opened(browser, tmp_path):
    """Opens a page's text offline; at the end nothing was fetched and the console is empty."""
    said, contexts = [], []

    def open_page(text, *, ready="body[data-ready]", **settings):
        context = browser.new_context(offline=True, **settings)
        contexts.append(context)
        shown = context.new_page()
        shown.on("console", lambda message: said.append(message.text))
        shown.on("pageerror", lambda error: said.append(str(error)))
        shown.on("request", lambda request: said.append(f"asked for {request.url}"))
        path = tmp_path / f"page{len(contexts)}.html"
        path.write_text(text, encoding="utf-8")
        shown.goto(path.as_uri())
        said.remove(f"asked for {path.as_uri()}")
        shown.wait_for_selector(ready, state="attached")
        return shown

    yield open_page
    for context in contexts:
        context.close()
    assert said == []
