"""`config explain` and the JSON Schema."""

from __future__ import annotations

import json

import pytest

from tqppo.config.compile import compile_config
from tqppo.config.schema import settings
from tqppo.config.sections import Config
from tqppo.config.show.explain import explain, explain_section, json_schema
from tqppo.errors import UsageError

DISTILL = compile_config(None, [], ["mode=distill", "teachers.t.path=t"], {})


@pytest.mark.parametrize("key", settings())
def test_every_setting_is_explained_with_its_documentation(key: str) -> None:
    explanation = explain(DISTILL, key.replace("*", "t"))
    setting = settings()[key]
    assert setting.doc in explanation.text()
    assert setting.allowed in explanation.text()
    assert explanation.environment == "TQPPO__" + key.replace("*", "t").replace(".", "__").upper()


@pytest.mark.parametrize("section", [name for name in Config.model_fields if name != "mode"])
def test_a_section_is_explained_by_all_its_settings(section: str) -> None:
    listed = [each.key for each in explain_section(section)]
    assert listed == [key for key in settings() if key.startswith(f"{section}.")]
    assert listed


def test_an_unknown_key_names_the_nearest_ones() -> None:
    with pytest.raises(UsageError, match=r"Did you mean actor\.lr"):
        explain(DISTILL, "actor.rl")


def test_schema_documents_every_key_and_forbids_others() -> None:
    schema = json_schema()
    actor = schema["$defs"]["ActorSection"]
    assert actor["additionalProperties"] is False
    assert actor["properties"]["lr"]["description"] == "Learning rate."
    assert "extends" in schema["properties"]
    assert json.loads(json.dumps(schema)) == schema
