"""A rollout's conversation in verifiers' graph."""

from types import SimpleNamespace

import verifiers.v1 as vf
from verifiers.v1 import graph
from verifiers.v1.configs.agent import WireAgentConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.trace import AgentInfo, Trace, TraceTask
from verifiers.v1.types import AssistantMessage, Response, TurnTokens, Usage


class Talk:
    """One rollout's conversation: `turn(prompt, reply)` commits a model call and returns the messages so far."""

    def __init__(self, renderer, tokenizer):
        self.renderer, self.tokenizer = renderer, tokenizer
        self.trace = Trace(
            task=TraceTask.model_construct(type="Toy", data=vf.TaskData(idx=3, prompt="?"), key="k", hash="h"),
            agent=AgentInfo.model_construct(
                config=WireAgentConfig.model_construct(), runtime=None, name="agent", trainable=True
            ),
        )
        self.sent = []
        """Prompt and completion of each call, as the model saw them."""

    def turn(self, messages, reply, *, logprobs=None):
        rendered = self.renderer.render([message_to_wire(m) for m in messages], add_generation_prompt=True)
        ids = [
            *self.tokenizer.encode(reply, add_special_tokens=False),
            self.tokenizer.convert_tokens_to_ids("<|im_end|>"),
        ]
        values = [-(len(self.sent) + 1 + i / 100) for i in range(len(ids))] if logprobs is None else logprobs
        turn = graph.prepare_turn(self.trace, messages)
        message = AssistantMessage(content=reply)
        turn.commit(
            Response.model_construct(
                id="",
                created=0,
                model="policy",
                message=message,
                finish_reason="stop",
                usage=Usage(prompt_tokens=len(rendered.token_ids), completion_tokens=len(ids)),
                tokens=TurnTokens.model_construct(
                    prompt_ids=rendered.token_ids,
                    completion_ids=ids,
                    completion_logprobs=values,
                    message_spans=rendered.message_token_spans(),
                    is_content=rendered.is_content,
                ),
            )
        )
        self.sent.append(SimpleNamespace(prompt=rendered.token_ids, completion=ids, logprobs=values))
        return [*messages, message]
