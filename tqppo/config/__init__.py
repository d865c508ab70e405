"""The config compiler: from presets, files, environment and `--set` to one frozen `Config`, or all its mistakes.

    from tqppo.config.compile import compile_config      # (preset, config_files, overrides, environ) -> Compilation
        .ok, .config (None when not ok), .diagnostics, .origins {key: (Origin, …)}, .name (of the preset, or file)
    from tqppo.config.diagnostics import render_text, render_json, render_github     # (diagnostics) -> str
    from tqppo.config.explain import explain, json_schema  # (compilation, key) -> Explanation (.text(), .as_dict())
    from tqppo.config.export import resolved_toml, origins_json                      # (compilation) -> str
    from tqppo.config.plan import make_plan              # (compilation) -> Plan (.text(formulas=False), .as_dict())
    from tqppo.config.presets import list_presets, find_preset, preset_header, diff_presets
    from tqppo.config.keys import all_keys, values_of    # completion: no pydantic, a few milliseconds
    from tqppo.config.probe import probe                 # (compilation) -> list[Diagnostic]; loads heavy things

None of it imports torch, ray or transformers (except inside `probe`), and importing these modules
does not import pydantic or tree-sitter before a config is compiled.
"""
