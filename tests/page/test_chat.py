"""The chat in a real browser: answers as they come, conversations that stay apart and stay there, the keyboard."""

from __future__ import annotations

import json
import threading

from tests.page.opening import open_page
from tests.page.upstream import MODELS, PREFIX, Reply, Upstream
from tests.support.servers.browser import Page

ANSWER = "document.querySelector('.assistant:last-child .text')"
DONE = "document.querySelector('.assistant:last-child .under')"
TITLES = "[...document.querySelectorAll('#conversations .open')].map((each) => each.textContent)"
TEXTS = "[...document.querySelectorAll('.message > .text')].map((each) => each.textContent)"


def ask(page: Page, text: str) -> None:
    page.write("#prompt", text)
    page.press_enter()


def ask_and_wait(page: Page, text: str) -> None:
    """The answer is the text itself, unless the upstream has another."""
    ask(page, text)
    page.until(f"{TEXTS}.includes({json.dumps(text)}) && {DONE}")


def titles(page: Page) -> list[str]:
    found: list[str] = page.evaluate(TITLES)
    return found


def test_an_answer_comes_as_it_is_made_and_says_what_it_cost(page: Page, upstream: Upstream) -> None:
    hold = threading.Event()
    upstream.replies["hello"] = Reply(["Some **bold", "** words"], hold=hold)
    ask(page, "hello")
    page.until(f"{ANSWER}?.textContent === 'Some **bold'")
    assert page.evaluate("document.querySelector('#send').hidden && !document.querySelector('#stop').hidden")
    hold.set()
    page.until(DONE)
    assert page.evaluate(f"{ANSWER}.innerHTML") == "<p>Some <strong>bold</strong> words</p>"
    cost = page.text(".cost")
    assert "2 tokens" in cost
    assert "tokens/s" in cost
    assert "12 tokens read" in cost
    assert titles(page) == ["hello"]
    body = upstream.bodies[-1]
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert body["model"] == MODELS[0]
    assert body["stream_options"] == {"include_usage": True}
    assert "Some **bold** words" in page.text("#announcer"), "a screen reader hears the answer once, at its end"


def test_a_stop_keeps_what_has_come_and_tells_the_server(page: Page, upstream: Upstream) -> None:
    upstream.replies["long"] = Reply(["beginning", " never"], hold=threading.Event())
    ask(page, "long")
    page.until(f"{ANSWER}?.textContent === 'beginning'")
    page.press("Escape")
    page.until(DONE)
    assert "stopped" in page.text(".cost")
    upstream.replies.clear()
    ask_and_wait(page, "next")
    assert [message["content"] for message in upstream.bodies[-1]["messages"]] == ["long", "beginning", "next"]
    page.until("true")
    assert upstream.closed[-1] == "long"


def test_an_error_keeps_the_text_and_can_be_tried_again(page: Page, upstream: Upstream) -> None:
    upstream.replies["work"] = Reply([], refusal="The queue is full.")
    ask(page, "work")
    page.until("document.querySelector('.error')")
    assert page.text(".error p") == "The queue is full."
    page.faults.clear()  # Chromium notes the status
    assert page.evaluate(TEXTS)[0] == "work"
    upstream.replies["work"] = Reply(["part"], failure="The engine fell over.")
    page.click(".error button")
    page.until("document.querySelector('.error p')?.textContent === 'The engine fell over.'")
    assert page.evaluate(TEXTS) == ["work", "part"]
    upstream.replies["work"] = Reply(["done"])
    page.click(".error button")
    page.until(f"{DONE} && {ANSWER}.textContent === 'done'")
    assert page.evaluate(TEXTS) == ["work", "done"]
    assert upstream.bodies[-1]["messages"] == [{"role": "user", "content": "work"}]


def test_what_cannot_be_sent_stays_in_the_field(page: Page, upstream: Upstream) -> None:
    upstream.replies["first"] = Reply(["a", "b"], hold=threading.Event())
    ask(page, "first")
    page.until(f"{ANSWER}?.textContent === 'a'")
    ask(page, "second")
    assert page.evaluate("document.querySelector('#prompt').value") == "second"
    page.click("#new")
    assert page.evaluate("document.querySelector('#prompt').value") == "", "a draft belongs to its conversation"
    page.until(f"{TITLES}.includes('first')")
    page.click("#conversations .open")
    page.until("document.querySelector('#prompt').value === 'second'")
    page.click("#stop")
    page.until(DONE)


