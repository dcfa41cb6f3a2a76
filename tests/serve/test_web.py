"""The pages in a real browser: what a visitor does, and what they must never do."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.serve.browser import Browser, Page, chromium
from tests.serve.script_engine import ScriptEngine
from tests.serve.script_server import TOKENIZER, Running, running, said

ANSWER = """# Title

Some **bold** text and `code`, [a link](https://example.org/x), [not a link](javascript:alert(1)).

```python
print("<b>hi</b>")
```

- one
- two

| a | b |
|---|---|
| 1 | 2 |

<img src=x onerror="window.hacked = true"><script>window.hacked = true</script>"""
CTRL = 2


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if shutil.which("chromium") is None:
        pytest.skip("needs Chromium (Debian: apt-get install chromium); .ci/run installs it")
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    engine = ScriptEngine(said, vocab_size=TOKENIZER.vocab_size, step_s=0.0005)
    with running(tmp_path_factory.mktemp("site"), engine) as server:
        yield server


@pytest.fixture(scope="module")
def page(browser: Browser) -> Page:
    return browser.page()


@pytest.fixture(autouse=True)
def _clean(page: Page, site: Running) -> Iterator[None]:
    """Every test: no script error, nothing asked of other sites."""
    page.resize(1100, 800)
    yield
    assert page.problems == []
    assert [url for url in page.requests if not url.startswith((site.url, "data:"))] == []
    page.requests.clear()


def ask(page: Page, text: str) -> None:
    page.write("#prompt", text)
    page.press("Enter")


def test_chat(page: Page, site: Running):
    page.open(site.url + "/")
    page.wait("document.querySelector('#model option')")
    ask(page, f"SAY<<{ANSWER}>>END")
    page.wait("document.querySelector('#regenerate') && document.querySelector('#send').innerText === 'Send'")
    last = ".turn.assistant:last-child "
    assert page.text(last + "h2") == "Title"
    assert page.text(last + "strong") == "bold"
    assert page.text(last + ".code code") == 'print("<b>hi</b>")'
    assert page.text(last + ".code header span") == "python"
    assert page.js(f"document.querySelectorAll('{last} li').length") == 2
    assert page.text(last + "td") == "1"
    assert page.js(f"[...document.querySelectorAll('{last} .said a')].map(a => a.href)") == ["https://example.org/x"]
    assert page.js("window.hacked") is None
    assert "tokens/s" in page.text(last + ".speed")
    assert site.engine.submitted[-1].sampling.temperature == 0.7
    num_before = len(site.engine.submitted)
    page.click("#regenerate")
    page.wait("document.querySelector('#regenerate') && document.querySelector('#send').innerText === 'Send'")
    assert len(site.engine.submitted) == num_before + 1
    assert site.engine.submitted[-1].prompt == site.engine.submitted[-2].prompt
    # A second turn carries the first; a reload keeps both.
    ask(page, "SAY<<second>>END")
    page.wait("document.querySelectorAll('.turn').length === 4 && document.querySelector('#send').innerText === 'Send'")
    assert "Title" in TOKENIZER.decode(site.engine.submitted[-1].prompt)
    page.open(site.url + "/")
    page.wait("document.querySelectorAll('.turn').length === 4")
    page.click("#new")
    assert page.js("document.querySelectorAll('.turn').length") == 0


def test_chat_follows_the_answer_on_a_phone(page: Page, site: Running):
    """However long the conversation is, and whatever is wide in it."""
    page.resize(360, 700)
    page.open(site.url + "/")
    page.wait("document.querySelector('#model option')")
    at_end = "(e => e.scrollHeight - e.scrollTop - e.clientHeight < 80)(document.scrollingElement)"
    wide = f"| {'a' * 60} | {'b' * 60} |\n|---|---|\n| 1 | 2 |\n\n```\n{'c' * 200}\n```\n\n{'d' * 200}"
    for num_turns, text in ((2, wide), (4, "line\n\n" * 60)):
        ask(page, f"SAY<<{text}>>END")
        page.wait(f"document.querySelectorAll('.turn').length === {num_turns}")
        assert page.js(at_end)
        page.wait("document.querySelector('#send').innerText === 'Send'")
        assert page.js(at_end)
        assert page.js("document.documentElement.scrollWidth") == 360
    page.click("#new")


def test_chat_says_that_an_answer_was_cut_off(page: Page, site: Running):
    page.open(site.url + "/")
    page.wait("document.querySelector('#model option')")
    chunk = 'data: {"choices": [{"index": 0, "delta": {"content": "half"}}]}\\n\\n'
    page.js(f"window.fetch = async () => new Response('{chunk}')")
    ask(page, "hi")
    page.wait("/connection was lost/.test(document.querySelector('.turn .error')?.innerText)")
    assert page.text(".turn.assistant .said") == "half"
    page.click("#new")


@pytest.mark.parametrize("stop", [lambda page: page.press("Escape"), lambda page: page.click("#send")])
def test_chat_stop(page: Page, site: Running, stop: Callable[[Page], None]):
    page.open(site.url + "/")
    page.wait("document.querySelector('#model option')")
    site.engine.step_s = 0.01
    try:
        ask(page, f"SAY<<{'word ' * 500}>>END")
        page.wait("/tokens\\/s/.test(document.querySelector('.writing .speed')?.innerText)")
        stop(page)
        page.wait("/stopped/.test(document.querySelector('.turn:last-child .speed').innerText)")
        site.wait_idle()
        text = page.text(".turn.assistant .said")
        assert 1 <= len(text) < 2000
        assert ("word " * 500).startswith(text)
    finally:
        site.engine.step_s = 0.0005
        page.click("#new")


def test_playground(page: Page, site: Running, capsys: pytest.CaptureFixture[str]):
    page.open(site.url + "/playground")
    page.wait("document.querySelector('#model option')")
    page.write(".line:last-child textarea", 'SAY<<{"name": "Ada", "age": 36}>>END')
    page.js("document.querySelector('.line select').value = 'assistant'")
    page.write(".line textarea", "It's so.")
    page.write("#top_p", "0.9")
    page.write("#seed", "7")
    page.write("#stop", "zzz\nyyy")
    page.js(
        "(e => { e.value = 'json_schema'; e.dispatchEvent(new Event('change')) })(document.querySelector('#format'))"
    )
    page.press("Enter", CTRL)
    page.wait("document.querySelector('#timings .legend') && document.querySelector('#run').innerText === 'Run'")
    assert json.loads(page.text("#answer code")) == {"name": "Ada", "age": 36}
    timings = page.text("#timings")
    for word in ("Queue", "Prompt", "Completion", "tokens/s", "ended: stop"):
        assert word in timings
    drawn = site.engine.submitted[-1].sampling
    assert (drawn.seed, drawn.temperature, drawn.top_p, drawn.max_tokens) == (7, 0.7, 0.9, 256)
    prompt = TOKENIZER.decode(site.engine.submitted[-1].prompt, skip_special=False)
    assert prompt.startswith("<|im_start|>assistant\nIt's so.<|im_end|>\n<|im_start|>user\n")
    # The code that it shows runs as it is.
    page.click("#code")
    if shutil.which("curl") is not None:
        done = subprocess.run(["bash", "-c", page.text("#code-body code")], capture_output=True, text=True)
        assert json.loads(json.loads(done.stdout)["choices"][0]["message"]["content"]) == {"name": "Ada", "age": 36}
        assert site.engine.submitted[-1].prompt == site.engine.submitted[-2].prompt
    assert f"curl {site.url}/v1/chat/completions" in page.text("#code-body code")
    page.click("[data-tab=python]")
    exec(compile(page.text("#code-body code"), "snippet", "exec"), {})
    assert json.loads(capsys.readouterr().out) == {"name": "Ada", "age": 36}
    assert site.engine.submitted[-1].sampling.seed == 7
    page.click("#close-code")


def test_playground_tools_and_mistakes(page: Page, site: Running):
    page.open(site.url + "/playground")
    page.wait("document.querySelector('#model option')")
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
    page.write(".line:last-child textarea", f"SAY<<{call}>>END")
    page.write("#tools", "[{")
    page.click("#run")
    page.wait("/not valid JSON/.test(document.querySelector('#error').innerText)")
    page.write("#tools", '[{"type": "function", "function": {"name": "weather"}}]')
    for is_stream in (True, False):
        page.js(f"document.querySelector('#stream').checked = {json.dumps(is_stream)}")
        page.click("#run")
        page.wait("document.querySelector('#timings .legend') && document.querySelector('#run').innerText === 'Run'")
        assert page.text("#calls header span") == "calls weather"
        assert json.loads(page.text("#calls code")) == {"city": "Bern"}
    page.write("#temperature", "9")
    page.click("#run")
    page.wait("/temperature/.test(document.querySelector('#error').innerText)")
    # The browser reports the refused request as an error of its own.
    page.problems.clear()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", ["/", "/playground", "/console", "/docs"])
def test_fits_a_phone_and_both_schemes(page: Page, site: Running, path: str, scheme: str, tmp_path: Path):
    page.prefer(scheme)
    page.resize(360, 700)
    page.open(site.url + path)
    page.wait("document.querySelector('header nav a')")
    assert page.js("document.documentElement.dataset.theme") == scheme
    assert page.js("document.documentElement.scrollWidth") <= 360
    # Dark is dark, and text can be told from it.
    red = page.js("Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])")
    ink = page.js("Number(getComputedStyle(document.body).color.match(/\\d+/)[0])")
    assert (red < 60 and ink > 200) if scheme == "dark" else (red > 200 and ink < 60)
    fields = "[...document.querySelectorAll('input,select,textarea,button')]"
    nameless = (
        f"{fields}.filter(e => !(e.labels?.length || e.ariaLabel || e.innerText || e.title)).map(e => e.outerHTML)"
    )
    assert page.js(nameless) == []
    page.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 5000
    page.prefer("light")


def test_keyboard_reaches_everything(page: Page, site: Running):
    page.open(site.url + "/")
    page.wait("document.querySelector('#model option')")
    page.js("document.activeElement.blur()")
    reached = set()
    for _ in range(16):
        page.press("Tab")
        reached.add(page.js("document.activeElement.id || document.activeElement.innerText"))
    assert reached >= {"model", "prompt", "send", "new", "key-button", "Playground", "Console"}


def test_console(page: Page, site: Running):
    """Last: its first key closes the server."""
    page.open(site.url + "/console")
    page.wait("document.querySelector('#recent tbody td.num')")
    assert page.js("document.querySelectorAll('#chart rect').length") >= 1
    assert "without key" in page.text("#chart-legend")
    page.write("#name", "Ada")
    page.write("#tokens", "5000")
    page.click("#create button")
    page.wait("document.querySelector('#new-secret')")
    secret = page.text("#new-secret")
    assert site.get("/v1/models").status_code == 401
    headers = {"authorization": f"Bearer {secret}"}
    assert site.get("/v1/models", headers=headers).headers["x-ratelimit-limit-tokens-minute"] == "5000"
    # The page took the key over and still works.
    page.open(site.url + "/console")
    page.wait("/Ada/.test(document.querySelector('#keys').innerText)")
    assert "5,000 of 5,000 left" in page.text("#keys")
    assert secret not in page.js("document.documentElement.outerHTML")
    page.open(site.url + "/")
    page.wait("document.querySelector('#model option')")
    # Somebody without the key is asked for it.
    page.js("localStorage.clear()")
    page.open(site.url + "/")
    page.wait("document.querySelector('#key-dialog').open")
    assert page.text("#key-dialog .error") == ""
    page.write("#key-dialog input", "wrong")
    page.press("Enter")
    page.wait("/not valid/.test(document.querySelector('#key-dialog .error')?.innerText)")
    page.write("#key-dialog input", secret)
    page.press("Enter")
    page.wait("document.querySelector('#model option')")
    page.open(site.url + "/console")
    page.wait("document.querySelector('#keys .danger')")
    page.js("window.confirm = () => true")
    page.click("#keys .danger")
    page.wait("document.querySelector('#key-dialog').open || /revoked/.test(document.querySelector('#keys').innerText)")
    assert site.get("/v1/models", headers=headers).status_code in (200, 401)
    assert all(key.revoked for key in site.store.all())
    # 401 while the key was missing: the browser's own report.
    page.problems.clear()
