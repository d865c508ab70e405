"""The config compiler: from presets, files, environment and `--set` to one frozen `Config`, or all its mistakes.

Nothing here imports torch, ray or transformers, and importing these modules does not import pydantic or tree-sitter
before a config is compiled.
"""
