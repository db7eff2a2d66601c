"""Chat templates: requests that replaced them (CVE-2025-61620), Jinja without a sandbox (CVE-2026-5760)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tessera.app.server.application import create_app
from tessera.app.settings import AppSettings
from tessera.app.text.chat_template import RESERVED_KWARGS, ChatTemplate, check_kwargs
from tessera.app.text.render_process import TRIES
from tessera.engine.contract.errors import InvalidRequestError
from tests.faults.app_fixtures import post
from tests.support.servers.http_fixtures import as_engines, settings_for, write_model_folder
from tests.support.servers.surface_fixtures import says

USER = [{"role": "user", "content": "hi"}]
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": USER},
    "/tokenize": {"messages": USER},
}


def render(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    return ChatTemplate({"default": source}, {"eos_token": "</s>"}).render(messages or USER, **options)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['__builtins__'] }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% set ns = namespace(a=1) %}{{ ns.__init__.__globals__ }}",
        "{{ namespace(__class__=1) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ dict.mro() }}",
    ],
)
def test_fault_chat_templates_sandbox_refuses(source: str) -> None:
    with pytest.raises(InvalidRequestError):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(100) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{{ 'a' * 10 ** 12 }}",
        "{{ 'x'.ljust(10 ** 9) }}",
        "{{ 'x' | center(10 ** 9) }}",
        "{{ 'x' | indent(10 ** 9) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ '%*d' % (10 ** 9, 1) }}",
        "{{ [1] | batch(10 ** 9, 'x') | list | length }}",
        "{% set ns = namespace(x='a') %}{% for i in range(40) %}{% set ns.x = ns.x.replace('a', 'aaaa') %}{% endfor %}",
        "{% set ns = namespace(x='a') %}{% for i in range(40) %}{% set ns.x = ns.x | replace('a', 'aa') %}{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for i in range(40) %}{% set ns.x = ns.x.join([ns.x] * 9) %}{% endfor %}",
        "{% set ns = namespace(x=['a']) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
        "{% set n = namespace(x=[1]) %}{% for i in range(40) %}{% set n.x = [n.x] * 2 %}{% endfor %}{{ n.x | tojson }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = [ns.x] * 2 %}{% endfor %}{{ ns.x ~ '' }}",
        "{{ lipsum(n=10 ** 7) }}",
        "{{ 9 ** (9 ** 9) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_fault_chat_templates_rendering_is_bounded(source: str) -> None:
    used = time.process_time()
    with pytest.raises(InvalidRequestError):
        render(source, seconds=0, max_chars=100_000)
    assert time.process_time() - used < 1


def test_fault_chat_templates_format_strings_reach_no_internals() -> None:
    assert render("[{{ '{0.__class__}'.format(messages) }}]") == "[]"


def test_fault_chat_templates_one_in_trouble_leaves_the_next_alone() -> None:
    template = ChatTemplate(
        {"default": "{% for i in range(messages[0].content) %}{% for j in range(99999) %}{% endfor %}{% endfor %}done"},
        {},
    )
    with pytest.raises(InvalidRequestError, match="too long"):
        template.render([{"role": "user", "content": 99_999}], seconds=0)
    assert template.render([{"role": "user", "content": 1}]) == "done"


@pytest.mark.parametrize("name", sorted(RESERVED_KWARGS | {"_x"}))
def test_fault_chat_templates_reserved_kwargs_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat_template_kwargs") as caught:
        check_kwargs({"enable_thinking": True, name: 1})
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize("name", ["messages", "tools", "chat_template", "eos_token", "raise_exception", "_x"])
@pytest.mark.parametrize("path", PATHS)
def test_fault_chat_templates_reserved_names_get_a_400(settings: AppSettings, path: str, name: str) -> None:
    response = post(settings, path, {**PATHS[path], "chat_template_kwargs": {name: "{{ 7 * 7 }}"}})
    assert response.status_code == 400
    assert "chat_template_kwargs" in response.json()["error"]["message"]


def test_fault_chat_templates_of_requests_are_refused(settings: AppSettings) -> None:
    response = post(settings, "/v1/chat/completions", {"messages": USER, "chat_template": "{{ 1 }}"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "chat_template"


def test_fault_chat_templates_texts_of_requests_are_not_templates(settings: AppSettings) -> None:
    """Wherever a request's text goes, it comes out as it was."""
    text = "{{ 7 * 7 }}{% for i in range(9) %}x{% endfor %}"
    plain = post(settings, "/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json()["count"]
    longer = post(settings, "/tokenize", {"messages": [{"role": "user", "content": text}]}).json()["count"]
    assert longer == plain - len("hi") + len(text)


def test_fault_chat_templates_render_in_bounded_time_off_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one renders until its time is up, others are answered."""
    settings = settings_for(write_model_folder(tmp_path, template=ENDLESS), template_timeout=0.3)
    app = create_app(as_engines(says("ok")), settings)
    threads: list[int] = []
    begun = threading.Event()
    render = ChatTemplate.render

    def watched(template: ChatTemplate, *args: Any, **options: Any) -> str:
        threads.append(threading.get_ident())
        begun.set()
        return render(template, *args, **options)

    monkeypatch.setattr(ChatTemplate, "render", watched)

    async def run() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://tiny") as http:
            rendering = asyncio.create_task(http.post("/tokenize", json={"messages": USER}))
            while not begun.is_set() and not rendering.done():
                await asyncio.sleep(0)
            assert threads != [threading.get_ident()], "the event loop's own thread renders"
            assert (await http.get("/health")).status_code == 200
            assert not rendering.done()
            return await rendering

    response = asyncio.run(run())
    app.state.models.default.workers.close()
    assert response.status_code == 400
    assert "takes too long" in response.json()["error"]["message"]


def test_fault_chat_templates_renderers_killed_from_outside_cost_no_prompt() -> None:
    """However many are idle: as many as one prompt tries were found dead, one after another."""
    before = renderers_of(os.getpid())
    template = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
    for _ in range(TRIES + 1):
        template.start()
    assert template.render(USER) == "hi"
    killed = renderers_of(os.getpid()) - before
    assert len(killed) == TRIES + 1
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert template.render(USER) == "hi"
    assert renderers_of(os.getpid()).isdisjoint(killed)
    template.close()


def test_fault_chat_templates_renderers_end_with_their_template() -> None:
    before = renderers_of(os.getpid())
    template = ChatTemplate({"default": "x"}, {})
    template.render(USER)
    assert len(renderers_of(os.getpid()) - before) == 1
    template.close()
    assert renderers_of(os.getpid()) <= before


def renderers_of(parent: int) -> set[int]:
    """Processes that render for `parent`."""
    found = subprocess.run(
        ["pgrep", "-P", str(parent), "-f", "tessera.app.text.renderer"], capture_output=True, text=True
    )
    return set(map(int, found.stdout.split()))
