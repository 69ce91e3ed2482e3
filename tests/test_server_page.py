"""The web page in a real browser: it sends, streams, stops, and shows hostile output as the text it is."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest
from serving import Served, scripted, serving, until
from talkers import chat_template

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt-get install chromium)")

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
HOSTILE = """\
# Title <script>document.title='owned'</script>

<img src=x onerror="document.title='owned'"> **bold** and `code <b>` and *it*

[bad](javascript:document.title='owned') [good](https://example.org/a?b=c) ![pic](http://127.0.0.1:9/x.png)

```html
<script>document.title='owned'</script>
<iframe srcdoc="<script>parent.document.title='owned'</script>"></iframe>
```

- one
- two

| a | b |
|---|---|
| <svg onload=alert(1)> | 2 |
"""
REPLY = f"thoughts <b>here</b></think>\n\n{HOSTILE}"
ENDLESS = "a</think>\n\n" + "word " * 400


def pause(step: int) -> None:
    if step > 40:
        time.sleep(0.01)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    replies = (REPLY, ENDLESS, "b</think>\n\nThe *second* try", "c</think>\n\nLast words")
    with serving(scripted(*replies, template=chat_template("always"), on_step=pause), api_key="secret") as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        opened.close()


@pytest.mark.long
def test_a_conversation_on_the_page(served: Served, browser: Any) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 800}, color_scheme="dark")
    page = context.new_page()
    page.set_default_timeout(15_000)
    faults: list[str] = []
    requested: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("dialog", lambda dialog: (faults.append("a script opened a dialog"), dialog.dismiss()))
    page.on("request", lambda request: requested.append(request.url))
    page.goto(served.url + "/")

    # The key is asked for, and everything can be reached by keyboard.
    page.keyboard.type("Hello")
    page.keyboard.press("Enter")
    page.locator("dialog[open]").wait_for()
    page.keyboard.type("secret")
    page.keyboard.press("Enter")
    page.locator("#model", has_text="tiny").wait_for()

    # A hostile answer is text.
    page.get_by_role("button", name="Regenerate").click()
    figures = page.locator("article.assistant .tools span")
    figures.wait_for()
    assert re.search(r"\d+ tokens · [\d.]+ tok/s .* memory \d+ MB", figures.inner_text())
    answer = page.locator("article.assistant .text")
    assert page.title() == "swiftlet-mlx"
    assert answer.locator("script, img, iframe, svg").count() == 0
    assert "<script>document.title='owned'</script>" in answer.locator("h2").inner_text()
    assert answer.locator("strong").inner_text() == "bold"
    assert answer.locator("p code").inner_text() == "code <b>"
    assert "<iframe srcdoc=" in answer.locator("pre code").inner_text()
    assert answer.locator("li").all_inner_texts() == ["one", "two"]
    assert answer.locator("td").first.inner_text() == "<svg onload=alert(1)>"
    assert [a.get_attribute("href") for a in answer.locator("a").all()] == [
        "https://example.org/a?b=c",
        "http://127.0.0.1:9/x.png",
    ]
    thoughts = page.locator("details.thoughts")
    assert thoughts.get_attribute("open") is None
    assert thoughts.locator("div").text_content() == "thoughts <b>here</b>"
    assert page.evaluate("document.documentElement.scrollWidth") <= 390, "it fits a phone"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(25, 24, 21)"

    # Stop keeps what came; regenerate replaces it.
    page.locator("#prompt").fill("Go on")
    page.keyboard.press("Enter")
    page.locator("#status", has_text="tok/s").wait_for()
    page.keyboard.press("Escape")
    page.locator("#status", has_text="Stopped.").wait_for()
    until(lambda: served.server.desk.in_flight == 0)
    last = page.locator("article.assistant").last
    assert 0 < last.locator(".text").inner_text().count("word") < 400
    page.get_by_role("button", name="Regenerate").click()
    page.locator("article.assistant .text", has_text="The second try").wait_for()
    assert page.locator("article").count() == 4
    assert last.locator("em").inner_text() == "second"

    # A reload keeps the conversation, New drops it.
    page.get_by_role("button", name="Regenerate").wait_for()
    page.reload()
    assert page.locator("article").count() == 4
    page.get_by_role("button", name="New").click()
    assert page.locator("article").count() == 0
    assert faults == []
    assert {re.match(r"https?://[^/]+", url)[0] for url in requested if url.startswith("http")} == {served.url}  # type: ignore[index]
    context.close()


def test_settings_reach_the_request(served: Served, browser: Any) -> None:
    page = browser.new_page()
    page.goto(served.url + "/")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Longest reply").fill("7")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Thinking").select_option("off")
    page.get_by_label("API key").fill("secret")
    page.get_by_label("Colours").select_option("light")
    page.get_by_role("button", name="Done").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    with page.expect_request("**/v1/chat/completions") as sent:
        page.locator("#prompt").fill("Hi")
        page.keyboard.press("Enter")
    body = sent.value.post_data_json
    assert (body["temperature"], body["max_tokens"], body["enable_thinking"]) == (0.5, 7, False)
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    page.get_by_role("button", name="Regenerate").wait_for()
    page.close()


def test_the_page_loads_nothing_from_elsewhere_and_holds_itself_to_it(served: Served) -> None:
    response = served.get("/")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", response.text)
    assert "innerHTML" not in response.text
    assert " on" + "click=" not in response.text
