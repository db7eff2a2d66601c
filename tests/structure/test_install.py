"""The wheel: it installs one name, `tessera`, and lives beside another distribution's package `app`."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the wheel is installed in."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], cwd=ROOT, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def run(code: list[str], path: list[Path], cwd: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run([sys.executable, *code], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_installs_one_name_and_everything_that_serving_needs(site: Path) -> None:
    assert {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")} == {"tessera"}
    files = ("app/ops/ui/index.html", "app/ops/ui/markdown/block_parser.js", "engine/builtin/model.safetensors")
    for file in (*files, "cuda_src/include/common.cuh"):
        assert (site / "tessera" / file).is_file()
    assert not any(path.is_symlink() for path in (site / "tessera").rglob("*"))


def test_another_package_named_app_lives_beside_it(site: Path, tmp_path: Path) -> None:
    for name in ("app", "engine", "loadtest", "cuda_src"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("MINE = True\n")
    code = (
        "import app, engine, loadtest, cuda_src; assert app.MINE and engine.MINE and loadtest.MINE and cuda_src.MINE\n"
        "import tessera.app.cli.command, tessera.engine.ipc.process, tessera.loadtest.bench; print(tessera.__file__)"
    )
    assert run(["-c", code], [tmp_path, site], tmp_path).strip() == str(site / "tessera" / "__init__.py")
    assert "serve" in run(["-m", "tessera", "--help"], [tmp_path, site], tmp_path)
