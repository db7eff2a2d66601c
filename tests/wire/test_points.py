"""No point of the list is without a test of its name, and no test claims one that is not there."""

from __future__ import annotations

import ast
import re

import pytest

from tests.support.paths import TESTS
from tests.wire.points import ENDPOINTS, PARAMETERS, POINTS


@pytest.fixture(scope="module")
def names() -> set[str]:
    """Every test function of the project that is named after a point."""
    found = set()
    for path in TESTS.rglob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_wire_"):
                found.add(node.name)
    return found


def test_every_numbered_point_has_a_test(names: set[str]) -> None:
    numbered = {int(found[1]) for name in names if (found := re.match(r"test_wire_(\d+)_", name))}
    assert numbered == set(POINTS) == set(range(1, len(POINTS) + 1))


@pytest.mark.parametrize(("kind", "expected"), [("parameter", PARAMETERS), ("endpoint", ENDPOINTS)])
def test_every_parameter_and_endpoint_has_a_test(names: set[str], kind: str, expected: tuple[str, ...]) -> None:
    start = f"test_wire_{kind}_"
    tested = {name.removeprefix(start) for name in names if name.startswith(start)}
    assert tested == set(expected)


def test_every_other_name_is_of_the_metrics(names: set[str]) -> None:
    kinds = {re.sub(r"^test_wire_(\d+|[a-z]+)_.*", r"\1", name) for name in names}
    assert {kind for kind in kinds if not kind.isdigit()} == {"parameter", "endpoint", "metrics"}
