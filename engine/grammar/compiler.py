"""Compiles grammars for structured output in threads beside the engine's steps."""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import NoneType

import llguidance
import msgspec
import numpy as np

from tessera import PACKAGE_ROOT
from tessera.engine.contract.environment import environment_without_secrets
from tessera.engine.contract.errors import EngineUnavailableError, InvalidRequestError, ModelError
from tessera.engine.contract.sampling_params import Grammar
from tessera.engine.gguf.names import is_gguf
from tessera.engine.gguf.tokenizer import gguf_tokenizer_json
from tessera.engine.grammar.compile_shares import CompileShares
from tessera.engine.grammar.probe import ProbeAnswer, ProbeSettings
from tessera.engine.grammar.source import GrammarError, complaint
from tessera.engine.grammar.token_tables import Words
from tessera.engine.tokens.folder import tokenizer_json

COMPILE_LIMIT = 2.0  # seconds that one grammar may take
LONGEST_WAIT = 20.0  # seconds that it may take on a busy machine, of which it uses no more than COMPILE_LIMIT
NUM_THREADS = 2

# How a probe ends that went over a limit of its own; any other end came from outside.
LIMIT_SIGNALS = frozenset({signal.SIGPROF, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS})
TRIES = 2
MAX_INLINE_WORDS = 2**10  # of masks that are computed in the engine's thread, in well under a millisecond
EXIT_TIMEOUT = 5.0

# Compiled grammars are kept until there are too many, or until they took so long to compile in all,
# because the largest take longest: about 200 MB a second.
MAX_CACHED = 128
MAX_CACHED_SECONDS = 0.5

# The lexer's fuel bounds its expressions, and so what each mask takes: for a literal of as many characters 10 ms.
LIMITS = llguidance.LLParserLimits(verbose_errors=False, max_lexer_states=50_000, initial_lexer_fuel=2**16)


@dataclass(frozen=True)
class GrammarTokenizer:
    """The vocabulary as llguidance wants it.

    Attributes:
        num_words: of its token masks, which may reach beyond the model's own vocabulary.
        probe_settings: a line for the processes that try grammars out.
    """

    inner: llguidance.LLTokenizer
    num_words: int
    probe_settings: bytes


@dataclass(frozen=True)
class CompiledGrammar:
    """`matcher` stays in its first state and is copied for each sequence; `first_mask` [num_words]."""

    matcher: llguidance.LLMatcher
    first_mask: Words
    seconds: float


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _AddedTokens(msgspec.Struct):
    """As much of a tokenizer.json; the rest, which may be large, is gone over."""

    added_tokens: list[_AddedToken] = []


class PendingGrammar:
    """A grammar being compiled; `ready` once it is compiled, refused, or late."""

    def __init__(self, grammar: Grammar, job: _Job, *, is_first: bool) -> None:
        self._grammar = grammar
        self._job = job
        self._is_first = is_first  # to ask for it

    @property
    def seconds(self) -> float:
        """Time of the compilation for the first request that asked for it, 0 for the others."""
        return seconds_of(self._job) if self._is_first else 0.0

    @property
    def ready(self) -> bool:
        return self._job.future.done() or self._job.is_late or self._job.is_starved

    def give_up(self) -> None:
        """Its request has ended; a grammar that no other waits for is not begun."""
        self._job.num_waiting -= 1
        if self._job.num_waiting == 0:
            self._job.future.cancel()

    def result(self) -> CompiledGrammar:
        """
        Raises:
            InvalidRequestError: names the request's field and what is wrong with its grammar.
            EngineUnavailableError: it is not the grammar's fault.
        """
        assert self.ready, "a grammar's result is taken once it is there"
        if not self._job.future.done():
            if not self._job.is_late:
                raise EngineUnavailableError("the server is too busy to compile this grammar; please try again")
            reason = f"takes longer than {COMPILE_LIMIT:g} seconds to compile"
        elif (error := self._job.future.exception()) is None:
            return self._job.future.result()
        elif isinstance(error, GrammarError):
            reason = str(error)
        else:
            raise error
        param = self._grammar.param
        raise InvalidRequestError(f"the grammar of {param} cannot be used: it {reason}", param=param)


