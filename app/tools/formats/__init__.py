"""The formats in which families of models write calls: one file each, with its parser and the grammar of its calls.

Public: `registry.choose_format`.
"""
