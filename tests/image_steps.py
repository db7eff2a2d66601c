"""The Dockerfile's steps without Docker: `python -m tests.image_steps [--python PYTHON]` (`make image-check`).

Carries out each instruction in an empty folder that stands for the image's root, then starts the image's entry point
as the image's user with nothing but the image's environment, asks it something, and says how large it all is.
Downloads what `pip install` downloads. As root it runs as the user of the image; the base image's Python is the
one given.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.paths import ROOT

DEADLINE = 120.0  # seconds for the server to start
HOST_FOLDERS = ("bin", "usr", "etc", "tmp")  # of the machine itself, when an instruction names them
QUESTION = {"model": "tessera-builtin", "messages": [{"role": "user", "content": "What is 357 + 468?"}]}


@dataclass
class Image:
    """What the instructions so far have made of `root`."""

    root: Path
    workdir: str = "/"
    user: str = "0:0"
    environment: dict[str, str] = field(default_factory=dict)
    health: list[str] = field(default_factory=list)
    entry_point: list[str] = field(default_factory=list)

    def inside(self, text: str) -> str:
        """Absolute paths of the image as paths of this machine."""
        hosts = "|".join(HOST_FOLDERS)
        return re.sub(rf"(?<![\w./:-])/(?!(?:{hosts})\b)(?=\w)", f"{self.root}/", text)


def instructions(text: str) -> list[tuple[str, str]]:
    """(name, arguments) in their order, continued lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines))
    return [(line.split()[0], line.split(None, 1)[1]) for line in joined.splitlines()]


def ignored(path: Path, patterns: list[str]) -> bool:
    """Whether .dockerignore keeps a path of the project out; the last pattern that matches it or a parent decides."""
    found = False
    names = [str(path), *(str(parent) for parent in path.parents if parent != Path("."))]
    for pattern in patterns:
        keeps = pattern.startswith("!")
        bare = pattern.lstrip("!")
        anywhere = bare.startswith("**/") and any(fnmatch.fnmatch(part, bare[3:]) for part in path.parts)
        if anywhere or any(fnmatch.fnmatch(name, bare) for name in names):
            found = not keeps
    return found


def copy(sources: list[str], target: Path, patterns: list[str]) -> None:
    """As COPY does it: a single file gets the name `target`, unless that is a folder."""
    renames = len(sources) == 1 and (ROOT / sources[0]).is_file() and not target.is_dir()
    for source in sources:
        whole = ROOT / source
        for file in sorted(whole.rglob("*")) if whole.is_dir() else [whole]:
            if (file.is_symlink() or file.is_file()) and not ignored(file.relative_to(ROOT), patterns):
                name = "" if renames else file.relative_to(whole) if whole.is_dir() else file.name
                place = target / name
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, place, follow_symlinks=False)


def carry_out(image: Image, tools: Path, patterns: list[str]) -> None:
    """All instructions of the Dockerfile. Raises CalledProcessError where a step fails."""
    steps = instructions((ROOT / "Dockerfile").read_text())
    for number, (name, arguments) in enumerate(steps):
        print(f"{name} {arguments}", flush=True)
        match name:
            case "ARG" | "EXPOSE" | "VOLUME":
                pass
            case "FROM":
                _begin_stage(image, steps[number:])
            case "WORKDIR":
                image.workdir = arguments
                Path(image.inside(arguments)).mkdir(parents=True, exist_ok=True)
            case "COPY" if not arguments.startswith("--from="):
                *sources, target = arguments.split()
                copy(sources, Path(image.inside(image.workdir), target), patterns)
            case "COPY":
                _, source, target = arguments.split()
                assert source == target, "what a later stage copies stays where it is, or its scripts break"
            case "RUN":
                path = f"{tools}:{os.environ['PATH']}"
                command = ["sh", "-euc", image.inside(arguments)]
                subprocess.run(command, cwd=image.inside(image.workdir), env={**os.environ, "PATH": path}, check=True)
            case "USER":
                image.user = arguments
            case "ENV":
                for word in shlex.split(arguments):
                    variable, value = word.split("=", 1)
                    image.environment[variable] = image.inside(value)
            case "HEALTHCHECK":
                image.health = json.loads(arguments.split("CMD ", 1)[1])
            case "ENTRYPOINT":
                image.entry_point = json.loads(arguments)
            case _:
                raise SystemExit(f"the Dockerfile's {name} is not known here")


