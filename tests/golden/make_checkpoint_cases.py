"""Writes model folders of random configurations in the forms that people have them, with what Hugging Face transformers
computes from each; `compare_checkpoints` runs this and compares.

Run in an environment with torch, transformers and sentencepiece (written for 2.13, 5.23 and 0.2):

    python tests/golden/make_checkpoint_cases.py FOLDER SEED COUNT

A case is a folder `model` with `case.json` (its form, prompt and the transformers settings to compare) and
`expected.npz` beside it: logits, or token vectors where the form has no head. Tokenizer cases have `texts.json`, cases
of requests their greedy tokens in `case.json`.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.golden.family_cases import CLASSES, family_config
from tests.golden.mixture_cases import MIXTURES, mixture_config

VOCAB, LENGTH = 96, 48
FAMILIES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "ministral": "Ministral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "smollm3": "SmolLM3",
    "phi3": "Phi3",
    "gpt2": "GPT2",
    "starcoder2": "Starcoder2",
    "stablelm": "StableLm",
    "granite": "Granite",
    "exaone4": "Exaone4",
    "seed_oss": "SeedOss",
}
FAMILIES |= CLASSES | MIXTURES
ENCODERS = {
    "bert": "Bert",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
    "camembert": "Camembert",
    "distilbert": "DistilBert",
    "modernbert": "ModernBert",
    "nomic_bert": "NomicBert",
}
ENCODER_FORMS = ("plain", "classifier", "masked", "classifier")
POOLINGS = ("cls", "mean")
SCORERS = ("llama", "mistral", "qwen2", "qwen3")
FORMS = (
    *("plain", "old spelling", "tied head only", "tied other head", "tied both", "no architectures"),
    *("empty architectures", "base class", "headless", "extra tensors", "stale index", "dtype", "duplicate key"),
    "no window",
)
ROPES: tuple[dict[str, Any] | None, ...] = (
    None,
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
)


def random_config(chooser: random.Random, family: str, form: str) -> dict[str, Any]:
    if family in CLASSES:
        return family_config(chooser, family, VOCAB)
    if family in MIXTURES:
        return mixture_config(chooser, family, VOCAB)
    heads = chooser.choice([2, 4])
    kv_heads = chooser.choice([count for count in (1, 2, 4) if heads % count == 0])
    head_dim = chooser.choice([8, 16, 32])
    hidden = heads * head_dim
    tied = form.startswith("tied") or (form not in ("headless", "base class") and chooser.random() < 0.4)
    base: dict[str, Any] = {"vocab_size": VOCAB, "tie_word_embeddings": tied, "bos_token_id": 1, "eos_token_id": 2}
    if family == "gpt2":
        inner = chooser.choice([None, 72])
        return {**base, "n_embd": hidden, "n_layer": 2, "n_head": heads, "n_positions": 64, "n_inner": inner}
    values = {
        **base,
        "hidden_size": hidden,
        "intermediate_size": chooser.choice([40, 72]),
        "num_hidden_layers": chooser.choice([1, 2, 4]),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "rms_norm_eps": chooser.choice([1e-6, 1e-5]),
    }
    if family in ("qwen3", "exaone4", "seed_oss", "mistral", "ministral", "llama"):
        values["head_dim"] = head_dim
    theta = chooser.choice([100.0, 10000.0])
    rope = chooser.choice(ROPES) if family not in ("phi3", "exaone4") else None
    values["rope_parameters"] = {"rope_theta": theta, **(rope or {"rope_type": "default"})}
    if family == "stablelm":
        values["rope_parameters"]["partial_rotary_factor"] = 0.5
    if family in ("mistral", "ministral", "starcoder2", "phi3", "exaone4"):
        values["sliding_window"] = chooser.choice([8, 20] if family in ("ministral", "exaone4") else [None, 8, 20])
    if family in ("qwen2", "qwen3") and chooser.random() < 0.5:
        values |= {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    for key in ("attention_bias", "mlp_bias"):
        if family in ("llama", "granite", "smollm3") or (family == "qwen3" and key == "attention_bias"):
            values[key] = chooser.random() < 0.5
    if family == "granite":
        values |= {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 3.0}
        values["attention_multiplier"] = 0.2
    return values


def randomise(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(1 + 0.2 * noise if is_norm else 0.2 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))


def write_case(folder: Path, chooser: random.Random, family: str, form: str) -> None:
    name = FAMILIES[family]
    settings = random_config(chooser, family, form)
    config_class = getattr(transformers, f"{name}Config")
    class_name = "GPT2LMHeadModel" if family == "gpt2" else f"{name}ForCausalLM"
    config_class = transformers.Gemma3TextConfig if family == "gemma3_text" else config_class
    config = config_class(**settings)
    config._attn_implementation = "eager"
    base = form == "base class"
    model = getattr(transformers, f"{name}Model" if base else class_name)(config)
    randomise(model, chooser.randrange(2**31))
    place = folder / "model"
    model.save_pretrained(place)
    alter(place, chooser, form, "transformer.wte" if family == "gpt2" else "model.embed_tokens")
    base = base or form == "headless"
    loader = transformers.AutoModel if base else getattr(transformers, class_name)
    loaded = loader.from_pretrained(place, dtype=torch.float32, attn_implementation="eager").eval()
    prompt = [chooser.randrange(3, VOCAB) for _ in range(chooser.randrange(2, LENGTH))]
    with torch.no_grad():
        out = loaded(torch.tensor([prompt]))
    found = (out.last_hidden_state if base else out.logits)[0].float().numpy()
    after(place, chooser, form)
    np.savez(folder / "expected.npz", found)
    window = getattr(loaded.config, "sliding_window", None)
    case = {"family": family, "form": form, "prompt": prompt, "headless": base, "window": window, "config": settings}
    (folder / "case.json").write_text(json.dumps(case))


def write_lengths_case(folder: Path, chooser: random.Random, kind: str) -> None:
    """RoPE that depends on the length: greedy tokens of a request within the trained length, and of one beyond it that
    begins alike. Transformers keeps dynamic RoPE's base of the longest sequence so far while sequences are longer than
    the trained length, so one of the longest length goes ahead."""
    trained, longest = 32, 128 if kind == "longrope" else 64
    family = "phi3" if kind == "longrope" else chooser.choice(["llama", "qwen2", "mistral"])
    settings = random_config(chooser, family, "plain")
    settings |= {"sliding_window": None, "max_position_embeddings": longest if kind == "longrope" else trained}
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 100.0}
    if kind == "longrope":
        pairs = settings["hidden_size"] // settings["num_attention_heads"] // 2
        for name, least, most in (("short_factor", 1.0, 1.5), ("long_factor", 2.0, 6.0)):
            rope[name] = [round(chooser.uniform(least, most), 3) for _ in range(pairs)]
        settings["original_max_position_embeddings"] = trained
    else:
        rope["factor"] = chooser.choice([2.0, 4.0])
    settings["rope_parameters"] = rope
    config = getattr(transformers, f"{FAMILIES[family]}Config")(**settings)
    model = getattr(transformers, f"{FAMILIES[family]}ForCausalLM")(config).eval()
    randomise(model, chooser.randrange(2**31))
    model.save_pretrained(folder / "model")
    beginning = [chooser.randrange(3, VOCAB) for _ in range(longest)]
    short = chooser.randrange(9, trained)
    long = chooser.randrange(trained + 1, longest - 16)
    requests = [(beginning[:short], trained - short), (beginning[:long], 16)]
    with torch.no_grad():
        tokens = [greedy_tokens(model, *requests[0])]
        if kind == "dynamic":
            model(torch.tensor([beginning]))
        tokens.append(greedy_tokens(model, *requests[1]))
    case = {"family": "lengths", "form": f"{kind}, by length", "max_model_len": longest, "config": settings}
    case |= {"requests": requests, "tokens": tokens}
    (folder / "case.json").write_text(json.dumps(case))


def greedy_tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def alter(place: Path, chooser: random.Random, form: str, embedding: str) -> None:
    """Before transformers reads it."""
    path, weights = place / "config.json", place / "model.safetensors"
    config, tensors = json.loads(path.read_text()), load_file(weights)
    head, table = "lm_head.weight", f"{embedding}.weight"
    if form == "tied head only":
        tensors[head] = tensors.pop(table)
    elif form == "tied other head":
        tensors[head] = torch.flip(tensors[table], [0]).contiguous()
    elif form == "tied both":
        tensors[head] = tensors[table].clone()
    elif form == "headless":
        tensors.pop(head, None)
        config["tie_word_embeddings"] = False
    elif form == "extra tensors":
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.ones(2, 2)
        tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    elif form == "no window":
        config.pop("sliding_window", None)
    elif form == "stale index":
        weights.rename(place / "model-00001-of-00001.safetensors")
        names = dict.fromkeys([*tensors, "model.layers.9.gone"], "model-00001-of-00001.safetensors")
        (place / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
        weights = place / "model-00001-of-00001.safetensors"
    elif form == "old spelling":
        config["torch_dtype"] = config.pop("dtype", "float32")
        rope = config.pop("rope_parameters", None)
        if rope is not None and "partial_rotary_factor" not in rope:
            config["rope_theta"] = rope.pop("rope_theta")
            kind = rope.pop("rope_type")
            config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
        elif rope is not None:
            config["rope_parameters"] = rope
    save_file(tensors, weights, {"format": "pt"})
    path.write_text(json.dumps(config))


def after(place: Path, chooser: random.Random, form: str) -> None:
    """After transformers has read it: forms that some version of it refuses, and that change nothing."""
    path = place / "config.json"
    config = json.loads(path.read_text())
    if form == "no architectures":
        del config["architectures"]
    elif form == "empty architectures":
        config["architectures"] = chooser.choice([None, []])
    elif form == "dtype":
        config["dtype"] = chooser.choice(["half", "float64", "auto", "torch.float16", "float"])
    text = json.dumps(config)
    path.write_text(text[:-1] + ', "vocab_size": 96}' if form == "duplicate key" else text)


def encoder_config(chooser: random.Random, family: str) -> dict[str, Any]:
    """Settings that the encoders share, by the names of BERT, and those of one family."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": chooser.choice([32, 48]),
        "num_hidden_layers": chooser.choice([1, 3, 5]),
        "num_attention_heads": chooser.choice([2, 4]),
        "intermediate_size": 56,
        "max_position_embeddings": 64,
        "pad_token_id": 1,
    }
    if family == "nomic_bert":
        values["rope_parameters"] = {"rope_type": "default", "rope_theta": chooser.choice([100.0, 1000.0])}
    if family == "distilbert":
        names = ("dim", "n_layers", "n_heads", "hidden_dim")
        given = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        for name, key in zip(names, given, strict=True):
            values[name] = values.pop(key)
    if family in ("roberta", "xlm-roberta", "camembert"):
        values |= {"type_vocab_size": chooser.choice([1, 2]), "layer_norm_eps": chooser.choice([1e-5, 1e-12])}
    if family == "modernbert":
        values |= {"local_attention": chooser.choice([2, 8, 9, 128]), "classifier_pooling": chooser.choice(POOLINGS)}
        values |= {"global_attn_every_n_layers": chooser.choice([1, 2, 3]), "bos_token_id": 2, "eos_token_id": 3}
        values |= {key: chooser.random() < 0.3 for key in ("norm_bias", "attention_bias", "mlp_bias")}
        values |= {"classifier_bias": chooser.random() < 0.5, "cls_token_id": 2, "sep_token_id": 3}
        if chooser.random() < 0.5:
            values |= {"global_rope_theta": 500.0, "local_rope_theta": 20.0}
    return values