class _Job:
    """One grammar's compilation; several requests may wait for it."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.future: Future[CompiledGrammar] = Future()
        self.num_waiting = 0  # requests
        self._clock: int | None = None
        self._started_at = self._used_at_start = 0.0

    def start(self) -> None:
        """Count time from now on; called in the thread that compiles."""
        self._started_at, self._used_at_start = time.monotonic(), time.thread_time()
        self._clock = time.pthread_getcpuclockid(threading.get_ident())

    @property
    def is_late(self) -> bool:
        """It has used more processor time than a grammar may; others' work on the machine does not count."""
        return self._clock is not None and time.clock_gettime(self._clock) - self._used_at_start > COMPILE_LIMIT

    @property
    def is_starved(self) -> bool:
        return self._clock is not None and time.monotonic() - self._started_at > LONGEST_WAIT

    @property
    def is_worth_keeping(self) -> bool:
        """Compiled, or refused for what the grammar is; or not known yet."""
        if not self.future.done():
            return not self.is_starved
        return not self.future.cancelled() and isinstance(self.future.exception(), (GrammarError, NoneType))


class GrammarCompiler:
    """Compiles for the tokenizer of a model folder in a thread pool; not thread-safe itself.

    Loading the tokenizer starts at once and can take a second; the first grammar waits for it.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self._tokenizer = self._threads.submit(load_tokenizer, folder, vocab_size, eos_token_ids)
        self._cache: OrderedDict[tuple[str, str], _Job] = OrderedDict()
        self._shares: CompileShares[_Job] = CompileShares()
        self._probe_of_thread = threading.local()
        self._probes: list[GrammarProbe] = []
        self._mask_workers: llguidance.LLExecutor | None = None

    def submit(self, grammar: Grammar, account_id: int = 0) -> PendingGrammar:
        """Start compiling, unless it is cached. Errors are raised by `result`.

        Grammars that wait are begun in turn by account, that of the least time spent first.

        Raises:
            QueueFullError: too many of the account's grammars wait.
        """
        key = (grammar.kind, grammar.text)
        job = self._cache.get(key)
        is_first = job is None or not job.is_worth_keeping
        if job is None or is_first:
            job = _Job(grammar)
        if not job.future.running() and not job.future.done():
            self._shares.enqueue(job, account_id)
            self._threads.submit(self._compile_next)
        self._cache[key] = job
        self._cache.move_to_end(key)
        self._evict()
        job.num_waiting += 1
        return PendingGrammar(grammar, job, is_first=is_first)

    def wait(self, pending: Sequence[PendingGrammar], timeout: float) -> None:
        """Wait until one of them is done, at most `timeout` seconds."""
        wait([each._job.future for each in pending], timeout, "FIRST_COMPLETED")

    def fill_masks(self, matchers: Sequence[llguidance.LLMatcher]) -> Words:
        """Token masks of the matchers' states, [len(matchers), num_words]; those of several in parallel."""
        num_words = self._tokenizer.result().num_words
        masks = np.empty((len(matchers), num_words), np.uint32)
        if len(matchers) == 1 or masks.size <= MAX_INLINE_WORDS:  # other threads would have to be given a core first
            for matcher, mask in zip(matchers, masks, strict=True):
                matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            return masks
        if self._mask_workers is None:
            self._mask_workers = llguidance.LLExecutor()
        self._mask_workers.unsafe_compute_mask_ptr(
            [(matcher, row) for row, matcher in enumerate(matchers)],
            masks.ctypes.data,
            num_words * masks.itemsize,
            len(matchers),
        )
        return masks

    def close(self) -> None:
        """End the threads and the processes that they own."""
        self._threads.shutdown(cancel_futures=True)
        for probe in self._probes:
            probe.close()

    def _compile_next(self) -> None:
        """Compile the next grammar, in a thread of the pool; there may be none left."""
        taken = self._shares.take()
        if taken is None:
            return
        job, account_id = taken
        start = time.monotonic()
        try:
            job.future.set_result(self._compile(job, job.grammar))
        except BaseException as error:
            job.future.set_exception(error)
        finally:
            self._shares.charge(account_id, time.monotonic() - start)

    def _compile(self, job: _Job, grammar: Grammar) -> CompiledGrammar:
        tokenizer = self._tokenizer.result()
        probe = self._probe(tokenizer)
        probe.wait_ready()
        start = time.monotonic()
        job.start()  # loading the tokenizer and the probe does not count
        source = probe.source_of(grammar)
        matcher = llguidance.LLMatcher(tokenizer.inner, source, log_level=0, limits=LIMITS)
        _raise_error_of(matcher)
        first_mask = np.frombuffer(matcher.compute_bitmask(), np.uint32)
        _raise_error_of(matcher)
        return CompiledGrammar(matcher, first_mask, time.monotonic() - start)

    def _probe(self, tokenizer: GrammarTokenizer) -> GrammarProbe:
        """This thread's own."""
        probe: GrammarProbe | None = getattr(self._probe_of_thread, "probe", None)
        if probe is None:
            probe = self._probe_of_thread.probe = GrammarProbe(tokenizer.probe_settings)
            self._probes.append(probe)
        return probe

    def _evict(self) -> None:
        seconds = itertools.accumulate(seconds_of(job) for job in reversed(self._cache.values()))
        num_kept = sum(1 for total in itertools.islice(seconds, MAX_CACHED) if total <= MAX_CACHED_SECONDS)
        while len(self._cache) > max(num_kept, 1):
            self._cache.popitem(last=False)


