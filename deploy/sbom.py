"""The software bill of materials of a Python environment, in CycloneDX's JSON: `python deploy/sbom.py > FILE`.

The image has its own at /opt/tessera/sbom.cdx.json. Needs nothing but Python, and gives the same bytes for the same
environment.
"""

from __future__ import annotations

import json
import platform
import re
import uuid
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from typing import Any

PRODUCT = "tessera-llm"
SPECIFICATION = "1.5"


def normalised(name: str) -> str:
    """As package URLs have it, by PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def licences(distribution: Distribution) -> list[str]:
    """SPDX expression, else classifiers, else the free text that a package gives; empty where it gives none."""
    metadata = distribution.metadata
    if expression := metadata.get("License-Expression"):
        return [expression]
    classifiers = [line.rpartition(" :: ")[2] for line in metadata.get_all("Classifier") or () if "License ::" in line]
    if classifiers:
        return classifiers
    text = (metadata.get("License") or "").strip().splitlines()
    return text[:1]


def component(distribution: Distribution) -> dict[str, Any]:
    name, version = normalised(distribution.metadata["Name"]), distribution.version
    found = licences(distribution)
    return {
        "type": "library",
        "bom-ref": f"pkg:pypi/{name}@{version}",
        "name": name,
        "version": version,
        "purl": f"pkg:pypi/{name}@{version}",
        **({"licenses": [{"license": {"name": text}} for text in found]} if found else {}),
    }


def required(distribution: Distribution, installed: set[str]) -> Iterator[str]:
    """Names of what it requires, extras and other platforms left out."""
    for requirement in distribution.requires or ():
        name = normalised(re.match(r"[\w.-]+", requirement)[0])  # type: ignore[index]
        if "extra ==" not in requirement and name in installed:
            yield name


def bill() -> dict[str, Any]:
    """All that is installed beside this interpreter."""
    found = {normalised(one.metadata["Name"]): one for one in distributions()}
    components = {name: component(one) for name, one in sorted(found.items())}
    product = components.get(PRODUCT, {"type": "application", "name": PRODUCT, "bom-ref": PRODUCT})
    parts = [one for name, one in components.items() if name != PRODUCT]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": SPECIFICATION,
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(parts))}",
        "version": 1,
        "metadata": {
            "component": {**product, "type": "application"},
            "properties": [{"name": "python", "value": platform.python_version()}],
        },
        "components": parts,
        "dependencies": [
            {
                "ref": components[name]["bom-ref"],
                "dependsOn": sorted(components[other]["bom-ref"] for other in set(required(one, set(found)))),
            }
            for name, one in sorted(found.items())
        ],
    }


if __name__ == "__main__":
    print(json.dumps(bill(), indent=1))
