"""A rollout's conversation in verifiers' graph, rendered and committed turn by turn as verifiers' client does."""

from types import SimpleNamespace

import verifiers.v1 as vf
from verifiers.v1 import graph
from verifiers.v1.clients.train import response_from_generate
from verifiers.v1.configs.agent import WireAgentConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.trace import AgentInfo, Trace, TraceTask

from prl.envs.turn import parse
from prl.rollouts.rollout import Rollout


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

    def turn(self, messages, reply, *, logprobs=None, tools=None):
        turn = graph.prepare_turn(self.trace, messages)
        previous, tail = turn.previous_renderer_token_ids(), [message_to_wire(message) for message in turn.tail]
        rendered = previous and tail and self.renderer.bridge_to_next_turn(*previous, tail)
        bridged = turn if rendered else None
        wire = [message_to_wire(message) for message in messages]
        rendered = rendered or self.renderer.render(wire, add_generation_prompt=True)
        ids = [*self.encode(reply), self.tokenizer.convert_tokens_to_ids("<|im_end|>")]
        values = [-(len(self.sent) + 1 + i / 100) for i in range(len(ids))] if logprobs is None else logprobs
        result = {
            "prompt_ids": rendered.token_ids,
            "prompt_attribution": rendered,
            "finish_reason": "stop",
            "completion_ids": ids,
            "completion_logprobs": values,
        }
        response = response_from_generate(result, "policy", bridged)
        response.message = parse(ids, self.renderer, tools, prompt_ids=rendered.token_ids)
        turn.commit(response)
        self.sent.append(SimpleNamespace(prompt=rendered.token_ids, completion=ids, logprobs=values))
        return [*messages, response.message]

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False)

    def rollout(self, reward=0.0):
        self.trace.record_reward("answer", reward)
        rollout = Rollout(self.trace, env_name="toy", group_id=0, start_version=0, temperature=1.0)
        rollout.attach_samples()
        return rollout

    def spans(self, sample):
        """Each run of tokens of one weight in `ce_weights`: that weight and the text. What weighs 0.0 is left out."""
        runs, last = [], 0.0
        for token, weight in zip(sample.token_ids, sample.ce_weights or [0.0] * len(sample.token_ids), strict=True):
            if weight and weight == last:
                runs[-1][1].append(token)
            elif weight:
                runs.append((weight, [token]))
            last = weight
        return [(weight, self.tokenizer.decode(tokens)) for weight, tokens in runs]
