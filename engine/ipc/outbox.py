"""Scores of a prompt and vectors: megabytes of them are sent over several turns of the engine's thread."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator

from tessera.engine.contract.messages import EmbeddingOutput, PromptScores, RequestOutput

MAX_BYTES = 2**21  # in one turn: as long as a millisecond or two, here and in the event loop that reads them


class Outbox:
    """Scores go ahead of the output that they came with, some in each turn, and the request's later outputs wait.

    Requests take turns.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[tuple[bytes, str], list[RequestOutput]] = OrderedDict()  # the next one is first
        self._room = MAX_BYTES  # bytes, in this turn

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, client: bytes, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Keep what cannot be sent in this turn; -> the others."""
        if not self._waiting and not any(output.prompt_logprobs for output in outputs):
            return outputs
        sent: list[RequestOutput] = []
        for output in outputs:
            before = self._waiting.get((client, output.request_id))
            if before is not None:
                before.append(output)
            elif output.prompt_logprobs and (self._waiting or num_bytes(output.prompt_logprobs) > self._room):
                self._waiting[client, output.request_id] = [output]
            else:
                self._room -= num_bytes(output.prompt_logprobs or [])
                sent.append(output)
        return sent

    def take(self) -> dict[bytes, list[RequestOutput]]:
        """Begin a turn; -> the waiting outputs that are sent in it, by client."""
        self._room = MAX_BYTES
        sent: dict[bytes, list[RequestOutput]] = defaultdict(list)
        while self._waiting and self._room > 0:
            (client, request_id), outputs = self._waiting.popitem(last=False)
            scores = outputs[0].prompt_logprobs or []
            count = 0
            while count < len(scores) and self._room > 0:
                self._room -= scores[count].num_bytes
                count += 1
            if count == len(scores):
                sent[client] += outputs
            else:
                sent[client].append(RequestOutput(request_id, [], prompt_logprobs=scores[:count]))
                outputs[0].prompt_logprobs = scores[count:]
                self._waiting[client, request_id] = outputs
        return sent

    def drop(self, client: bytes, request_ids: list[str]) -> None:
        """These requests have been aborted."""
        for request_id in request_ids if self._waiting else ():
            self._waiting.pop((client, request_id), None)


class VectorsOutbox:
    """Vectors that wait to be sent. True while there are any. Requests take turns."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[bytes, EmbeddingOutput]] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, client: bytes, output: EmbeddingOutput) -> None:
        self._waiting.append((client, output))

    def take(self) -> Iterator[tuple[bytes, EmbeddingOutput]]:
        """The messages of one turn, with their clients; the last one may be a part of its request's vectors."""
        room = MAX_BYTES
        while self._waiting and room > 0:
            client, output = self._waiting.popleft()
            rest = output.vectors[room:]
            if rest:
                self._waiting.append((client, EmbeddingOutput(output.request_id, rest)))
                output = EmbeddingOutput(output.request_id, output.vectors[:room], num_bytes_left=len(rest))
            room -= len(output.vectors)
            yield client, output

    def drop(self, client: bytes, request_ids: list[str]) -> None:
        """Forget these requests."""
        if self._waiting:
            kept = [one for one in self._waiting if one[0] != client or one[1].request_id not in request_ids]
            self._waiting = deque(kept)


def num_bytes(scores: list[PromptScores]) -> int:
    return sum([piece.num_bytes for piece in scores])