def _begin_stage(image: Image, rest: list[tuple[str, str]]) -> None:
    """An empty root, but for what this stage is going to copy from the one before."""
    last = [name for name, _ in rest].index("FROM", 1) if any(name == "FROM" for name, _ in rest[1:]) else len(rest)
    words = [arguments.split() for name, arguments in rest[:last] if name == "COPY" and "--from=" in arguments]
    kept = [Path(image.inside(source)) for _, source, _ in words]
    for path in sorted(image.root.rglob("*"), reverse=True):
        if any(path == keep or keep in path.parents or path in keep.parents for keep in kept):
            continue
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()
    image.workdir = "/"


def folder_size(folder: Path) -> int:
    """Bytes of all files, each counted once."""
    return sum(
        {
            (file.lstat().st_dev, file.lstat().st_ino): file.lstat().st_size
            for file in folder.rglob("*")
            if file.is_symlink() or file.is_file()
        }.values()
    )


def report_size(image: Image) -> None:
    packages = next(image.root.glob("opt/*/lib/python*/site-packages"))
    sizes = sorted(((folder_size(path), path.name) for path in packages.iterdir() if path.is_dir()), reverse=True)
    for size, name in sizes[:8]:
        print(f"{size / 1e6:8.1f} MB  {name}")
    print(f"{folder_size(image.root) / 1e6:8.1f} MB  in all, besides the base image")


def try_out(image: Image, *, as_user: bool) -> None:
    """Start the entry point, ask it, and let it end."""
    environment = {**image.environment, "PATH": image.environment["PATH"].replace("$PATH", os.environ["PATH"])}
    uid, gid = map(int, image.user.split(":"))
    user = {"user": uid, "group": gid, "extra_groups": []} if as_user else {}
    cwd = image.inside(image.workdir)
    before = {path: path.lstat().st_mtime_ns for path in (image.root / "opt").rglob("*")}
    program = shutil.which(image.entry_point[0], path=environment["PATH"])
    assert program is not None
    log = image.root.parent / "log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            [program, *image.entry_point[1:], "--device", "cpu", "--host", "127.0.0.1", "--port", "0"],
            cwd=cwd,
            env=environment,
            stdout=out,
            stderr=out,
            **user,  # type: ignore[call-overload]
        )
    try:
        port = _port(server, log)
        health = [word.replace(":8000", f":{port}") for word in image.health]
        subprocess.run(health, env=environment, cwd=cwd, check=True, timeout=10)
        url = f"http://127.0.0.1:{port}"
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(QUESTION).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            said = json.load(answer)["choices"][0]["message"]["content"]
        assert said == "357 + 468 = 825", said
        with urllib.request.urlopen(urllib.request.Request(url, headers={"accept": "text/html"}), timeout=10) as page:
            assert b"<title>Tessera</title>" in page.read()
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.wait()
    changed = [path for path in (image.root / "opt").rglob("*") if path.lstat().st_mtime_ns != before.get(path)]
    assert not changed, f"the server wrote where its file system is read-only: {changed[:3]}"
    print(
        f"served as uid {uid if as_user else os.getuid()}, healthy, answered {said!r}, wrote nothing to its own files"
    )


def _port(server: subprocess.Popen[bytes], log: Path) -> int:
    end = time.monotonic() + DEADLINE
    pause = threading.Event()
    while not (found := re.search(r"Ready on http://[^:]+:(\d+)", log.read_text())):
        assert server.poll() is None, f"the server ended:\n{log.read_text()}"
        assert time.monotonic() < end, f"the server does not start:\n{log.read_text()}"
        pause.wait(0.05)
    return int(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=shutil.which("python3", path="/usr/local/bin:/usr/bin") or sys.executable)
    python = Path(parser.parse_args().python)
    patterns = [line.strip() for line in (ROOT / ".dockerignore").read_text().splitlines() if line.strip()]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # the image's user passes through
        tools = Path(folder, "tools")
        tools.mkdir()
        (tools / "python").write_text(f'#!/bin/sh\nexec {python} "$@"\n')
        (tools / "pip").write_text(f'#!/bin/sh\nexec {sys.executable} -m pip "$@"\n')
        for tool in tools.iterdir():
            tool.chmod(0o755)
        image = Image(Path(folder, "root"))
        image.root.mkdir()
        carry_out(image, tools, patterns)
        report_size(image)
        try_out(image, as_user=os.getuid() == 0)


if __name__ == "__main__":
    main()
