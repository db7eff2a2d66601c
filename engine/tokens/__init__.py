"""Tokenizers of model folders, from tokenizer.json or the older files that it is made of.

Public: `folder.read_folder_tokenizer`; `folder.tokenizer_json` for the text that the file has or would have, of GGUF
files too; `special.special_tokens_of` for the tokens that tokenizer_config.json names.
"""
