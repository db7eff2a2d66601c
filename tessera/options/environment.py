"""Options from environment variables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tessera.options.declaration import DeclaredOption
from tessera.options.errors import OptionError
from tessera.options.suggestions import closest

LIKENESS = 0.75
# Kubernetes sets TESSERA_PORT=tcp://10.0.0.1:8000 in every pod beside a service named tessera.
KUBERNETES_LINK = re.compile(r"(tcp|udp|sctp)://")


def variable(prefix: str, name: str) -> str:
    """max-num-seqs -> TESSERA_MAX_NUM_SEQS."""
    return prefix + name.replace("-", "_").upper()


def read_environment(
    prefix: str, environment: Mapping[str, str], options: Sequence[DeclaredOption], others: Sequence[str] = ()
) -> dict[str, Any]:
    """Values by field of the options that variables set. An empty variable counts as unset.

    Args:
        others: variables with this prefix that are no options; one that ends with _ stands for all that begin so.

    Raises:
        OptionError: a variable has an unusable value, or is an option's mistyped.
    """
    known = {variable(prefix, name): declared for declared in options for name in declared.names}
    values: dict[str, Any] = {}
    for name, padded in environment.items():
        text = padded.strip()
        if not name.startswith(prefix) or not text or KUBERNETES_LINK.match(text):
            continue
        declared = known.get(name)
        if declared is None:
            _check_unknown(prefix, name, known, others)
            continue
        try:
            values[declared.field] = declared.parse_text(text)
        except OptionError as error:
            raise OptionError(f"{name}: {error}") from None
    return values


def _check_unknown(prefix: str, unknown: str, known: Mapping[str, DeclaredOption], others: Sequence[str]) -> None:
    if any(unknown == other or (other.endswith("_") and unknown.startswith(other)) for other in others):
        return
    opposite = known.get(prefix + unknown.removeprefix(prefix + "NO_"))
    if opposite is not None and opposite.rule.kind == "switch":
        raise OptionError(f"{unknown} is not an option: set {variable(prefix, opposite.name)}=false")
    names = [name.removeprefix(prefix) for name in (*known, *others) if not name.endswith("_")]
    match = closest(unknown.removeprefix(prefix), names, LIKENESS)
    if match is not None:
        raise OptionError(f"{unknown} is not an option; did you mean {prefix}{match}?")
