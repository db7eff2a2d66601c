"""The output file and the error file of a batch, written from its results when no more are to come."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tessera.app.openai.batches.execution import unexecuted
from tessera.app.openai.batches.input_file import read_lines
from tessera.app.openai.batches.tables import BatchRow, Status, lines_done, results_after
from tessera.app.openai.files.files import new_file_id
from tessera.app.store.contents import Contents, IncomingContent
from tessera.app.store.store import Store

BYTES_AT_ONCE = 2**22
REASONS = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "This request was not executed, as the batch was cancelled."),
}


class OutputFiles:
    """Until they are published, nothing of them counts: a crash leaves the results where they were."""

    def __init__(self, store: Store, row: BatchRow) -> None:
        self._store = store
        self._row = row
        self._contents: dict[str, IncomingContent] = {}

    async def write(self, path: Path, outcome: Status, max_line: int) -> None:
        """Write every result, and an error for each line of the input at `path` that was not run.

        Lines come in the order of the input, those that were not run at the end.
        """
        last = 0
        while results := await self._store.query(
            partial(results_after, seq=self._row.seq, number=last, max_bytes=BYTES_AT_ONCE)
        ):
            last = results[-1][0]
            for field, wanted in (("output_file_id", False), ("error_file_id", True)):
                data = b"".join(result for _, failed, result in results if failed is wanted)
                if data:
                    await self._store.with_contents(partial(self._append, field, data))
        if outcome in REASONS:
            done = await self._store.query(partial(lines_done, seq=self._row.seq))
            await self._store.with_contents(partial(self._append_unexecuted, path, outcome, max_line, done))

    async def publish(self) -> list[tuple[str, str, str, int]]:
        """Make them contents; -> the batch's field, the file's id, name and size of each."""
        published = []
        for field, content in self._contents.items():
            file_id = new_file_id()
            await self._store.with_contents(partial(_publish, content, file_id))
            name = f"{self._row.id}_{field.removesuffix('_file_id')}.jsonl"
            published.append((field, file_id, name, content.num_bytes))
        return published

    def discard(self) -> None:
        """Drop what was not published."""
        for content in self._contents.values():
            content.discard()

    def _append(self, field: str, data: bytes, contents: Contents) -> None:
        if field not in self._contents:
            self._contents[field] = contents.begin()
        self._contents[field].write(data)

    def _append_unexecuted(
        self, path: Path, outcome: Status, max_line: int, done: set[int], contents: Contents
    ) -> None:
        code, message = REASONS[outcome]
        for line in read_lines(path, max_line, done):
            self._append("error_file_id", unexecuted(line, code, message), contents)


def _publish(content: IncomingContent, file_id: str, _: Contents) -> None:
    content.publish(file_id)
