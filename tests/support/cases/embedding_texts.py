"""Texts whose embeddings by the real MiniLM are kept in tests/golden/golden_embeddings.npz."""

from __future__ import annotations

TEXTS = [
    "The cat sits on the mat.",
    "A small cat is sitting on a rug.",
    "Interest rates were raised by a quarter of a percentage point.",
    "Le chat est assis sur le tapis.",
    "Hello",
    "¿Dónde está la biblioteca? Ça va déjà, naïve façade!",
    "猫が好きです。",
    "def embed(texts: list[str]) -> list[list[float]]: ...",
    "x" * 150 + " and an unknown word 🦊",
    "UPPER CASE, lower case; 3.14159, $1,000,000 & 50% off",
    "  spaces\t\tand\n\nlines  ",
    " ".join(["A long text, which repeats itself to fill much of the context that this model was made for."] * 11),
]