def write_encoder_case(folder: Path, chooser: random.Random, family: str, form: str) -> None:
    """`form`: plain, masked (with a head that is left out), gamma and beta, or classifier, of one text or a pair."""
    name, num_labels = ENCODERS[family], chooser.choice([1, 3])
    settings = encoder_config(chooser, family)
    config = getattr(transformers, f"{name}Config")(**settings, num_labels=num_labels)
    config._attn_implementation = "eager"
    suffix = {"masked": "ForMaskedLM", "classifier": "ForSequenceClassification"}.get(form, "Model")
    model = getattr(transformers, name + suffix)(config)
    randomise(model, chooser.randrange(2**31))
    place = folder / "model"
    model.save_pretrained(place)
    if family == "modernbert" and chooser.random() < 0.5:
        old_rope_keys(place / "config.json")
    if family == "nomic_bert" and chooser.random() < 0.5:
        old_nomic_keys(place / "config.json")
    prompt = [chooser.randrange(4, VOCAB) for _ in range(chooser.randrange(2, LENGTH))]
    loader = getattr(transformers, name + suffix) if form == "classifier" else transformers.AutoModel
    loaded = loader.from_pretrained(place, dtype=torch.float32, attn_implementation="eager").eval()
    first_length = chooser.randrange(1, len(prompt)) if chooser.random() < 0.7 else len(prompt)
    arguments = {"input_ids": torch.tensor([prompt])}
    if settings.get("type_vocab_size", 2 if family in ("bert", "nomic_bert") else 0) > 1:
        types = [int(place >= first_length) for place in range(len(prompt))]
        arguments["token_type_ids"] = torch.tensor([types])
    with torch.no_grad():
        out = loaded(**arguments)
    found = (out.logits if form == "classifier" else out.last_hidden_state[0]).numpy()
    if form == "gamma and beta":
        tensors = load_file(place / "model.safetensors")
        renamed = {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
            for name, tensor in tensors.items()
        }
        save_file(renamed, place / "model.safetensors", {"format": "pt"})
    if family == "nomic_bert":
        drop_native_keys(place / "config.json")
    np.savez(folder / "expected.npz", found)
    case = {
        "family": family,
        "form": f"{family}, {form}",
        "prompt": prompt,
        "headless": True,
        "window": None,
        "first_length": first_length,
        "config": settings,
    }
    (folder / "case.json").write_text(json.dumps(case))


