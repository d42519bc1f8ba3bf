"""Pages in a browser, offline."""

import pytest


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