class GrammarProbe:
    """A limited process that tries grammars out before the engine compiles them; see `engine.grammar.probe`."""

    def __init__(self, settings: bytes) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None

    def wait_ready(self) -> None:
        """Start the process, which takes longer than most grammars do."""
        if self._process is None:
            self.source_of(Grammar("lark", 'start: "a"'))

    def source_of(self, grammar: Grammar) -> str:
        """The grammar in llguidance's own form.

        Raises:
            GrammarError: it is wrong, or needs too much time or memory.
            EngineUnavailableError: the process could not be started, or was ended from outside, twice in a row.
        """
        for _ in range(TRIES):
            try:
                answer = self._ask(grammar)
            except OSError:  # no memory, descriptors or processes at this moment
                self.close()
                continue
            if not answer:
                if -self._exit_code() in LIMIT_SIGNALS:
                    raise GrammarError("needs too much time or memory to compile: make it smaller")
                continue
            found = msgspec.json.decode(answer, type=ProbeAnswer)
            if found.error:
                raise GrammarError(found.error)
            return found.source
        raise EngineUnavailableError("the grammar could not be compiled just now; please try again")

    def _ask(self, grammar: Grammar) -> bytes:
        """The line that answers; empty where the process ended instead."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(grammar) + b"\n")
            process.stdin.flush()
            return process.stdout.readline()
        except BrokenPipeError:
            return b""

    def close(self) -> None:
        """Kill the process; the next grammar starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(BrokenPipeError):
                process.communicate()

    def _exit_code(self) -> int:
        """Of the process, whose output has ended; negative for a signal."""
        assert self._process is not None
        process = self._process
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(EXIT_TIMEOUT)
        self.close()
        return process.returncode

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tessera.engine.grammar.probe"],
            cwd=PACKAGE_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment_without_secrets(),
        )
        assert self._process.stdin is not None
        self._process.stdin.write(self._settings)
        return self._process


def load_tokenizer(folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> GrammarTokenizer:
    """The tokenizer of a model folder or a GGUF file; ids beyond it, up to `vocab_size`, are padding.

    Raises: GrammarError for a tokenizer that is missing or that llguidance cannot use.
    """
    try:
        try:
            return _tokenizer_of(tokenizer_json(folder), vocab_size, eos_token_ids)
        except ValueError as error:
            if not is_gguf(folder) or "out of vocabulary" not in str(error):
                raise
            # Merges of tokens that were left out of the file; to look for them takes as long as all else.
            return _tokenizer_of(gguf_tokenizer_json(folder, all_merges=False), vocab_size, eos_token_ids)
    except (ModelError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise GrammarError("needs a tokenizer.json, and this model has none that can be used for it") from error


def _tokenizer_of(text: str, vocab_size: int, eos_token_ids: Sequence[int]) -> GrammarTokenizer:
    """Of a tokenizer.json."""
    added = msgspec.json.decode(text, type=_AddedTokens).added_tokens
    # One id more than the model has, for grammars to end with where the model has no end of its own.
    end = vocab_size
    try:
        inner = llguidance.LLTokenizer(text, n_vocab=end + 1, eos_token=list(eos_token_ids) or [end])
    except ValueError:
        end = llguidance.LLTokenizer(text).vocab_size
        if end <= vocab_size:
            raise
        inner = llguidance.LLTokenizer(text, n_vocab=end + 1, eos_token=list(eos_token_ids) or [end])
    special = {token.id: token.content for token in added if token.special and token.id < end}
    settings = msgspec.json.encode(ProbeSettings(end, special)) + b"\n"
    return GrammarTokenizer(inner, -(-(end + 1) // 32), settings)


def seconds_of(job: _Job) -> float:
    """Time that a grammar took to compile; 0 while that is not known."""
    if not job.future.done() or job.future.cancelled() or job.future.exception() is not None:
        return 0.0
    return job.future.result().seconds


def _raise_error_of(matcher: llguidance.LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarError(complaint(matcher.get_error()))
