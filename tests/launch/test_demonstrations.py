"""The tasks' demonstrations as the source of an env's rollouts: refused before anything starts, or played; and what a
frozen source is asked with."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from prepared_run import prepared_run

from prl.base.errors import ConfigError
from prl.config.compose import compose
from prl.engines.chat import ChatSource, Demonstrations
from prl.engines.frozen import FrozenPool
from prl.launch.builder import Services, assemble
from prl.rollouts.pictures import PictureStore
from prl.transport.files import FileTransport

SMALL = ["run.name=x", "engine.device=cpu", "trainer.device=cpu", "orchestrator.eval.every=null"]
DEMONSTRATED = ["algo=sft", "algo.sampling.source=demonstrations", "orchestrator.group_size=1"]


def demonstrated(*overrides):
    return prepared_run(compose([*SMALL, *overrides]))


@pytest.fixture
def env_of(tmp_path, renderer):
    """`env_of(*overrides)`: the env `math` of an assembled run."""

    def make(*overrides, pictures=None):
        run = replace(demonstrated("envs.math.args.num_tasks=4", *overrides), pictures=pictures)
        services = Services(policy=None, hosted={}, teachers=[])
        return run, assemble(run, services, FileTransport(tmp_path)).envs[0]

    return make


def test_a_conversation_for_a_single_turn_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    talk = '[{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]'
    path.write_text(f'{{"prompt": "p", "answer": "a", "talk": {talk}}}\n')
    args = [f"envs.jsonl.args.{each}" for each in (f"path={path}", "demonstration_key=talk")]
    with pytest.raises(ConfigError, match="has 2 replies, and the env asks for one"):
        demonstrated(*DEMONSTRATED, "env=jsonl", *args, "envs.jsonl.eval_args=null")


ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}


async def test_conversation_with_tools_is_imitated_whole_and_not_evaluated(tmp_path, tokenizer):
    """The prompt declares the row's tools; the call and the reply after it are trained; nothing is held out."""
    path = tmp_path / "chat.jsonl"
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 7}}}
    talk = [
        {"role": "user", "content": "7+1="},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "8"},
        {"role": "assistant", "content": "It is 8."},
    ]
    path.write_text(json.dumps({"messages": talk, "tools": [ADD]}) + "\n")
    options = ["env=jsonl", f"envs.jsonl.args.path={path}", "envs.jsonl.args.train_turns=all"]
    run = prepared_run(compose([*SMALL[:-1], *DEMONSTRATED, *options]))
    env = assemble(run, Services(None, {}, []), FileTransport(tmp_path)).envs[0]
    assert env.environment.eval_tasks == [] and len(env.environment.tasks) == 2
    await env.setup()
    trained = {}
    for task in sorted(env.environment.tasks, key=lambda task: len(task.data.prompt)):
        (rollout,) = await env.environment.play(task, 1, env.sampler, group_id=0)
        assert rollout.error is None and rollout.reward == 0.0
        await env.algorithm.finalize_rollout(rollout)
        await env.algorithm.finalize_group([rollout])
        (sample,) = rollout.samples
        assert '"description": "Adds."' in tokenizer.decode(sample.token_ids)
        weights = zip(sample.token_ids, sample.ce_weights, strict=True)
        trained[len(task.data.prompt)] = tokenizer.decode([token for token, weight in weights if weight])
    assert '{"name": "add", "arguments": {"a": 7}}' in trained[1] and trained[1].endswith("<|im_end|>")
    assert trained[3].endswith("It is 8.<|im_end|>")


def test_the_key_of_demonstrations_is_refused_without_them():
    with pytest.raises(ConfigError, match=r"algo\.sampling\.demo_key=answer: only .*source=demonstrations"):
        demonstrated("algo=sft", "algo.sampling.demo_key=answer")


async def test_demonstration_rollout_is_its_text_without_version(env_of, tokenizer):
    _, env = env_of(*DEMONSTRATED, "algo.sampling.demo_key=answer")
    assert isinstance(env.sampler.pool, Demonstrations) and env.algorithm.pools == []
    task = env.environment.tasks[0]
    await env.setup()
    (rollout,) = await env.environment.play(task, 1, env.sampler, group_id=0)
    assert rollout.error is None and rollout.reward == 1.0 and not rollout.live
    await env.algorithm.finalize_rollout(rollout)
    await env.algorithm.finalize_group([rollout])
    (sample,) = rollout.samples
    trained = [token for token, weight in zip(sample.token_ids, sample.ce_weights, strict=True) if weight]
    assert tokenizer.decode(trained) == f"<think>\n\n</think>\n\n{task.data.answer}<|im_end|>"


@pytest.mark.parametrize(("shared", "kind"), [(True, FrozenPool), (False, ChatSource), (None, ChatSource)])
async def test_frozen_source_of_equal_tokenizer_is_asked_by_tokens(env_of, server, caplog, shared, kind):
    run, env = env_of(
        "algo=sft", "teacher=endpoint", "teacher.name=large", f"teacher.base_url={server.url}/v1", "env=math"
    )
    server.replies["/v1/models"] = {"data": [{"id": "large"}]}
    if shared is not None:
        ids = run.probe.token_ids if shared else [1, 2]
        server.replies["/v1/completions"] = {"choices": [{"index": 0, "token_ids": [3], "prompt_token_ids": ids}]}
    with caplog.at_level("INFO"):
        await env.setup()
    assert type(env.sampler.pool) is kind
    assert ("by token ids" if shared else "by chat messages") in caplog.text
    await env.algorithm.close()


async def test_a_source_is_shown_pictures_by_messages(env_of, server, monkeypatch, tmp_path):
    """Token ids would come without what the model's processor makes of the pictures."""
    store = PictureStore(tmp_path)
    endpoint = ["teacher=endpoint", "teacher.name=large", f"teacher.base_url={server.url}/v1"]
    run, env = env_of("algo=sft", *endpoint, "env=math", pictures=store)
    monkeypatch.setattr(env.sampler.renderer, "pictures", SimpleNamespace(store=store), raising=False)
    server.replies["/v1/models"] = {"data": [{"id": "large"}]}
    choice = {"index": 0, "token_ids": [3], "prompt_token_ids": run.probe.token_ids}
    server.replies["/v1/completions"] = {"choices": [choice]}
    await env.setup()
    assert type(env.sampler.pool) is ChatSource and env.algorithm.pools[0].pictures is store
    await env.algorithm.close()


async def test_scorer_of_another_tokenizer_is_refused_first(env_of, server):
    _, env = env_of("algo=opd", "teacher=endpoint", "teacher.name=large", f"teacher.base_url={server.url}/v1")
    server.replies["/v1/models"] = {"data": [{"id": "large"}]}
    server.replies["/v1/completions"] = {"choices": [{"index": 0, "token_ids": [3], "prompt_token_ids": [1]}]}
    with pytest.raises(ConfigError, match="'large' .* has another tokenizer than the policy"):
        await env.setup()
    assert len(server.bodies["/v1/completions"]) == 1
    await env.algorithm.close()
