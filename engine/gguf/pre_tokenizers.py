"""How byte-level BPE vocabularies in GGUF split text into words, by the name that the file gives: the patterns that
the models' own tokenizer.json files have."""

from __future__ import annotations

from dataclasses import dataclass

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# Words that begin with capitals, or go on with small letters.
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{SYMBOLS}|{SPACES}"
QWEN2 = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}|{SYMBOLS}|{SPACES}"
QWEN35 = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}"
)


def _cased_words(after: str) -> str:
    start = r"[^\r\n\p{L}\p{N}]?"
    return rf"{start}{UPPER}*{LOWER}+{after}|{start}{UPPER}+{LOWER}*{after}"


TEKKEN = rf"{_cased_words('')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
GPT4O = rf"{_cased_words(CONTRACTIONS + '?')}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
SEED_CODER = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACES}"
BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
EXAONE_MOE = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
# All but spaces and the sentence marks of Latin, Chinese, Devanagari and Arabic.
BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"
FALCON_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|`]+"
GROUPED_DIGITS = r"\d{1,3}(?=(?:\d{3})*\b)"  # in threes, counted from the last
THREE_DIGITS = "[0-9][0-9][0-9]"
CHINESE_AND_KOREAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
CHINESE_AND_JAPANESE = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}"
)
DEEPSEEK_PUNCTUATION = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
# Letters that have a case.
DEEPSEEK_LETTERS = (
    "\\s?[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943]+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """One way to split.

    Attributes:
        patterns: applied one after the other; matches and what lies between them become pieces of their own.
        whole_words: a piece that is a token is taken whole, whatever the merges say.
        adds_bos: where the file does not say whether a prompt begins with the BOS token.
        adds_separator: prompts are framed like BERT's.
        composes: text is brought to Unicode's form C first.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    adds_bos: bool = False
    adds_separator: bool = False
    composes: bool = False


def _by_name(*families: tuple[PreTokenizer, tuple[str, ...]]) -> dict[str, PreTokenizer]:
    return {name: pre_tokenizer for pre_tokenizer, names in families for name in names}


PRE_TOKENIZERS = _by_name(
    (PreTokenizer((PUNCTUATION, GPT2, r"\p{N}+", THREE_DIGITS)), ("default",)),
    (
        PreTokenizer((LLAMA3,), whole_words=True, adds_bos=True),
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    ),
    (PreTokenizer((LLAMA3,)), ("dbrx", "smaug-bpe", "chatglm-bpe", "glm4")),
    (PreTokenizer((QWEN2,), composes=True), ("qwen2",)),
    (
        PreTokenizer((QWEN2,)),
        ("deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "solar-open", "kormo", "f2llmv2", "grok-2"),
    ),
    (PreTokenizer((QWEN35,), composes=True), ("qwen35",)),
    (
        PreTokenizer((GPT2,)),
        ("gpt-2", "phi-2", "olmo", "jais", "trillion", "granite-docling", "exaone4", "modern-bert", "mellum"),
    ),
    (PreTokenizer((GPT2,)), ("jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "gigachat", "a.x-4.0")),
    (PreTokenizer((GPT2,), composes=True), ("mpt",)),
    (PreTokenizer((GPT2,), adds_separator=True), ("roberta-bpe", "jina-v1-en", "jina-v2-code")),
    (
        PreTokenizer((r"\p{N}", GPT2)),
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"),
    ),
    (PreTokenizer((FALCON_PUNCTUATION, GPT2, THREE_DIGITS)), ("falcon",)),
    (
        PreTokenizer((r"[\r\n]", DEEPSEEK_LETTERS, DEEPSEEK_PUNCTUATION, r"\s+$", CHINESE_AND_KOREAN, r"\p{N}+")),
        ("deepseek-llm",),
    ),
    (
        PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CHINESE_AND_KOREAN, r"\p{N}")),
        ("deepseek-coder",),
    ),
    (PreTokenizer((r"\p{N}{1,3}", CHINESE_AND_JAPANESE, DEEPSEEK3)), ("deepseek-v3", "hunyuan-dense", "joyai-llm")),
    (PreTokenizer((TEKKEN,), whole_words=True, adds_bos=True), ("tekken",)),
    (PreTokenizer((GPT4O,)), ("gpt-4o", "llama4", "kanana2", "minimax-m2")),
    (PreTokenizer((GROUPED_DIGITS, GPT4O)), ("tiny_aya",)),
    (PreTokenizer((r"\p{N}{1,3}", LLAMA3), whole_words=True), ("minicpm5",)),
    (PreTokenizer((BLOOM,)), ("bloom", "poro-chat", "gpt3-finnish")),
    (PreTokenizer((BLOOM, r"\p{N}")), ("viking",)),
    (PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")), ("superbpe",)),
    (PreTokenizer((BAILING,)), ("bailingmoe", "bailingmoe2", "llada-moe")),
    (PreTokenizer((SEED_CODER,)), ("seed-coder",)),
    (PreTokenizer((EXAONE_MOE,)), ("exaone-moe",)),
)

# Names for files of before May 2024, which have none (llama.cpp, pull request 6920): by architecture, and by the BOS
# token where architectures have several vocabularies.
UNNAMED = {
    "command-r": "command-r",
    "falcon": "falcon",
    "gpt2": "gpt-2",
    "gptneox": "mpt",
    "olmo": "olmo",
    "phi2": "phi-2",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2",
    "starcoder": "starcoder",
    "starcoder2": "starcoder",
}
UNNAMED_BY_BOS = {"<|begin_of_text|>": "llama-bpe"}
