"""The table of supported models, from the table of architectures and the tiny models that test it."""

from __future__ import annotations

from collections import Counter

from docs.generate.figures import markdown_table
from tessera.engine.models.gguf.architectures import GGUF_ARCHITECTURES
from tessera.engine.models.gguf.config import WINDOWED
from tessera.engine.models.gguf.mixtures import GGUF_MIXTURES
from tessera.engine.models.registry import ARCHITECTURES
from tests.support.models.tiny_families import EQUALS, FAMILIES
from tests.support.models.tiny_models import TINY_MODELS

REFERENCE = "transformers 5.23"
COLUMNS = ("models", "class in `config.json`", "GGUF", f"compared with {REFERENCE} in float32")

# What people know of each.
TITLES = {
    "ArceeForCausalLM": "Arcee AFM",
    "BaichuanForCausalLM": "Baichuan 1 and 2, 7B",
    "BertModel": "BERT, and embedding models made from it (BGE, E5, GTE, MiniLM)",
    "CamembertModel": "CamemBERT",
    "CodeGenForCausalLM": "CodeGen",
    "Cohere2ForCausalLM": "Command R7B, Command A, Aya Vision",
    "CohereForCausalLM": "Command R, Command R+, Aya",
    "DistilBertModel": "DistilBERT",
    "Dots1ForCausalLM": "dots.llm1",
    "Ernie4_5ForCausalLM": "ERNIE 4.5, dense",
    "Ernie4_5_MoeForCausalLM": "ERNIE-4.5-21B-A3B, ERNIE-4.5-300B-A47B",
    "Exaone4ForCausalLM": "EXAONE 4",
    "FalconForCausalLM": "Falcon 7B, 11B, 40B, 180B",
    "GPT2LMHeadModel": "GPT-2",
    "GPTBigCodeForCausalLM": "StarCoder 1, SantaCoder (GPT-BigCode)",
    "GPTJForCausalLM": "GPT-J",
    "GPTNeoXForCausalLM": "Pythia, GPT-NeoX, Dolly, RedPajama",
    "Gemma2ForCausalLM": "Gemma 2",
    "Gemma3ForCausalLM": "Gemma 3, text",
    "GemmaForCausalLM": "Gemma, CodeGemma",
    "Glm4ForCausalLM": "GLM-4-0414, GLM-Z1, GLM-4.1V's text",
    "Glm4MoeForCausalLM": "GLM-4.5, GLM-4.5-Air, GLM-4.6",
    "GlmForCausalLM": "GLM-4-9B in Hugging Face's form, GLM-Edge",
    "GptOssForCausalLM": "gpt-oss, with experts in MXFP4 or 16 bits",
    "GraniteForCausalLM": "Granite 3",
    "GraniteMoeForCausalLM": "Granite 3 MoE (1B-A400M, 3B-A800M)",
    "GraniteMoeHybridForCausalLM": "Granite 4, dense and without Mamba (350M, 1B, micro)",
    "HeliumForCausalLM": "Helium",
    "HunYuanDenseV1ForCausalLM": "HunYuan, dense",
    "InternLM2ForCausalLM": "InternLM 2 and 2.5",
    "InternLM3ForCausalLM": "InternLM 3",
    "LlamaForCausalLM": "Llama 2, 3 and 3.x, Yi, DeepSeek LLM, SmolLM 1 and 2, TinyLlama",
    "MiMoForCausalLM": "MiMo-7B",
    "MiniCPMForCausalLM": "MiniCPM 1, 2B and 1B",
    "MinistralForCausalLM": "Ministral",
    "MistralForCausalLM": "Mistral, Mistral Nemo and Small",
    "MixtralForCausalLM": "Mixtral",
    "ModernBertModel": "ModernBERT",
    "NemotronForCausalLM": "Nemotron 4, Minitron",
    "NomicBertModel": "NomicBERT",
    "OPTForCausalLM": "OPT (not 350M), Galactica",
    "Olmo2ForCausalLM": "OLMo 2",
    "Olmo3ForCausalLM": "OLMo 3",
    "OlmoForCausalLM": "OLMo 1",
    "OlmoeForCausalLM": "OLMoE",
    "Phi3ForCausalLM": "Phi-3, Phi-3.5, Phi-4",
    "PhimoeForCausalLM": "Phi-3.5-MoE",
    "PhiForCausalLM": "Phi-1, Phi-1.5, Phi-2",
    "Qwen2ForCausalLM": "Qwen2, Qwen2.5, QwQ",
    "Qwen2MoeForCausalLM": "Qwen1.5-MoE, Qwen2-57B-A14B",
    "Qwen3ForCausalLM": "Qwen3, dense",
    "Qwen3MoeForCausalLM": "Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder-30B-A3B",
    "RobertaModel": "RoBERTa",
    "SeedOssForCausalLM": "Seed-OSS",
    "SmolLM3ForCausalLM": "SmolLM3",
    "StableLmForCausalLM": "StableLM",
    "XLMRobertaModel": "XLM-RoBERTa (BGE-M3, multilingual E5, BGE rerankers)",
    "Starcoder2ForCausalLM": "StarCoder2",
}


def models_table() -> str:
    """A row for each entry, in the order of their titles. Raises KeyError for one without a title."""
    configs = [model.config for model in TINY_MODELS.values()] + list(FAMILIES.values())
    tested = Counter(config["architectures"][0] for config in configs)
    in_gguf: dict[str, list[str]] = {}
    for gguf, stored in (*GGUF_ARCHITECTURES.items(), *GGUF_MIXTURES.items()):
        for name in (stored.name, WINDOWED.get(stored.name)):
            if name is not None:
                in_gguf.setdefault(name, []).append(f"`{gguf}`")
    rows = []
    for name, entry in sorted(ARCHITECTURES.items(), key=lambda item: TITLES[item[0]].lower()):
        if entry.model_type in EQUALS:
            against = f"logits of {tested[name]} configurations, as {EQUALS[entry.model_type]} with the same weights"
        elif entry.encoder:
            against = "vectors and scores"
        else:
            against = f"logits of {tested[name]} configurations"
        rows.append([TITLES[name], f"`{name}`", ", ".join(in_gguf.get(name, ["no"])), against])
    return markdown_table(COLUMNS, rows, len(COLUMNS))
