"""`tessera pull`, `list`, `show` and `rm`: the models in the cache of the Hugging Face libraries.

Public: `commands.pull_command`, `list_command`, `show_command`, `rm_command`; `options`; `model_facts.read_facts`.
"""