def test_a_stream_writes_into_its_own_conversation_alone(page: Page, upstream: Upstream) -> None:
    hold = threading.Event()
    upstream.replies["one"] = Reply(["first ", "answer"], hold=hold)
    ask(page, "one")
    page.until(f"{ANSWER}?.textContent === 'first'")
    page.click("#new")
    assert page.evaluate(TEXTS) == []
    ask_and_wait(page, "two")
    hold.set()
    page.until("!document.querySelector('.dot')")
    assert page.evaluate(TEXTS) == ["two", "two"]
    assert upstream.bodies[-1]["messages"] == [{"role": "user", "content": "two"}]
    page.evaluate("[...document.querySelectorAll('#conversations .open')].find((b) => b.textContent === 'one').click()")
    page.until(f"{TEXTS}.join() === 'one,first answer'")


def test_a_deleted_conversation_is_not_written_again_by_its_answer(page: Page, upstream: Upstream) -> None:
    hold = threading.Event()
    upstream.replies["gone"] = Reply(["a", "b"], hold=hold)
    ask(page, "gone")
    page.until(f"{ANSWER}?.textContent === 'a' && {TITLES}.includes('gone')")
    page.click("#conversations .more")
    page.click("[data-do=remove]")
    page.until("document.querySelector('#toast-text').textContent === '“gone” deleted.'")
    hold.set()
    open_page(page, upstream.url)
    assert titles(page) == []


def test_a_reload_keeps_conversations_and_half_an_answer(page: Page, upstream: Upstream) -> None:
    ask_and_wait(page, "kept")
    upstream.replies["half"] = Reply(["half an", " answer"], hold=threading.Event())
    ask(page, "half")
    page.until(f"{ANSWER}?.textContent === 'half an'")
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    page.until("document.querySelector('#conversations li')")
    open_page(page, upstream.url)
    page.until(f"{TITLES}.length === 1")
    assert page.evaluate(TEXTS) == [], "a new conversation is shown"
    page.click("#conversations .open")
    page.until(f"{TEXTS}.join() === 'kept,kept,half,half an'")
    assert "stopped" in page.evaluate("[...document.querySelectorAll('.cost')].at(-1).textContent")


def test_conversations_are_searched_renamed_exported_imported_and_deleted(page: Page, upstream: Upstream) -> None:
    for text in ("apples and pears", "trains"):
        ask_and_wait(page, text)
        page.click("#new")
    page.write("#search", "pears")
    page.until(f"{TITLES}.join() === 'apples and pears'")
    page.click("#conversations .more")
    page.click("[data-do=rename]")
    page.evaluate("document.querySelector('#new-title').value = ''")
    page.write("#new-title", "Fruit")
    page.press_enter()
    page.until(f"{TITLES}.join() === 'Fruit'")
    found = page.evaluate(
        "Promise.all([import('/ui/chat/database.js'), import('/ui/chat/transfer.js')]).then(async ([a, b]) => {"
        "  const database = await a.Database.open();"
        "  const [{id}] = await database.search('fruit');"
        "  const conversation = await database.read(id);"
        "  const [copy] = b.fromJson(b.toJson([conversation]));"
        "  await database.write(copy);"
        "  return [b.toMarkdown(conversation), copy.id !== id, copy.messages.map((each) => each.content)];"
        "})"
    )
    assert found == [
        "# Fruit\n\n## You\n\napples and pears\n\n## Qwen3-8B\n\napples and pears\n",
        True,
        ["apples and pears"] * 2,
    ]
    page.until(f"{TITLES}.join() === 'Fruit,Fruit'")
    page.evaluate("document.querySelector('#toast-text').textContent = ''")
    page.click("#remove-all")
    page.click("#sure [value=yes]")
    page.until("document.querySelector('#toast-text').textContent.includes('deleted')")
    open_page(page, upstream.url)
    assert titles(page) == []


