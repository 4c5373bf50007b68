"""A toy task and rollouts made by hand; nothing here starts an engine."""

import asyncio
import functools
import itertools
import json
import math
import random
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import verifiers.v1 as vf
from patience import patient
from scripted_models import token_ids
from verifiers.v1.configs.agent import WireAgentConfig
from verifiers.v1.trace import AgentInfo, Trace, TraceTask

from prl.algorithms.base import Algorithm
from prl.algorithms.grpo import GRPOAlgorithm
from prl.algorithms.sft import SFTDistillAlgorithm
from prl.base.checkpoint_folders import STATE, part_path
from prl.base.errors import DeadlinePassed, EngineError
from prl.config.orchestrator import EvalConfig
from prl.config.schema import CheckpointConfig, EnvConfig, ModelConfig
from prl.curriculum.pools import TaskCurriculum
from prl.engines.sampler import Sampler
from prl.engines.scripted import Scripted
from prl.envs.environment import Environment
from prl.filters.zero_advantage import ZeroAdvantage
from prl.models import model_path
from prl.orchestrator.orchestrator import Orchestrator
from prl.orchestrator.types import TrainEnv
from prl.rollouts.messages import TrainingSample
from prl.rollouts.rollout import Rollout, Stage
from prl.transport.files import FileTransport
from prl.weights.files import FileWeights


@pytest.fixture
def make_sample():
    def make(length=4, prompt=1, *, env="toy", start=0, **streams) -> TrainingSample:
        """`length` tokens counting up from `start`, the first `prompt` of them off the mask."""
        return TrainingSample(
            token_ids=list(range(start, start + length)),
            mask=[i >= prompt for i in range(length)],
            logprobs=[-0.5 * (i >= prompt) for i in range(length)],
            temperatures=[1.0] * length,
            env_name=env,
            reward=0.0,
            **streams,
        )

    return make


@pytest.fixture
def make_rollout(make_sample):
    numbers = itertools.count()

    def make(reward=0.0, *, env="toy", lengths=(4,), version=0, advantages=None, error=None, group=0) -> Rollout:
        data = vf.TaskData(idx=next(numbers), prompt="1+1=")
        trace = Trace(
            task=TraceTask.model_construct(type="Toy", data=data, key="k", hash="h"),
            agent=AgentInfo.model_construct(
                config=WireAgentConfig.model_construct(), runtime=None, name="agent", trainable=True
            ),
        )
        trace.record_reward("answer", reward)
        rollout = Rollout(trace, env_name=env, group_id=group, start_version=version, temperature=1.0)
        rollout.samples = [make_sample(length, env=env) for length in lengths]
        if advantages is not None:
            rollout.assign_advantages(advantages)
        if error is not None:
            rollout.leave(Stage.FAILED, error, "env")
        return rollout

    return make


REPLIES = ["1", "2", "12", "123"]


class ToyTask(vf.Task):
    """Rewarded for the length of its reply."""

    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        return len(trace.last_reply) / 3


class FakePool(Scripted):
    """Answers after a while, one of `REPLIES` to each request, chosen by its seed. `loading` is for tests to set."""

    loading = None

    def __init__(self, tokenizer, *, delay=0.0):
        super().__init__([token_ids(tokenizer, text) for text in REPLIES])
        self.updates: list[int] = []
        self.delay, self.delay_of = delay, None
        self.random = random.Random(0)

    async def pause(self, n=1):
        await asyncio.sleep(self.delay * self.random.random() if self.delay_of is None else self.delay_of(n))

    async def generate(self, prompt, sampling, *, n=1, prefix=None):
        self.requests.append((prompt.token_ids, sampling))
        version = self.version
        with self.traffic.request(self.servers[0]):
            await self.pause(n)
        choice = random.Random(sampling["seed"])
        return [self.completion(choice.choice(self.replies), version) for _ in range(n)]

    async def update_weights(self, version, path, timeout_s=300.0):
        assert (Path(path) / "metrics.json").exists() and version > self.version
        with self.traffic.loading(self.servers[0], version):
            await asyncio.sleep(0.001)
        self.updates.append(version)
        self.version = version


@pytest.fixture
def pool(renderer):
    return FakePool(renderer._tokenizer)


