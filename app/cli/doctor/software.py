"""Checks of packages, and of what downloads models."""

from __future__ import annotations

import os
import re
from importlib import metadata
from pathlib import Path

import httpx

from tessera.app.cli.doctor.check import Check
from tessera.app.cli.doctor.folders import MIN_FREE, folder_check

PACKAGES, MODELS = "packages", "models"
DISTRIBUTION = "tessera-llm"
REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def package_checks() -> list[Check]:
    """Tessera's version, and those of what it needs."""
    from tessera import __version__

    checks = [Check(PACKAGES, "tessera", "ok", f"{__version__} at {Path(__file__).resolve().parents[3]}")]
    try:
        requirements = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        advice = "it runs from its sources; pip install . installs it"
        return [*checks, Check(PACKAGES, "dependencies", "warning", "not known: Tessera is not installed", advice)]
    found, missing = [], []
    for requirement in requirements:
        match = REQUIREMENT.match(requirement)
        if match is None or "extra ==" in requirement or "win32'" in requirement.replace("!= 'win32'", ""):
            continue
        try:
            found.append(f"{match[0]} {metadata.version(match[0])}")
        except metadata.PackageNotFoundError:
            missing.append(match[0])
    checks.append(Check(PACKAGES, "dependencies", "ok", ", ".join(found)))
    if missing:
        listed = ", ".join(missing)
        checks.append(Check(PACKAGES, "missing", "error", listed, f"pip install {' '.join(missing)}"))
    return checks


def model_checks(timeout: float, *, network: bool) -> tuple[list[Check], str]:
    """The checks, and why models cannot be downloaded; empty if they can."""
    from huggingface_hub import constants, get_token

    folder = Path(constants.HF_HUB_CACHE)
    cache = folder_check(MODELS, "cache", folder, "set HF_HOME to another folder", MIN_FREE)
    token = Check(
        MODELS, "token", "ok", "there is one, for private and gated models" if get_token() else "none (HF_TOKEN)"
    )
    checks = [cache, token]
    problem = "" if cache.status == "ok" or "free" in cache.value else cache.value
    if constants.HF_HUB_OFFLINE:
        value = "HF_HUB_OFFLINE is set: only models in the cache are served"
        return [*checks, Check(MODELS, "hub", "ok", value)], problem or "HF_HUB_OFFLINE is set"
    if not network:
        return checks, problem
    try:
        response = httpx.get(f"{constants.ENDPOINT}/api/models?limit=1", timeout=timeout, follow_redirects=True)
        response.raise_for_status()
    except httpx.HTTPError as error:
        reason = f"{constants.ENDPOINT} does not answer: {str(error).partition(chr(10))[0] or type(error).__name__}"
        advice = "look at the network and its proxy, or set HF_ENDPOINT to a mirror"
        if os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy"):
            advice += " (HTTPS_PROXY is set)"
        return [*checks, Check(MODELS, "hub", "warning", reason, advice)], problem or reason
    return [*checks, Check(MODELS, "hub", "ok", f"{constants.ENDPOINT} answers")], problem


def data_check() -> Check:
    """The folder of `--data-dir`'s default."""
    given = os.environ.get("XDG_STATE_HOME", "")
    state = Path(given) if os.path.isabs(given) else Path("~/.local/state").expanduser()
    return folder_check(MODELS, "data", state / "tessera", "files and batches are lost at a restart: see --data-dir")