def test_what_is_kept_is_bounded_and_the_oldest_go(page: Page) -> None:
    found = page.evaluate(
        "Promise.all([import('/ui/chat/database.js'), import('/ui/chat/conversation.js')]).then(async ([a, b]) => {"
        "  const database = new a.Database(null);"
        "  let gone = 0;"
        "  for (let number = 0; number < 503; number += 1) {"
        "    const conversation = { ...b.newConversation({}), id: String(number), updated: number };"
        "    gone += await database.write(conversation);"
        "  }"
        "  const left = database.list();"
        "  const messages = [{ role: 'user', content: 'x'.repeat(50e6) }];"
        "  await database.write({ ...b.newConversation({}), id: 'large', updated: 1000, messages });"
        "  return [gone, left.length, left.at(-1).id, database.list().map(({ id }) => id)];"
        "})"
    )
    assert found == [3, 500, "3", ["large"]]


FAULTS_OF_FILES = {
    "no": "The file is not JSON.",
    "[1]": 'The file is no export of this page: its "format" is not "tessera-conversations".',
    '{"format": "tessera-conversations", "conversations": [1]}': "A conversation of the file has no messages.",
    '{"format": "tessera-conversations", "conversations": [{"messages": [{"role": "x"}]}]}': (
        'A message of the file has no "role" of user, assistant or tool.'
    ),
}


def test_the_fault_of_a_file_that_cannot_be_imported_is_named(page: Page) -> None:
    for file, fault in FAULTS_OF_FILES.items():
        code = (
            f"import('/ui/chat/transfer.js').then((m) => {{ try {{ m.fromJson({json.dumps(file)}) }} "
            "catch (e) { return e.message } })"
        )
        assert page.evaluate(code) == fault


def test_a_message_is_edited_and_an_answer_made_again(page: Page, upstream: Upstream) -> None:
    ask_and_wait(page, "one")
    ask_and_wait(page, "two")
    page.click(".user [data-action=edit]")
    page.evaluate("document.querySelector('.edit textarea').select()")
    page.write(".edit textarea", "changed")
    page.press_enter()
    page.until(f"{TEXTS}.join() === 'changed,changed' && {DONE}")
    upstream.replies["changed"] = Reply(["another"])
    page.click(".assistant [data-action=regenerate]")
    page.until(f"{TEXTS}.join() === 'changed,another' && {DONE}")
    assert upstream.bodies[-1]["messages"] == [{"role": "user", "content": "changed"}]
    page.click("#toast-undo")
    page.until(f"{TEXTS}.join() === 'changed,changed' && {DONE}")


def test_settings_and_the_model_go_with_the_request(page: Page, upstream: Upstream) -> None:
    page.press("s", "KeyS", alt=True)
    page.until("document.querySelector('#settings').open")
    page.write("[name=system]", "Be brief.")
    page.write("[name=temperature]", "0.3")
    page.write("[name=stop]", "END")
    page.write("[name=tools]", "{}")
    page.click("#settings-form [type=submit]")
    assert "Tools are a list" in page.text("#settings-fault")
    page.evaluate("document.querySelector('[name=tools]').value = ''")
    page.click("#settings-form [type=submit]")
    page.evaluate(
        f"document.querySelector('#model-choice').value = '{MODELS[1]}';"
        "document.querySelector('#model-choice').dispatchEvent(new Event('change'))"
    )
    ask_and_wait(page, "hi")
    body = upstream.bodies[-1]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["stop"], body["model"]) == (0.3, ["END"], MODELS[1])
    assert "top_p" not in body