def old_rope_keys(path: Path) -> None:
    """Write ModernBERT's RoPE and layer types as transformers 4 does."""
    config = json.loads(path.read_text())
    ropes = config.pop("rope_parameters")
    config["global_rope_theta"] = ropes["full_attention"]["rope_theta"]
    config["local_rope_theta"] = ropes["sliding_attention"]["rope_theta"]
    types = config.pop("layer_types")
    every = next((n for n in range(1, len(types)) if types[n] == "full_attention"), len(types))
    config["global_attn_every_n_layers"] = every
    path.write_text(json.dumps(config))


def drop_native_keys(path: Path) -> None:
    """Leave a NomicBERT config with `old_nomic_keys` those alone."""
    config = json.loads(path.read_text())
    if "n_embd" in config:
        native = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "head_dim")
        for key in (*native, "max_position_embeddings", "rope_parameters", "hidden_act", "layer_norm_eps"):
            del config[key]
        path.write_text(json.dumps(config))


def old_nomic_keys(path: Path) -> None:
    """Write NomicBERT's settings as its own code names them, where transformers reads both."""
    config = json.loads(path.read_text())
    names = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    names |= {"n_inner": "intermediate_size", "max_trained_positions": "max_position_embeddings"}
    config |= {"n_positions": 8192, "activation_function": "swiglu", "rotary_emb_fraction": 1.0, "prenorm": False}
    config |= {"rotary_emb_base": config["rope_parameters"]["rope_theta"], "layer_norm_epsilon": 1e-12}
    config |= {old: config[new] for old, new in names.items()}
    path.write_text(json.dumps(config))


