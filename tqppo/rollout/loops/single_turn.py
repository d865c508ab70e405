"""The agent loop for questions with one answer: the prompt, then one completion."""

from __future__ import annotations

from tqppo.data.prompts import Prompt
from tqppo.rollout.loops.base import AgentLoop, Session, Trajectory


class SingleTurn(AgentLoop):
    """Samples one completion per session and returns it as the session's only trajectory."""

    async def run(self, prompt: Prompt, llm: Session) -> list[Trajectory]:
        completion = await llm.generate(prompt.tokens)
        return [
            Trajectory(
                prompt_tokens=prompt.tokens,
                response_tokens=completion.tokens,
                response_mask=[True] * len(completion.tokens),
                logprobs=completion.logprobs,
                finish=completion.finish_reason,
                weight_version=completion.weight_version,
            )
        ]
