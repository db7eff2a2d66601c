"""The documentation page of all options. `python -m tessera.app.cli.reference` prints it."""

from __future__ import annotations

from tessera.app.cli.commands import COMMANDS, Command
from tessera.options.reference import render_reference

INTRODUCTION = """\
# Options

Every option can be given in three places. The first that has it decides:

1. the command line: `--max-num-seqs 64`
2. the environment: `TESSERA_MAX_NUM_SEQS=64`
3. the file that `--config FILE` or `TESSERA_CONFIG` names: `max-num-seqs: 64`

What none of them has takes its default. Options that may be given several times are not merged: the list of the first
place counts.

- **Command line.** Switches have an opposite: `--log-prompts` and `--no-log-prompts`, `--no-ui` and `--ui`.
- **Environment.** A switch is `true` or `false`; several values are separated by commas; an empty variable counts as
  unset. So do values such as `tcp://10.0.0.1:8000`, which Kubernetes sets beside a service named `tessera`
  (`TESSERA_PORT`). Variables of `tessera bench` begin with `TESSERA_BENCH_`, those of `tessera chat` with
  `TESSERA_CHAT_`, those of `tessera keys` with `TESSERA_KEYS_`, those of `tessera train` with `TESSERA_TRAIN_`; the
  other commands take the command line alone. A variable that looks like a mistyped option is an error.
- **File.** YAML with one option a line, named as on the command line without the dashes. A switch is `true` or
  `false`, several values are a list, `null` means the default. An unknown key is an error. Paths are relative to the
  folder in which the command runs.

```yaml
model: Qwen/Qwen3-0.6B
host: 0.0.0.0
port: 8123
max-num-seqs: 64
prefix-caching: false
cors-origin:
  - https://chat.example.org
  - https://admin.example.org
api-key-file: /run/secrets/tessera-keys
```

Keys are best kept out of the command line, where other users of the machine see them: use `--api-key-file` or
`TESSERA_API_KEY`. A key or key file given in one place replaces those of the later places.
"""

OTHER_VARIABLES = """\
## Other environment variables

| variable | meaning |
|---|---|
| `TESSERA_CACHE_DIR` | folder of compiled kernels; default: `tessera` in `$XDG_CACHE_HOME` or `~/.cache` |
| `HF_HOME` | folder of downloaded models; default: `~/.cache/huggingface` |
| `HF_TOKEN` | token for private and gated models |
| `HF_ENDPOINT` | address of the model hub |
| `HF_HUB_OFFLINE` | 1: never ask the hub, take what is downloaded |
| `OPENAI_API_KEY` | key that `tessera bench` and `tessera chat` send without `--api-key` |
| `NO_COLOR` | no colours on the terminal |
"""


def render_page() -> str:
    """The page in Markdown."""
    return "\n".join(
        [
            INTRODUCTION,
            *map(_command, COMMANDS.values()),
            OTHER_VARIABLES,
        ]
    ).rstrip("\n")


def _command(command: Command) -> str:
    usage = f"```sh\ntessera {command.name} {command.usage}\n```"
    example = f"Example: `{command.example}`"
    return (
        f"## tessera {command.name}\n\n{command.description}\n\n{usage}\n\n{example}\n\n"
        f"{render_reference(command.options)}\n"
    )


if __name__ == "__main__":
    print(render_page())
