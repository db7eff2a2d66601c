"""/v1/files with OpenAI's client and without: uploads, lists, contents, bounds, and wrong requests."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.responses import FileResponse

from tessera.app.openai.files import upload
from tessera.app.openai.files.files import Files
from tessera.app.store.contents import Contents
from tessera.app.store.errors import StoreQuotaError
from tests.support.fakes.fake_client import FakeClient, always
from tests.support.servers.http_fixtures import serve, settings_for, write_model_folder

KEYS = ("first", "second")
LINES = b'{"a": 1}\n' * 1000


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("files")
    settings = settings_for(
        write_model_folder(folder / "model"),
        api_keys=KEYS,
        data_dir=str(folder / "data"),
        max_file_size=2.0,
        key_data_limit=5 / 1024,
    )
    with serve(FakeClient(always([])), settings) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEYS[0], max_retries=0) as client:
        yield client


@pytest.fixture
def api(client: openai.OpenAI) -> openai.OpenAI:
    for file in client.files.list():  # of the tests before
        client.files.delete(file.id)
    return client


def post(url: str, data: dict[str, str] | None = None, **options: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {KEYS[0]}"} | options.pop("headers", {})
    return httpx.post(f"{url}/v1/files", data=data, headers=headers, **options)


def upload_text(url: str, content: bytes = b"x") -> httpx.Response:
    return post(url, {"purpose": "batch"}, files={"file": ("a.jsonl", content)})


def test_a_file_from_upload_to_deletion(api: openai.OpenAI) -> None:
    created = api.files.create(file=("lines.jsonl", LINES), purpose="batch")
    assert (created.filename, created.bytes, created.purpose) == ("lines.jsonl", len(LINES), "batch")
    assert (created.object, created.status) == ("file", "processed")
    assert created.expires_at == created.created_at + 30 * 86400
    assert api.files.retrieve(created.id) == created
    assert api.files.content(created.id).content == LINES
    assert api.files.delete(created.id).deleted
    for use in (api.files.retrieve, api.files.content, api.files.delete):
        with pytest.raises(openai.NotFoundError) as missing:
            use(created.id)
        assert missing.value.body == {
            "message": f"No such File object: {created.id}",
            "type": "invalid_request_error",
            "param": "id",
            "code": "file_not_found",
        }


def test_expires_after(api: openai.OpenAI, url: str) -> None:
    created = api.files.create(file=b"x", purpose="user_data", expires_after={"anchor": "created_at", "seconds": 7200})
    assert created.expires_at == created.created_at + 7200
    for seconds, anchor in (("59", "created_at"), ("2592001", "created_at"), ("x", "created_at"), ("7200", "now")):
        fields = {"expires_after[seconds]": seconds, "expires_after[anchor]": anchor}
        refused = post(url, {"purpose": "batch", **fields}, files={"file": b"x"})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] in fields


def test_lists(api: openai.OpenAI) -> None:
    purposes: Any = ("batch", "user_data", "batch")
    made = [api.files.create(file=b"x", purpose=purpose).id for purpose in purposes]
    assert [file.id for file in api.files.list(limit=2)] == made[::-1], "the client asks for page after page"
    assert [file.id for file in api.files.list(order="asc")] == made
    assert [file.id for file in api.files.list(purpose="batch", order="asc", after=made[0])] == [made[2]]
    page = api.files.list(limit=2)
    assert (page.has_more, len(page.data)) == (True, 2)
    wrong: list[tuple[str, Any]] = [("limit", 0), ("limit", 10001), ("order", "up"), ("after", "x"), ("purpose", "x")]
    for name, value in wrong:
        with pytest.raises(openai.BadRequestError) as refused:
            api.files.list(**{name: value})
        assert refused.value.param == name


def test_files_of_another_key_do_not_exist(api: openai.OpenAI, url: str) -> None:
    created = api.files.create(file=b"x", purpose="batch")
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEYS[1], max_retries=0) as other:
        assert not other.files.list().data
        for use in (other.files.retrieve, other.files.content, other.files.delete):
            with pytest.raises(openai.NotFoundError):
                use(created.id)
    assert api.files.content(created.id).content == b"x"


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        ({"files": {"file": b"x"}}, 400, "'purpose' is a required property"),
        ({"data": {"purpose": "batch"}, "files": {"other": (None, b"x")}}, 400, "'file' is a required property"),
        ({"data": {"purpose": "cake"}, "files": {"file": b"x"}}, 400, "'cake' is not one of ['batch', 'fine-tune'"),
        ({"data": {"purpose": "batch"}, "files": {"file": b""}}, 400, "The file is empty."),
        ({"data": {"purpose": "batch"}, "files": [("file", b"x"), ("file", b"y")]}, 400, "more than one file"),
        ({"data": {f"f{n}": "" for n in range(17)}, "files": {"file": b"x"}}, 400, "more than 16 fields"),
        ({"data": {"purpose": "b" * 1025}, "files": {"file": b"x"}}, 400, "at most 1024 bytes"),
        ({"json": {"purpose": "batch"}}, 415, "Send the file with 'Content-Type: multipart/form-data'"),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, 400, "not valid multipart"),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data; boundary=b"}}, 400, "not valid multipart"),
        ({"content": b"--b\r\n", "headers": {"content-type": "multipart/form-data; boundary=b"}}, 400, "not valid"),
        (
            {"content": b"--b\r\n\r\nx\r\n--b--\r\n", "headers": {"content-type": "multipart/form-data; boundary=b"}},
            400,
            "not valid multipart",
        ),
    ],
)
def test_wrong_uploads(url: str, options: dict[str, Any], status: int, message: str) -> None:
    refused = post(url, **options)
    assert refused.status_code == status, refused.text
    assert message in refused.json()["error"]["message"]


def test_names_of_files_have_no_folders(url: str, api: openai.OpenAI) -> None:
    names = {"../../etc/passwd": "passwd", "C:\\x\\y.txt": "y.txt", "ä ö.txt": "ä ö.txt", "a" * 300: "a" * 255}
    for given, expected in names.items():
        created = post(url, {"purpose": "batch"}, files={"file": (given, b"x")}).json()
        assert created["filename"] == expected
        content = httpx.get(f"{url}/v1/files/{created['id']}/content", headers={"authorization": f"Bearer {KEYS[0]}"})
        assert content.headers["content-disposition"].startswith("attachment; filename*=utf-8''")


def test_a_file_that_is_too_large_is_refused_by_its_length_and_by_its_bytes(url: str, tmp_path: Path) -> None:
    large = b"x" * (2**21 + 1)
    assert upload_text(url, large[:-1]).status_code == 200
    declared = upload_text(url, large + bytes(2**16))
    assert (declared.status_code, declared.json()["error"]["code"]) == (413, "request_too_large")

    def chunks() -> Iterator[bytes]:
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
        for start in range(0, len(large), 2**16):
            yield large[start : start + 2**16]
        yield b"\r\n--b--\r\n"

    streamed = post(url, content=chunks(), headers={"content-type": "multipart/form-data; boundary=b"})
    assert (streamed.status_code, streamed.json()["error"]["param"]) == (413, "file")


def test_the_quota_of_a_key(api: openai.OpenAI, url: str) -> None:
    for _ in range(2):
        api.files.create(file=b"x" * 2**21, purpose="batch")
    with pytest.raises(openai.BadRequestError, match="stored for each API key; delete some first") as refused:
        api.files.create(file=b"x" * 2**21, purpose="batch")
    assert refused.value.code == "storage_limit_reached"
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEYS[1], max_retries=0) as other:
        other.files.delete(other.files.create(file=b"x" * 2**21, purpose="batch").id)


def test_what_a_client_leaves_unfinished_is_gone(url: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    def files() -> set[Path]:
        return set(tmp_path_factory.getbasetemp().glob("files*/data/files/*"))

    before = files()

    async def leave() -> None:
        async def chunks() -> Any:
            yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
            yield b"x" * 2**20
            await asyncio.sleep(3600)

        headers = {"authorization": f"Bearer {KEYS[0]}", "content-type": "multipart/form-data; boundary=b"}
        async with httpx.AsyncClient() as http:
            task = asyncio.ensure_future(http.post(f"{url}/v1/files", content=chunks(), headers=headers))
            for _ in range(6000):
                if files() != before:
                    break
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
    waited(lambda: not upload.UploadSlots.taken)
    assert files() == before


def test_too_many_uploads_at_a_time(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "MAX_UPLOADS", 0)
    refused = upload_text(url)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert refused.headers["retry-after"]


def test_fault_fairness_slow_uploads_of_one_key_leave_places_to_others(url: str) -> None:
    def begin() -> socket.socket:
        """An upload that does not go on."""
        part = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
        head = (
            "POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=b\r\n"
            f"authorization: Bearer {KEYS[0]}\r\ncontent-length: 1000000\r\n\r\n"
        )
        connection = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
        connection.sendall(head.encode() + part)
        return connection

    with contextlib.ExitStack() as uploads:
        for _ in range(upload.MAX_UPLOADS):
            uploads.enter_context(begin())
        waited(lambda: upload.UploadSlots.taken.total() == upload.MAX_UPLOADS_OF_ONE)
        refused = upload_text(url)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        with openai.OpenAI(base_url=f"{url}/v1", api_key=KEYS[1], max_retries=0) as other:
            other.files.delete(other.files.create(file=b"x", purpose="batch").id)
    waited(lambda: not upload.UploadSlots.taken)


def test_a_key_without_room_is_refused_before_anything_is_written(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the upload does not say how long it is."""

    async def is_full(files: Files, tenant: str, size: int) -> None:
        assert size == 1
        raise StoreQuotaError("full")

    monkeypatch.setattr(Files, "check_room", is_full)
    monkeypatch.setattr(Contents, "begin", None)
    headers = {"content-type": "multipart/form-data; boundary=b"}
    for content in (b"--b", iter([b"--b"])):
        refused = post(url, content=content, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "storage_limit_reached")