class FakeFrozen(FakePool):
    """A frozen model that can be away; `give_up_at` is when its absence becomes an error."""

    timeout_s = 7.0
    version = None

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.away, self.give_up_at = False, math.inf
        self.waited, self.closed = [], 0

    @property
    def up(self):
        if self.away and time.monotonic() > self.give_up_at:
            raise DeadlinePassed("model 'teacher' at http://teacher was not ready")
        return not self.away

    def go_away(self, for_at_most_s=math.inf):
        self.away, self.give_up_at = True, time.monotonic() + for_at_most_s

    def come_back(self):
        self.away = False

    async def generate(self, prompt, sampling, *, n=1, prefix=None):
        return self.there(await super().generate(prompt, sampling, n=n))

    async def top_logprobs(self, sequence, top_k):
        await self.pause()
        return self.there(await super().top_logprobs(sequence, top_k))

    async def wait_ready(self, timeout_s, still_alive=lambda: None):
        self.waited.append(timeout_s)
        self.there()

    async def close(self):
        self.closed += 1

    def there(self, answer=None):
        if self.away:
            raise EngineError("http://teacher is gone", 503)
        return answer


@pytest.fixture
def frozen(renderer):
    return FakeFrozen(renderer._tokenizer)


class ToyEnvironment(Environment):
    """An env whose tasks are given instead of loaded."""

    def __init__(self, name, config, tasks, eval_tasks):
        self.name, self.config, self.tasks, self.eval_tasks = name, config, tasks, eval_tasks
        self.taskset = self.workers = self.eval_workers = None
        self.verifiers_env = self.eval_verifiers_env = None
        self.uses_harness, self._in_process, self.models = False, [], {}


@pytest.fixture
def make_sampler(renderer):
    """`make_sampler(pool)`: a sampler of at most 64 tokens, prompt included."""

    def make(pool):
        sampler = Sampler()
        sampler.attach(pool=pool, renderer=renderer, max_model_len=64, seed=0)
        return sampler

    return make


@pytest.fixture
def zero():
    """`zero(enforce=True)`: the zero_advantage filter."""
    return lambda enforce=True: ZeroAdvantage(enforce=enforce)


@pytest.fixture
def make_env(pool, renderer, make_sampler):
    def make(
        name="toy",
        *,
        group_size=4,
        task=ToyTask,
        algorithm=None,
        weight=1.0,
        timeout_s=5.0,
        tasks=50,
        held_out=0,
        source=None,
        references=(),
        curriculum=None,
        pre=None,
        post=None,
    ):
        """`algorithm` is a class, `curriculum` are options, `pre` and `post` are filters by name. `source` is a frozen
        model that generates the rollouts, `references` are those that the algorithm asks."""
        made = [task(vf.TaskData(idx=i, prompt=f"{i}=")) for i in range(tasks)]
        config = EnvConfig(taskset="toy", weight=weight, timeout_s=timeout_s)
        environment = ToyEnvironment(name, config, made, made[:held_out])

        made_algorithm = (algorithm or GRPOAlgorithm)()
        made_algorithm.attach(policy_pool=pool, renderer=renderer)
        made_algorithm.pools += [*references] if source is None else [source, *references]
        made_buffer = TaskCurriculum(**(curriculum or {}))
        made_buffer.load(made, seed=0, env_name=name)
        eval_sampler = make_sampler(pool)
        return TrainEnv(
            environment=environment,
            curriculum=made_buffer,
            sampler=eval_sampler if source is None else make_sampler(source),
            eval_sampler=eval_sampler,
            algorithm=made_algorithm,
            filters={"pre_batch": pre or {}, "post_batch": post or {}},
            group_size=group_size,
        )

    return make


class Distils(Algorithm):
    """As opd: asks its reference about each rollout on arrival."""

    action_loss_type = "ref_kl"

    async def score_rollout(self, rollout):
        for sample in rollout.samples:
            sample.ref_logprobs = await self.pools[0].prompt_logprobs(sample.input)


@pytest.fixture
def make_imitating(make_env):
    """An env whose rollouts come from a frozen model."""
    return lambda source, name="imitating", **how: make_env(name, source=source, algorithm=SFTDistillAlgorithm, **how)


@pytest.fixture
def make_distilling(make_env):
    """An env whose rollouts are scored by a frozen model."""
    return lambda reference, name="distilling", **how: make_env(name, references=[reference], algorithm=Distils, **how)


@pytest.fixture
def make_orchestrator(pool, tmp_path):
    """`make_orchestrator(envs, monitors, steps, **options)`: small batches, and files in the test's folder."""

    def make(envs, monitors, steps, **options):
        transport, weights = FileTransport(tmp_path), FileWeights()
        weights.attach(transport)
        given = {"seq_len": 64, "trainer_ranks": 1, "batch_size": 8, "group_size": 4, "eval": EvalConfig(every=None)}
        return Orchestrator(
            envs=envs,
            pool=pool,
            transport=transport,
            weights=weights,
            monitors=monitors,
            run_dir=tmp_path,
            model=ModelConfig(path=model_path("tiny")),
            max_steps=steps,
            update_timeout_s=5.0,
            **given | options,
        )

    return make


