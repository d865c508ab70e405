"""Keys for completion, read without pydantic."""

from __future__ import annotations

from tqppo.config.schema import settings
from tqppo.config.show.keys import all_keys, values_of


def test_completion_reads_the_same_keys_as_pydantic() -> None:
    keys = {key.name: key for key in all_keys()}
    assert list(keys) == list(settings())
    for name, setting in settings().items():
        assert keys[name].doc == setting.doc
        choices = ["true", "false"] if setting.choices == (True, False) else [str(each) for each in setting.choices]
        assert [value.strip('[]"') for value in keys[name].values] == choices


def test_completion_offers_values_after_the_equals_sign() -> None:
    assert values_of("mode") == ("ppo", "grpo", "distill")
    assert values_of("run.deterministic") == ("true", "false")
    assert values_of("rollout.agent") == ("single_turn", "tools", "rewrite", "environment")
    assert set(values_of("rollout.backend")) >= {"embedded", "vllm", "sglang"}
    assert values_of("actor.lr") == values_of("nonsense") == ()


def test_completion_offers_tasks_where_a_path_may_be_one() -> None:
    assert values_of("teachers.math.path")[:2] == ("student", "task:sort")
    assert "task:sort" in values_of("data.train")
    assert set(values_of("distillation.loss")) >= {"k3", "forward_kl_topk", "reverse_kl"}
