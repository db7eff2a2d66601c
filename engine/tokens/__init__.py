"""Tokenizers of model folders, from tokenizer.json or the older files that it is made of.

Public: `folder.read_folder_tokenizer`, and `folder.tokenizer_json` for what wants the file's text, which takes GGUF files
too; `special.special_tokens_of` for the tokens that tokenizer_config.json names.
"""
