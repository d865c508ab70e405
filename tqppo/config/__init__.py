"""Compiles presets, files, environment and `--set` arguments into one frozen `Config`, or reports all mistakes.

Nothing here imports torch, ray or transformers. `show/keys.py` and `read/presets.py`, which Tab needs, do not import
pydantic or tree-sitter either.
"""
