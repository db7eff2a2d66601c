"""The environment of child processes."""

from __future__ import annotations

import os

# Children need none of these, and whatever reads their memory or /proc would find them there.
SECRETS = frozenset({"TESSERA_API_KEY", "TESSERA_SSL_KEYFILE_PASSWORD", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"})


def environment_without_secrets() -> dict[str, str]:
    """This process's, without keys and tokens."""
    return {name: value for name, value in os.environ.items() if name not in SECRETS}