def write_score_case(folder: Path, chooser: random.Random, family: str) -> None:
    """A decoder with a head for sequence classification."""
    settings = {**random_config(chooser, family, "headless"), "num_labels": chooser.choice([1, 3])}
    settings["tie_word_embeddings"] = chooser.random() < 0.5
    model_class = getattr(transformers, f"{FAMILIES[family]}ForSequenceClassification")
    config = getattr(transformers, f"{FAMILIES[family]}Config")(**settings)
    config._attn_implementation = "eager"
    model = model_class(config)
    randomise(model, chooser.randrange(2**31))
    place = folder / "model"
    model.save_pretrained(place)
    loaded = model_class.from_pretrained(place, dtype=torch.float32, attn_implementation="eager").eval()
    prompt = [chooser.randrange(3, VOCAB) for _ in range(chooser.randrange(2, LENGTH))]
    with torch.no_grad():
        found = loaded(torch.tensor([prompt])).logits.float().numpy()
    np.savez(folder / "expected.npz", found)
    window = getattr(loaded.config, "sliding_window", None)
    case = {"family": family, "form": f"{family}, score", "prompt": prompt, "headless": True, "window": window}
    (folder / "case.json").write_text(json.dumps({**case, "config": settings}))


def write_sentencepiece_case(folder: Path, chooser: random.Random, number: int) -> None:
    """A small model of its own over random words, and SentencePiece's own ids."""
    place = folder / "model"
    place.mkdir(parents=True)
    letters = "abcdefghij\u00e9\u4e2d"
    words = ["".join(chooser.choices(letters, k=chooser.randrange(1, 7))) for _ in range(300)]
    lines = [" ".join(chooser.choices(words, k=12)) for _ in range(400)]
    kind = chooser.choice(["bpe", "bpe", "unigram"])
    options = {
        "model_type": kind,
        "vocab_size": chooser.choice([330, 360]),
        "byte_fallback": True,
        "normalization_rule_name": chooser.choice(["identity", "identity", "nmt_nfkc"]),
        "add_dummy_prefix": chooser.random() < 0.7,
        "remove_extra_whitespaces": chooser.random() < 0.3,
        "user_defined_symbols": chooser.choice([[], ["<user>"]]),
        "split_digits": chooser.random() < 0.5,
        "hard_vocab_limit": False,
    }
    (folder / "text").write_text("\n".join(lines))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=str(place / "tokenizer"), minloglevel=2, **options
    )
    processor = sentencepiece.SentencePieceProcessor(model_file=str(place / "tokenizer.model"))
    texts = [
        *("", " ", "a  b", " a", "a ", "\n", "hello World! 12", "\U0001f642", "\ufb01ne \u2460", "caf\u00e9"),
        *("".join(chooser.choices(letters + "    xyz123\n", k=chooser.randrange(1, 40))) for _ in range(30)),
    ]
    (folder / "texts.json").write_text(json.dumps([(text, processor.encode(text)) for text in texts]))
    case = {"family": "tokenizer", "form": f"tokenizer.model, {kind}", "config": options}
    (folder / "case.json").write_text(json.dumps(case))


