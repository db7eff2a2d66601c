"""`--prompt-activations int8`: where it cannot be had."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tessera.engine.contract.errors import ConfigError
from tests.support.models.tiny_models import TINY_MODELS, build
from tests.support.speculation import make_config, make_runner


def test_with_one_order_of_sums_it_is_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path, prompt_activations="int8", batch_invariant=True)
    with pytest.raises(ConfigError, match="--prompt-activations int8 cannot be used with --batch-invariant"):
        config.verify()


def test_on_the_cpu_it_is_said_to_change_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = build(TINY_MODELS["llama"], tmp_path)
    with caplog.at_level(logging.WARNING):
        make_runner(folder, prompt_activations="int8", quantization="int4")
    assert "--prompt-activations int8 changes nothing: cpu has no kernel for it" in caplog.text
