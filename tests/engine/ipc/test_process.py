"""The engine process seen from outside: its sockets, its exit codes, its end with its parent."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from socket import socketpair
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.messages import (
    AbortRequests,
    Accepted,
    AddEmbedding,
    AddRequest,
    ClientMessage,
    Drain,
    EmbeddingOutput,
    EngineMessage,
    GetMetrics,
    Heartbeat,
    Hello,
    Metrics,
    PromptScores,
    Ready,
    RequestOutput,
    StepOutputs,
    TokenLogprobs,
    client_encoder,
    heartbeat_address,
    request_address,
)
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.core.embedder import Embedder
from tessera.engine.ipc import engine_process as process_module
from tessera.engine.ipc.engine_process import CONFIRM_SECONDS, RECEIVE_SECONDS, EngineProcess
from tessera.engine.ipc.loaded_engine import LoadedEngine
from tests.support.fakes import stub_engine
from tests.support.fakes.fake_client import INFO
from tests.support.paths import ROOT
from tests.support.servers.blocking_client import BlockingClient

DEADLINE = 20.0  # seconds; only a failing test waits this long


@dataclass
class Engine:
    """A stub engine process with this test as its parent, and what it reported about its start."""

    process: subprocess.Popen[str]
    reports: Any
    run_dir: Path
    clients: list[BlockingClient] = field(default_factory=list)

    def client(self) -> BlockingClient:
        return self._connect(request_address(self.run_dir))

    def heartbeats(self) -> Iterator[Heartbeat]:
        client = self._connect(heartbeat_address(self.run_dir))
        while True:
            yield msgspec.msgpack.decode(client.receive(), type=Heartbeat)

    def _connect(self, address: str) -> BlockingClient:
        self.clients.append(BlockingClient(address, DEADLINE))
        return self.clients[-1]

    def report(self) -> dict[str, Any]:
        return json.loads(self.reports.readline())

    def wait_end(self) -> tuple[int, str]:
        """-> exit code and log; the pipe that ties the engine to this test stays open meanwhile."""
        assert self.process.stderr is not None
        log = self.process.stderr.read()
        return self.process.wait(DEADLINE), log

    def wait_ready(self) -> dict[str, Any]:
        while (report := self.report())["type"] == "progress":
            pass
        assert report["type"] == "ready"
        return report


def send(client: BlockingClient, message: ClientMessage) -> None:
    client.send(client_encoder().encode(message))


def receive(client: BlockingClient) -> EngineMessage:
    """The next message that is not an acceptance, which tells only that a request is in the queue."""
    while isinstance(message := msgspec.msgpack.decode(client.receive(), type=EngineMessage), Accepted):
        pass
    return message


def receive_outputs(client: BlockingClient, request_id: str) -> list[RequestOutput]:
    """Read until the request ends; -> its outputs."""
    outputs = []
    while True:
        message = receive(client)
        assert isinstance(message, StepOutputs)
        for output in message.outputs:
            assert output.request_id == request_id
            outputs.append(output)
            if output.finish_reason is not None:
                return outputs


def add(request_id: str, prompt: Any, max_tokens: int = 5) -> AddRequest:
    return AddRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens), time.monotonic())


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    started = []

    def start_engine(model: str = "stub") -> Engine:
        reader, writer = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fakes.stub_engine", str(tmp_path), str(writer), str(tmp_path)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(writer,),
            text=True,
        )
        os.close(writer)
        engine = Engine(process, os.fdopen(reader), tmp_path)
        started.append(engine)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(EngineConfig(model=model)).decode() + "\n")
        process.stdin.flush()
        return engine

    yield start_engine
    for engine in started:
        engine.process.kill()
        engine.process.wait()
        for pipe in (engine.process.stdin, engine.process.stderr, engine.reports):
            if pipe is not None:
                pipe.close()
        for client in engine.clients:
            client.close()


def test_reports_progress_and_then_readiness(start: Any) -> None:
    engine = start()
    reports = [engine.report() for _ in range(4)]
    assert [report["type"] for report in reports] == ["progress", "progress", "progress", "ready"]
    assert reports[1] == {"type": "progress", "stage": "weights", "done": 2, "total": 3}
    assert reports[3]["info"]["architecture"] == "StubForCausalLM"


def test_hello_is_answered_with_what_the_engine_decided(start: Any) -> None:
    engine = start()
    client = engine.client()
    send(client, Hello())
    ready = receive(client)
    assert isinstance(ready, Ready)
    assert ready.info.max_num_seqs == 64
    assert ready.epoch == engine.wait_ready()["epoch"]


def test_streams_tokens_to_the_client_that_asked(start: Any) -> None:
    engine = start()
    first, second = engine.client(), engine.client()
    send(first, add("same-id", [5, 100], max_tokens=4))
    send(second, add("same-id", [5, 200], max_tokens=6))
    for client, start_token, count in ((first, 101, 4), (second, 201, 6)):
        outputs = receive_outputs(client, "same-id")
        assert [token for output in outputs for token in output.token_ids] == list(
            range(start_token, start_token + count)
        )
        assert [output.finish_reason for output in outputs] == [None] * (count - 1) + ["length"]


def test_only_a_request_that_waits_for_half_a_second_is_told_that_it_was_accepted(start: Any) -> None:
    engine = start()
    engine.wait_ready()
    client = engine.client()
    send(client, add("waits", [stub_engine.WAITS]))
    send(client, add("runs", [1], 100_000))
    began, confirmations = time.monotonic(), []
    while time.monotonic() < began + 1.5 * CONFIRM_SECONDS:
        message = msgspec.msgpack.decode(client.receive(), type=EngineMessage)
        if isinstance(message, Accepted):
            confirmations.append((message.request_ids, time.monotonic() - began))
    assert [request_ids for request_ids, _ in confirmations] == [["waits"]]
    assert confirmations[0][1] > 0.9 * CONFIRM_SECONDS


def test_a_request_that_was_aborted_is_never_told_that_it_was_accepted(start: Any) -> None:
    engine = start()
    engine.wait_ready()
    client = engine.client()
    send(client, add("waits", [stub_engine.WAITS]))
    send(client, AbortRequests(["waits"]))
    send(client, add("runs", [1], 100_000))
    end = time.monotonic() + 1.5 * CONFIRM_SECONDS
    while time.monotonic() < end:
        assert not isinstance(msgspec.msgpack.decode(client.receive(), type=EngineMessage), Accepted)


def test_abort_frees_the_request(start: Any) -> None:
    engine = start()
    client = engine.client()
    send(client, add("endless", [1], max_tokens=10**9))
    assert isinstance(receive(client), StepOutputs)
    send(client, AbortRequests(["endless", "unknown"]))
    send(client, GetMetrics(7))
    while not isinstance(answer := receive(client), Metrics):
        pass
    assert answer.token == 7
    assert answer.text.startswith(b"stub_steps_total")
    send(client, add("next", [1], max_tokens=1))
    assert len(receive_outputs(client, "next")) == 1  # "endless" is silent


def test_a_refusal_carries_every_field_of_its_error(start: Any) -> None:
    expected = {
        stub_engine.IS_ONE_TOO_MANY: ("queue_full", 429, None, "rate_limit_error", 7),
        stub_engine.IS_TOO_LONG: ("context_length_exceeded", 400, "messages", "invalid_request_error", None),
        stub_engine.BREAKS_ADD: ("engine_error", 500, None, "server_error", None),
    }
    engine = start()
    client = engine.client()
    for first_token, fields in expected.items():
        send(client, add("refused", [first_token]))
        (output,) = receive_outputs(client, "refused")
        assert output.finish_reason == "error"
        assert output.error
        assert "KeyError" not in output.error
        found = (output.error_code, output.error_status, output.error_param, output.error_type, output.retry_after)
        assert found == fields
    send(client, add("next", [1]))
    assert len(receive_outputs(client, "next")) == 5


def test_malformed_messages_are_ignored(start: Any) -> None:
    engine = start()
    client = engine.client()
    wrong_prompts = [msgspec.structs.asdict(add("wrong", prompt)) for prompt in ([2**31], ["one"], b"abc", 5)]
    for payload in (
        b"",
        b"\xc1",
        b"not msgpack",
        msgspec.msgpack.encode({"type": "unknown"}),
        msgspec.msgpack.encode({"type": "add", "request_id": 3}),
        msgspec.msgpack.encode({"type": "abort", "request_ids": "text"}),
        *(msgspec.msgpack.encode({"type": "add", **request}) for request in wrong_prompts),
    ):
        client.send(payload)
    send(client, add("after", [1]))
    assert len(receive_outputs(client, "after")) == 5
    assert engine.process.poll() is None


def test_requests_of_a_client_that_left_are_aborted(start: Any) -> None:
    engine = start()
    leaving, staying = engine.client(), engine.client()
    send(leaving, add("orphan", [1], max_tokens=10**9))
    receive(leaving)
    leaving.close()
    deadline = time.monotonic() + DEADLINE
    for heartbeat in engine.heartbeats():
        if not heartbeat.has_work:
            break
        assert time.monotonic() < deadline, "the orphaned request still runs"
    send(staying, add("mine", [1]))
    assert len(receive_outputs(staying, "mine")) == 5


def test_heartbeats_go_on_while_a_step_hangs(start: Any) -> None:
    engine = start()
    client = engine.client()
    send(client, add("hanging", [stub_engine.HANGS]))
    busy = (heartbeat for heartbeat in engine.heartbeats() if heartbeat.has_work)
    seen = [next(busy) for _ in range(3)]
    assert {heartbeat.num_steps for heartbeat in seen} == {0}
    assert all(heartbeat.ready for heartbeat in seen)


@pytest.mark.parametrize("how", ["message", "SIGTERM"])
def test_drain_finishes_what_runs_and_refuses_what_comes(start: Any, how: str) -> None:
    engine = start()
    client = engine.client()
    send(client, add("running", [1], max_tokens=300))
    first = receive(client)
    assert isinstance(first, StepOutputs)
    if how == "message":
        send(client, Drain())
    else:
        engine.process.send_signal(signal.SIGTERM)
    num_tokens = 1
    refusal = None
    with contextlib.suppress(ConnectionError):  # the engine has ended
        while True:
            if refusal is None:
                send(client, add("late", [1]))
            message = receive(client)
            assert isinstance(message, StepOutputs)
            for output in message.outputs:
                if output.request_id == "running":
                    num_tokens += len(output.token_ids)
                    last = output
                elif output.finish_reason == "error":
                    refusal = output
    assert (num_tokens, last.finish_reason) == (300, "length")
    assert refusal is not None
    assert (refusal.error_status, refusal.error_code) == (503, "engine_unavailable")
    assert engine.process.wait(DEADLINE) == 0


@pytest.mark.parametrize("model", ["unsupported", "faulty"])
def test_a_failed_start_says_whose_fault_it_is(start: Any, model: str) -> None:
    engine = start(model)
    report = engine.report()
    assert report["type"] == "failed"
    assert report["user_error"] is (model == "unsupported")
    exit_code, log = engine.wait_end()
    assert exit_code == (2 if model == "unsupported" else 1)
    assert ("Traceback" in log) is (model == "faulty")


def test_a_fault_in_a_step_ends_the_process_with_a_traceback(start: Any) -> None:
    engine = start()
    client = engine.client()
    send(client, add("fatal", [stub_engine.FAILS]))
    exit_code, log = engine.wait_end()
    assert exit_code == 1
    assert "RuntimeError: the stub device failed" in log


def test_the_engine_ends_with_its_parent_even_in_a_hanging_step(start: Any) -> None:
    engine = start()
    client = engine.client()
    send(client, add("hanging", [stub_engine.HANGS]))
    engine.wait_ready()
    engine.process.stdin.close()  # what the kernel does when the parent dies
    assert engine.process.wait(DEADLINE) == 1
    assert not engine.run_dir.exists()


def test_fault_fairness_d6_a_flood_of_messages_leaves_time_for_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two steps messages are taken for a few milliseconds, however many there are."""
    now = [0.0]
    taken: list[str] = []

    class SlowCore(stub_engine.StubCore):
        def add_request(self, request: AddRequest, client: bytes) -> None:
            now[0] += 0.6 * RECEIVE_SECONDS
            taken.append(request.request_id)

    silent = SimpleNamespace(start=lambda: None, stop=lambda: None)
    monkeypatch.setattr(process_module, "HeartbeatSender", lambda *_, **__: silent)
    monkeypatch.setattr(process_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    process = EngineProcess(str(tmp_path), str(tmp_path), lambda message: None)
    process._engine = LoadedEngine(SlowCore(), INFO, lambda: b"")
    with contextlib.closing(BlockingClient(request_address(tmp_path), DEADLINE)) as client:
        for number in range(10):
            send(client, add(str(number), [1]))
        while len(taken) < 10:
            process._listener.wait(0.0, DEADLINE)
            before = len(taken)
            process._receive(process._engine.core)
            assert len(taken) <= before + 2
    process.close()


def test_what_the_start_has_left_is_done_between_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece at a time, when there is no work."""
    silent = SimpleNamespace(start=lambda: None, stop=lambda: None)
    monkeypatch.setattr(process_module, "HeartbeatSender", lambda *_, **__: silent)
    monkeypatch.setattr(process_module, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(EngineProcess, "_drain_on_sigterm", lambda self: self._wake_up_sockets[0])
    process = EngineProcess(str(tmp_path), str(tmp_path), lambda message: None)
    process._wake_up_sockets = socketpair()
    done: list[str] = []

    class WatchedCore(stub_engine.StubCore):
        def step(self) -> dict[bytes, list[RequestOutput]]:
            done.append("step")
            return super().step()

    with contextlib.closing(BlockingClient(request_address(tmp_path), DEADLINE)) as client:

        def prepare_next() -> bool:
            done.append("piece")
            pieces = done.count("piece")
            if pieces == 2:
                send(client, add("between", [1], 3))
            if pieces == 4:
                send(client, Drain())
            return pieces < 4

        process.run(LoadedEngine(WatchedCore(), INFO, lambda: b"", prepare_next=prepare_next))
        assert [output.token_ids for output in receive_outputs(client, "between")] == [[2], [3], [4]]
    process.close()
    for each in process._wake_up_sockets:
        each.close()
    assert done == ["piece", "piece", "step", "step", "step", "piece", "piece"]


@contextlib.contextmanager
def in_process(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineProcess]:
    """An engine process's loop in this process, without heartbeats and signals."""
    silent = SimpleNamespace(start=lambda: None, stop=lambda: None)
    monkeypatch.setattr(process_module, "HeartbeatSender", lambda *_, **__: silent)
    monkeypatch.setattr(EngineProcess, "_drain_on_sigterm", lambda self: self._wake_up_sockets[0])
    process = EngineProcess(str(run_dir), str(run_dir), lambda message: None)
    process._wake_up_sockets = socketpair()
    yield process
    process.close()
    for each in process._wake_up_sockets:
        each.close()


def test_fault_stalls_scores_of_a_long_prompt_are_sent_between_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the process waits for nothing else while some are left."""
    piece = PromptScores.of([TokenLogprobs(5, -0.5, 1, [], [])] * 10)
    monkeypatch.setattr("tessera.engine.ipc.outbox.MAX_BYTES", 2 * piece.num_bytes)

    class ScoredCore(stub_engine.StubCore):
        def step(self) -> dict[bytes, list[RequestOutput]]:
            outputs = super().step()
            for output in [each for of_client in outputs.values() for each in of_client]:
                output.prompt_logprobs = [piece] * 7
            return outputs

    with (
        in_process(tmp_path, monkeypatch) as process,
        contextlib.closing(BlockingClient(request_address(tmp_path), DEADLINE)) as client,
    ):
        send(client, add("scored", [1], 1))
        send(client, Drain())
        process.run(LoadedEngine(ScoredCore(), INFO, lambda: b""))
        outputs = receive_outputs(client, "scored")
    assert [len(output.prompt_logprobs or []) for output in outputs] == [2, 2, 2, 1]
    assert [output.token_ids for output in outputs] == [[], [], [], [2]]


def test_fault_stalls_vectors_of_megabytes_are_sent_between_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the process waits for nothing else while some are left."""
    monkeypatch.setattr("tessera.engine.ipc.outbox.MAX_BYTES", 40)
    events: list[str] = []

    class Core(stub_engine.StubCore):
        def step(self) -> dict[bytes, list[RequestOutput]]:
            events.append("step")
            return super().step()

    class Wide:
        dimension, vocab_size, max_input_tokens, max_num_tokens, max_num_inputs = 3, 100, 64, 640, 10

        def compute(self, texts: Any, first_lengths: Any = None) -> Any:
            return np.array([[text[0]] * self.dimension for text in texts], np.float32)

    with in_process(tmp_path, monkeypatch) as process:
        sent = process._send

        def noting(to: bytes, message: EngineMessage) -> bool:
            if isinstance(message, EmbeddingOutput):
                events.append("vectors")
            return sent(to, message)

        monkeypatch.setattr(process, "_send", noting)
        with contextlib.closing(BlockingClient(request_address(tmp_path), DEADLINE)) as client:
            send(client, add("text", [1], 3))
            send(client, AddEmbedding("wide", [array("i", [index]) for index in range(9)]))
            send(client, Drain())
            embedder = Embedder(Wide(), max_queue_len=3)
            process.run(LoadedEngine(Core(), INFO, lambda: b"", embedders={"main": embedder}))
            messages = [receive(client) for _ in events]
    pieces = [message for message in messages if isinstance(message, EmbeddingOutput)]
    assert [(len(piece.vectors), piece.num_bytes_left) for piece in pieces] == [(40, 68), (40, 28), (28, 0)]
    vectors = np.frombuffer(b"".join(piece.vectors for piece in pieces), "<f4").reshape(9, 3)
    assert vectors.tolist() == [[index] * 3 for index in range(9)]
    assert events == ["step", "vectors"] * 3
