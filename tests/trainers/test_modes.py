"""The modes that come with tqppo name classes that exist, and build from stages alone."""

from __future__ import annotations

from tqppo import dataflow, plugins
from tqppo.trainers import grpo, ppo


def test_ppo_and_grpo_are_the_classes_that_the_table_names() -> None:
    assert plugins.import_object(dataflow.MODES["ppo"].trainer) is ppo.PpoTrainer
    assert plugins.import_object(dataflow.MODES["grpo"].trainer) is grpo.GrpoTrainer