class FakeTrainer:
    """Receives each batch, takes its time, publishes the next version, and writes its part of a checkpoint.

    Parts that were asked for are there when `late` more versions have been published.
    """

    def __init__(self, run_dir, *, delay=0.0, stop_after=10**9, ranks=1, late=0):
        self.run_dir, self.transport = run_dir, FileTransport(run_dir)
        self.delay, self.stop_after, self.ranks = delay, stop_after, ranks
        self.random = random.Random(0)
        self.batches = []
        self.late, self.parts = late, []

    async def work(self, first=1):
        for step in range(first, self.stop_after + 1):
            while (batch := self.transport.receive_batch(step, self.ranks - 1)) is None:
                last = self.transport.receive_end()
                if last is not None and last < step:
                    return self.write_parts([*self.parts, last])
                await asyncio.sleep(0.001)
            self.batches.append([self.transport.receive_batch(step, rank) for rank in range(self.ranks)])
            assert batch.step == step
            await asyncio.sleep(self.delay * self.random.random())
            self.transport.publish(step, {"loss/mean": 0.1, "tokens/trained": 60.0})
            if batch.checkpoint:
                self.parts.append(step)
            self.write_parts([part for part in self.parts if part + self.late <= step])
        self.write_parts(self.parts)

    def write_parts(self, steps):
        self.parts = [part for part in self.parts if part not in steps]
        for step in steps:
            (part_path(self.run_dir, step) / STATE).mkdir(parents=True, exist_ok=True)


@pytest.fixture
def make_trainer(tmp_path):
    """`make_trainer(delay=, stop_after=, ranks=, late=)`."""
    return functools.partial(FakeTrainer, tmp_path)


class Result:
    """What a run left behind."""

    def __init__(self, orchestrator, trainer, lines, messages):
        self.orchestrator, self.trainer, self.messages = orchestrator, trainer, messages
        self.run_dir, self.ended_because = orchestrator.run_dir, orchestrator.ended_because
        self.all_lines = lines
        self.lines = [line for line in lines if line["step"] > 0]
        self.rows = [[row for batch in ranks for row in batch.micro_batches] for ranks in trainer.batches]
        self.sizes = [sum(len(row.sequence_lengths) for row in rows) for rows in self.rows]

    def total(self, key):
        return sum(line.get(key, 0.0) for line in self.all_lines)

    def records(self, *steps):
        """The records of these steps, or of all."""
        names = [f"step_{step:06d}.jsonl" for step in steps] or ["step_*.jsonl"]
        paths = [path for name in names for path in sorted((self.run_dir / "rollouts").glob(name))]
        return [json.loads(line) for path in paths for line in path.read_text().splitlines()]

    def trained(self, *steps):
        return [record for record in self.records(*steps) if record["outcome"]["stage"] == "trained"]

    def untrained(self, *steps):
        return [record for record in self.records(*steps) if record["outcome"]["stage"] != "trained"]


@pytest.fixture
def train(make_orchestrator, make_trainer, pool):
    """`train(envs, steps=, …)`: a run to its end, with a pool and a trainer that are both fake."""

    async def run(envs, *, steps=8, delay=0.003, stop_after=10**9, limit_s=20.0, monitors=None, every=None, **options):
        lines, messages = [], []
        monitors = monitors or SimpleNamespace(step=lines.append, status=messages.append)
        checkpoint = CheckpointConfig(every=every, keep_last=None)
        orchestrator = make_orchestrator(envs, monitors, steps, checkpoint=checkpoint, **options)
        pool.delay = pool.delay or delay
        trainer = make_trainer(delay=delay, stop_after=stop_after, ranks=options.get("trainer_ranks", 1))
        training = asyncio.create_task(trainer.work())
        try:
            async with asyncio.timeout(patient(limit_s)):
                if await orchestrator.run():
                    await training
        finally:
            if training.done():
                training.result()
            training.cancel()
        orchestrator.finish()
        return Result(orchestrator, trainer, lines, messages)

    return run


@pytest.fixture
def user_package(monkeypatch):
    """Puts functions and classes into an importable module; returns their dotted paths."""

    def make(*things):
        module = ModuleType("a_users_package")
        for thing in things:
            thing.__module__, thing.__qualname__ = module.__name__, thing.__name__
            setattr(module, thing.__name__, thing)
        monkeypatch.setitem(sys.modules, "a_users_package", module)
        paths = [f"a_users_package.{thing.__name__}" for thing in things]
        return paths[0] if len(paths) == 1 else paths

    return make