def test_a_file_that_is_deleted_while_it_is_sent_comes_whole(
    api: openai.OpenAI, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    created = api.files.create(file=LINES, purpose="batch")
    path = tmp_path_factory.getbasetemp() / "files0" / "data" / "files" / created.id
    send = FileResponse.__call__

    async def delete_first(*arguments: Any) -> None:
        path.unlink()
        await send(*arguments)

    monkeypatch.setattr(FileResponse, "__call__", delete_first)
    assert api.files.content(created.id).content == LINES


def test_a_file_whose_content_is_just_being_deleted_does_not_exist(
    api: openai.OpenAI, tmp_path_factory: pytest.TempPathFactory
) -> None:
    created = api.files.create(file=LINES, purpose="batch")
    path = tmp_path_factory.getbasetemp() / "files0" / "data" / "files" / created.id
    path.unlink()
    with pytest.raises(openai.NotFoundError):
        api.files.content(created.id)
    with pytest.raises(openai.NotFoundError) as missing:
        api.batches.create(input_file_id=created.id, endpoint="/v1/completions", completion_window="24h")
    assert missing.value.param == "input_file_id"


def test_ranges_of_a_file(url: str) -> None:
    created = upload_text(url, b"0123456789").json()["id"]
    for asked, status, content in (("bytes=2-4", 206, b"234"), ("bytes=20-", 416, None)):
        headers = {"authorization": f"Bearer {KEYS[0]}", "range": asked}
        answer = httpx.get(f"{url}/v1/files/{created}/content", headers=headers)
        assert answer.status_code == status
        assert content is None or answer.content == content


@pytest.mark.parametrize(
    ("asked", "status", "content_range"),
    [("bytes=20-", 416, "bytes */10"), ("bytes=5-3", 400, None), ("lines=1-2", 400, None), ("x", 400, None)],
)
def test_a_wrong_range_is_refused_with_an_error_object(
    url: str, asked: str, status: int, content_range: str | None
) -> None:
    created = upload_text(url, b"0123456789").json()["id"]
    headers = {"authorization": f"Bearer {KEYS[0]}", "range": asked}
    answer = httpx.get(f"{url}/v1/files/{created}/content", headers=headers)
    assert (answer.status_code, answer.headers.get("content-range")) == (status, content_range)
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["error"]["type"] == "invalid_request_error"


def waited(condition: Callable[[], object]) -> None:
    """Until it is true."""
    for _ in range(1000):
        if condition():
            return
        threading.Event().wait(0.01)
    pytest.fail("it did not come true")