def write_byte_level_case(folder: Path, chooser: random.Random) -> None:
    """A small byte-level BPE of random words in the files that say it, and the ids of transformers' fast tokenizer."""
    place = folder / "model"
    place.mkdir(parents=True)
    letters = "abcdefghij\u00e9\u4e2d0123"
    lines = [
        " ".join("".join(chooser.choices(letters, k=chooser.randrange(1, 7))) for _ in range(9)) for _ in range(200)
    ]
    inner = tokenizers.ByteLevelBPETokenizer()
    inner.train_from_iterator(lines, 400, 2, False, ["<|endoftext|>"])
    size = inner.get_vocab_size()
    form = chooser.choice(["Qwen2Tokenizer", "GPT2Tokenizer", "added_tokens_decoder", "add_bos_token"])
    settings: dict[str, Any] = {"tokenizer_class": form, "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    if form.endswith("Tokenizer"):
        inner.save_model(str(place))
        (place / "config.json").write_text(json.dumps({"model_type": "gpt2" if form[0] == "G" else "qwen2"}))
    else:
        inner._tokenizer.save(str(place / "tokenizer.json"))
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if form == "add_bos_token":
        settings |= {"add_bos_token": True, "tokenizer_class": "LlamaTokenizerFast"}
    if chooser.random() < 0.5 or form == "added_tokens_decoder":
        flags = {name: chooser.random() < 0.3 for name in ("lstrip", "rstrip", "special", "single_word")}
        added = {"content": "<user>", "normalized": False, **flags}
        settings["added_tokens_decoder"] = {str(size): added, str(size + 1): {**added, "content": "<|im_end|>"}}
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    loader = getattr(transformers, form, transformers.PreTrainedTokenizerFast)
    reference = loader.from_pretrained(place)
    pieces = [*letters, " ", " ", "\n", "<user>", "<|im_end|>", "<|endoftext|>", "'s", "A", "\u0301"]
    texts = ["".join(chooser.choices(pieces, k=chooser.randrange(1, 30))) for _ in range(40)]
    ids = [reference(text, add_special_tokens=False)["input_ids"] for text in texts]
    (folder / "texts.json").write_text(json.dumps(list(zip(texts, ids, strict=True))))
    case = {"family": "tokenizer", "form": form, "config": settings, "bos": form == "add_bos_token"}
    (folder / "case.json").write_text(json.dumps(case))


def main() -> None:
    out, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    plan = [
        (family, form) for form in FORMS for family in FAMILIES if family not in CLASSES | MIXTURES or form == "plain"
    ]
    encoder_plan = [(family, form) for form in ENCODER_FORMS for family in ENCODERS] + [("bert", "gamma and beta")]
    encoder_plan = [(family, "plain" if family == "nomic_bert" else form) for family, form in encoder_plan]
    for number in range(count):
        chooser = random.Random(f"{seed}/{number}")
        folder = out / f"{number:04}"
        folder.mkdir(parents=True)
        if number % 20 == 5:
            write_lengths_case(folder, chooser, ("longrope", "dynamic")[number // 20 % 2])
        elif number % 10 == 6:
            write_score_case(folder, chooser, SCORERS[number // 10 % len(SCORERS)])
        elif number % 10 in (7, 8):
            family, form = encoder_plan[(number // 10 * 2 + number % 10 - 7) % len(encoder_plan)]
            write_encoder_case(folder, chooser, family, form)
        elif number % 20 == 9:
            write_byte_level_case(folder, chooser)
        elif number % 10 == 9:
            write_sentencepiece_case(folder, chooser, number)
        else:
            family, form = plan[(number // 10 * 6 + number % 10) % len(plan)]
            write_case(folder, chooser, family, form)


if __name__ == "__main__":
    main()
