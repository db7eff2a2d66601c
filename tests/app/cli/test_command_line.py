"""The command line as such: what is suggested for mistyped words, help, and completion by shells."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tessera.app.cli.command import main
from tessera.app.cli.commands import COMMANDS
from tessera.app.cli.completion.scripts import CompletedCommand, completion_script
from tessera.options.command_options import CommandOptions

ALL = [CompletedCommand(command.name, command.help, command.options) for command in COMMANDS.values()]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["serv"],
            "tessera: invalid choice: 'serv' (choose from serve, chat, pull, list, show, rm, bench,",
        ),
        (["benhc"], "did you mean bench?"),
        (["org/model"], "tessera: 'org/model' is no command; to serve a model: tessera serve org/model"),
        (
            ["--port", "80", "serve"],
            "--port is an option of tessera serve and tessera bench and tessera doctor",
        ),
        (["--prot", "80", "serve"], "tessera: a command goes before its options: tessera serve --prot"),
        (["serve", "--prot", "80"], "tessera serve: unrecognized arguments: --prot; did you mean --port?"),
        (["serve", "--num-prompts", "3"], "--num-prompts is an option of tessera bench (see tessera serve --help)"),
        (["chat", "--max-num-seqs=3"], "--max-num-seqs is an option of tessera serve (see tessera chat --help)"),
        (["completion", "bsh"], "invalid choice: 'bsh' (choose from bash, zsh, fish); did you mean bash?"),
        (["pull"], "tessera: pull: name a model"),
        (["rm", "--yes"], "tessera: rm: name a model"),
    ],
)
def test_a_mistyped_word_is_one_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else -1
    assert code == 2
    complaint = capsys.readouterr().err
    assert sentence in complaint
    assert complaint.count("\n") == 1


@pytest.mark.parametrize("words", [["help", "chat"], ["chat", "--help"]])
def test_help_of_a_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: tessera chat [MODEL] [options]\n")


def test_every_command_is_listed_on_a_line_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = [line.split()[0] for line in lines if line.startswith("    ") and line[4:5] != " "]
    assert listed == list(COMMANDS)


def completed(script: Path, line: str) -> list[str]:
    """What bash offers at the end of a line."""
    words = line.split(" ")
    quoted = " ".join(f"'{word}'" for word in words)
    program = (
        f"tessera() {{ echo org/one; echo org/two; }}; source {script}\nCOMP_WORDS=({quoted}); "
        f"COMP_CWORD={len(words) - 1}; _tessera; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=10, cwd=script.parent)
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_completes_commands_options_values_files_and_models(tmp_path: Path) -> None:
    script = tmp_path / "completion.bash"
    script.write_text(completion_script("bash", ALL).replace("command tessera", "tessera"))
    assert completed(script, "tessera se") == ["serve"]
    assert set(COMMANDS) <= set(completed(script, "tessera "))
    assert completed(script, "tessera serve --max-num-s") == ["--max-num-seqs"]
    assert completed(script, "tessera serve --dev") == ["--device"]
    assert completed(script, "tessera serve --device c") == ["cuda", "cpu"]
    assert completed(script, "tessera serve --device = c") == ["cuda", "cpu"]
    assert completed(script, "tessera serve --port ") == []
    assert completed(script, "tessera serve --config compl") == ["completion.bash"]
    assert completed(script, "tessera serve --no-prefix") == ["--no-prefix-caching"]
    assert completed(script, "tessera show org/t") == ["org/two"]
    assert completed(script, "tessera serve org/o") == ["org/one"]
    assert completed(script, "tessera completion z") == ["zsh"]
    assert completed(script, "tessera --verbose bench --back") == ["--backend"]


@pytest.mark.parametrize(("shell", "dash"), [("bash", "--"), ("zsh", "--"), ("fish", "-l ")])
def test_every_option_of_every_command_is_in_the_script(
    shell: str, dash: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for command in COMMANDS.values():
        assert command.name in script
        for declared in command.options.options:
            if not declared.option.positional and declared.default is not True:
                assert f"{dash}{declared.name}" in script


def test_the_shell_is_that_of_the_user(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SHELL", "/usr/bin/fish")
    assert main(["completion"]) == 0
    assert "complete -c tessera" in capsys.readouterr().out
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert main(["completion"]) == 2
    assert "name the shell: bash, zsh, fish" in capsys.readouterr().err


def test_a_command_without_variables_has_no_config_file() -> None:
    options: CommandOptions = COMMANDS["rm"].options
    assert "config" not in {declared.name for declared in options.options}
    assert {options.variable(declared) for declared in options.options} == {""}
