"""A process that tries grammars out: `python -m tessera.engine.grammar.probe`, lines of JSON in and out.

Converting and compiling some grammars takes exponential time or memory, in code that can neither be interrupted nor
survive a failed allocation. So each is converted here, and compiled first with a vocabulary of single bytes: a grammar
that would crash the engine crashes this process instead. SIGPROF: too long; SIGABRT or SIGSEGV: too large.
"""

from __future__ import annotations

import resource
import signal
import sys

import llguidance
import msgspec

from tessera.engine.contract.sampling_params import Grammar
from tessera.engine.grammar.source import GrammarError, complaint, llguidance_source

MAX_CPU_SECONDS = 1.0
MAX_MEMORY = 2**30  # bytes of address space


class ProbeSettings(msgspec.Struct, frozen=True):
    """The first line of input: the number of token ids, and the special tokens that grammars may name."""

    vocab_size: int
    special_tokens: dict[int, str]


class ProbeAnswer(msgspec.Struct, frozen=True):
    """A grammar in llguidance's own form, or what is wrong with it."""

    source: str = ""
    error: str = ""


class ByteVocabulary:
    """A tokenizer of single bytes for llguidance; ids without a byte or a name are never produced."""

    is_tokenizer_wrapper = True

    def __init__(self, settings: ProbeSettings) -> None:
        special = settings.special_tokens
        end = max(settings.vocab_size, 256 + len(special))
        plain = (token_id for token_id in range(end) if token_id not in special)
        self._id_of_byte = [next(plain) for _ in range(256)]
        self.bos_token_id: int | None = None
        self.eos_token_id = end
        self.special_token_ids = [*special, end]
        self.tokens = [b""] * (end + 1)
        self.tokens[end] = b"<end of answer>"
        for token_id, name in special.items():
            self.tokens[token_id] = name.encode()
        for byte, token_id in enumerate(self._id_of_byte):
            self.tokens[token_id] = bytes([byte])

    def __call__(self, text: bytes | str) -> list[int]:
        return [self._id_of_byte[byte] for byte in (text.encode() if isinstance(text, str) else text)]


def try_out(grammar: Grammar, tokenizer: llguidance.LLTokenizer) -> ProbeAnswer:
    """Convert and compile."""
    try:
        source = llguidance_source(grammar)
    except GrammarError as error:
        return ProbeAnswer(error=str(error))
    limits = llguidance.LLParserLimits(verbose_errors=False)
    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return ProbeAnswer(error=complaint(matcher.get_error())) if matcher.is_error() else ProbeAnswer(source)


def main() -> None:
    """Answer each line, a Grammar, with a ProbeAnswer."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=ProbeSettings)
    tokenizer = llguidance.LLTokenizer(ByteVocabulary(settings), slices=[])  # type: ignore[arg-type]
    for line in sys.stdin.buffer:
        grammar = msgspec.json.decode(line, type=Grammar)
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_SECONDS)
        answer = try_out(grammar, tokenizer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
