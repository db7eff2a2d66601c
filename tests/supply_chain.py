"""What the server is made of: locked with hashes, with licences that may be used, without known vulnerabilities.

`python -m tests.supply_chain` is part of `make check`. Licences are read from what is installed; vulnerabilities are
asked for by pip-audit, and where it or its database cannot be reached that is said, and is no failure.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import venv
from importlib.metadata import PackageNotFoundError, distribution
from types import ModuleType

from tests.support.paths import ROOT

LOCKS = ("requirements.lock", "requirements-dev.lock")
AUDIT_FOLDER = ROOT / ".venv-audit"
AUDIT = "pip-audit>=2.7,<3"
INSTALL_TIMEOUT, AUDIT_TIMEOUT = 120, 180  # seconds
# Of what is installed at run time. NVIDIA's packages may be used and redistributed under its own licence.
ALLOWED = re.compile(
    r"\b(MIT|BSD|0BSD|Apache|ISC|PSF|Python Software Foundation|MPL|Mozilla Public License 2\.0|Unlicense|Zlib)\b"
)
REFUSED = re.compile(r"\b(AGPL|GPL|Affero)\b(?!.*exception)")
UNNAMED = {"cuda-toolkit"}  # a package of requirements only
ALLOWED_TEXTS = ("LicenseRef-NVIDIA", "Other/Proprietary License")
NO_NETWORK = re.compile(
    r"ConnectionError|ConnectTimeout|Max retries|NameResolution|Temporary failure|ServiceError|HTTP"
)


def sbom() -> ModuleType:
    """The script that makes the image's bill of materials."""
    spec = importlib.util.spec_from_file_location("sbom", ROOT / "deploy" / "sbom.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def locked(lock: str) -> dict[str, tuple[str, list[str]]]:
    """Name -> version and hashes, of a lock file. Raises ValueError for a line that pins nothing."""
    found: dict[str, tuple[str, list[str]]] = {}
    for line in (ROOT / lock).read_text().replace("\\\n", " ").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if (match := re.match(r"([\w.-]+)(?:\[[\w,-]+\])?==([\w.+!-]+)", line)) is None:
            raise ValueError(f"{lock} pins nothing in: {line[:80]}")
        name, version = match[1].lower(), match[2]
        hashes = re.findall(r"--hash=sha256:([0-9a-f]{64})", line)
        found[f"{name}=={version}"] = version, hashes
    return found


def unhashed() -> list[str]:
    return [f"{lock}: {name}" for lock in LOCKS for name, (_, hashes) in locked(lock).items() if not hashes]


def licences_of(lock: str) -> dict[str, str]:
    """Installed packages of a lock file, and their licences."""
    module = sbom()
    found = {}
    for pinned in locked(lock):
        name = pinned.partition("==")[0]
        try:
            found[name] = "; ".join(module.licences(distribution(name)))
        except PackageNotFoundError:
            continue  # for another platform, or another Python
    return found


def is_allowed(name: str, licence: str) -> bool:
    if name in UNNAMED or name.startswith("nvidia-"):
        return True
    if REFUSED.search(licence):
        return False
    return bool(ALLOWED.search(licence)) or any(text in licence for text in ALLOWED_TEXTS)


def audit() -> tuple[bool, str]:
    """-> whether no vulnerability is known, and a sentence; true as well where that cannot be found out."""
    python = AUDIT_FOLDER / "bin" / "python"
    try:
        if not (AUDIT_FOLDER / "bin" / "pip-audit").exists():
            venv.create(AUDIT_FOLDER, with_pip=True)
            install = [str(python), "-m", "pip", "install", "--quiet", "--retries", "1", AUDIT]
            subprocess.run(install, check=True, capture_output=True, timeout=INSTALL_TIMEOUT)
        command = [str(python), "-m", "pip_audit", "--requirement", LOCKS[0], "--disable-pip", "--require-hashes"]
        done = subprocess.run(
            [*command, "--progress-spinner", "off"], cwd=ROOT, capture_output=True, text=True, timeout=AUDIT_TIMEOUT
        )
    except (OSError, subprocess.SubprocessError) as error:
        return True, f"not audited: pip-audit cannot be had here ({type(error).__name__})"
    if done.returncode == 0:
        return True, "pip-audit: no known vulnerabilities"
    if "Found " in done.stderr or "Name" in done.stdout:
        return False, f"pip-audit:\n{done.stdout}{done.stderr}"
    reason = NO_NETWORK.search(done.stderr)
    return True, f"not audited: the database cannot be asked ({reason[0] if reason else 'pip-audit failed'})"


def main() -> int:
    failures = [f"no hash: {one}" for one in unhashed()]
    licences = licences_of(LOCKS[0])
    for name, licence in sorted(licences.items()):
        if not is_allowed(name, licence):
            failures.append(f"licence: {name} has {licence or 'none'}")
    print(f"licences: {len(licences)} packages, {len(set(licences.values()))} kinds; -v lists them")
    if "-v" in sys.argv[1:]:
        for name, licence in sorted(licences.items()):
            print(f"  {name:<28}{licence}")
    is_well, sentence = audit()
    print(sentence)
    if not is_well:
        failures.append("vulnerabilities are known")
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