def test_reasoning_is_folded_and_tools_are_called_with_their_arguments(page: Page, upstream: Upstream) -> None:
    call = {"index": 0, "id": "c1", "function": {"name": "weather", "arguments": '{"city": '}}
    more = {"index": 0, "function": {"arguments": '"Bonn"}'}}
    upstream.replies["weather?"] = Reply(
        [{"reasoning": "Let me **see**"}, {"tool_calls": [call]}, {"tool_calls": [more]}]
    )
    ask(page, "weather?")
    page.until("!document.querySelector('#results').hidden")
    assert page.evaluate("document.querySelector('.reasoning').open") is False
    assert page.evaluate("document.querySelector('.reasoning .markdown').textContent") == "Let me see"
    assert page.text(".call b") == "weather"
    assert page.text(".call pre") == '{\n  "city": "Bonn"\n}'
    page.write("#result-0", "sunny")
    page.click("#results [type=submit]")
    page.until(f"{DONE} && {ANSWER}.textContent === 'sunny'")
    sent = upstream.bodies[-1]["messages"]
    assert sent[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Bonn"}'}
    assert sent[2] == {"role": "tool", "tool_call_id": "c1", "content": "sunny"}


def test_it_scrolls_along_only_while_the_reader_is_at_the_end(page: Page, upstream: Upstream) -> None:
    hold = threading.Event()
    lines = "".join(f"line {number}\n\n" for number in range(60))
    upstream.replies["scroll"] = Reply([lines, "more\n\n" * 20], hold=hold)
    ask(page, "scroll")
    page.until(f"{ANSWER}?.textContent.includes('line 59')")
    scroller = "document.querySelector('#scroller')"
    at_end = f"Math.abs({scroller}.scrollHeight - {scroller}.scrollTop - {scroller}.clientHeight) < 3"
    page.until(at_end)
    page.evaluate(f"{scroller}.scrollTop = 200")
    page.until("!document.querySelector('#to-end').hidden")
    hold.set()
    page.until(DONE)
    assert page.evaluate(f"{scroller}.scrollTop") == 200
    page.click("#to-end")
    page.until(at_end)


def test_everything_can_be_done_with_the_keyboard(page: Page) -> None:
    ask_and_wait(page, "typed")
    page.press("ArrowUp", "ArrowUp")
    page.until("document.activeElement.matches('.edit textarea')")
    page.press("Escape")
    page.until("document.activeElement.id === 'prompt'")
    page.press("n", "KeyN", alt=True)
    page.until(f"{TEXTS}.length === 0")
    page.press("k", "KeyK", control=True)
    page.until("document.activeElement.id === 'search'")
    page.press("2", "Digit2", alt=True)
    page.until("document.body.dataset.view === 'dashboard' && location.hash === '#dashboard'")
    page.press("/", "Slash")
    page.until("document.activeElement.id === 'prompt'")
    page.evaluate("document.activeElement.blur()")
    page.press("?", "Slash")
    page.until("document.querySelector('#shortcuts').open")
    assert len(page.evaluate("[...document.querySelectorAll('#shortcut-list dt')].map((e) => e.textContent)")) >= 10
    page.press("Escape")


def test_all_that_can_be_used_has_a_name(page: Page, upstream: Upstream) -> None:
    upstream.replies["all"] = Reply(["- [ ] task\n\n```py\nx\n```\n\n| a |\n|---|\n| b |\n"])
    ask_and_wait(page, "all")
    roles = {"button", "textbox", "searchbox", "combobox", "tab", "checkbox", "link", "region", "navigation", "group"}
    for view, least in (("#tab-chat", 18), ("#tab-dashboard", 6), ("#help", 1)):
        page.click(view)
        nodes = page.command("Accessibility.getFullAXTree")["nodes"]
        used = [node for node in nodes if not node["ignored"] and node["role"]["value"] in roles]
        assert len(used) >= least
        assert [node for node in used if not node["name"]["value"]] == []


def test_a_phone_shows_the_chat_and_the_rest_on_request(page: Page, upstream: Upstream) -> None:
    page.resize(360, 740, phone=True)
    try:
        ask_and_wait(page, "a\n\n```\n" + "wide " * 60 + "\n```\n\n|" + " column |" * 30 + "\n|" + "-|" * 30)
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        page.until("document.querySelector('#sidebar').getBoundingClientRect().right <= 0")
        page.click("#drawer")
        page.until("document.querySelector('#sidebar').getBoundingClientRect().left === 0")
        small = "[...document.querySelectorAll('button')].filter((b) => b.checkVisibility())"
        assert page.evaluate(f"{small}.every((b) => b.getBoundingClientRect().height >= 24)")
        page.evaluate("document.querySelector('#tab-dashboard').click()")
        page.until("document.querySelectorAll('#hour figure').length === 8")
        assert page.evaluate("document.documentElement.scrollWidth") == 360
    finally:
        page.resize(1280, 800)


def test_it_works_below_a_prefix_with_conversations_of_its_own(page: Page, upstream: Upstream) -> None:
    ask_and_wait(page, "above")
    open_page(page, f"{upstream.url}{PREFIX}/")
    ask_and_wait(page, "below")
    assert titles(page) == ["below"]
