"""From a config to the live objects of a run, and what is refused on the way. Servers and processes are stand-ins."""

import asyncio
import copy
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from prepared_run import planned, prepared_run
from seeing_models import seeing_model

from prl.base.errors import ConfigError
from prl.config.compose import compose
from prl.curriculum.pools import RETIRED, write_pools
from prl.engines.client import InferencePool
from prl.engines.frozen import FrozenPool
from prl.engines.tokenizers import load_tokenizer
from prl.launch.builder import assemble, start_services, supervise
from prl.launch.components import build_components, check_processor, check_vocabulary
from prl.launch.local import LocalLauncher
from prl.launch.supervisor import Supervisor
from prl.transport.events import ORCHESTRATOR, Track
from prl.transport.files import FileTransport
from tests.conftest import Server

TOKEN = "PRL_TOKEN"
ENVS = ["env=math", "envs.math.args.num_tasks=8", "envs.math.eval_args=null", "engine.device=cpu", "trainer.device=cpu"]


@pytest.fixture(autouse=True)
def token(monkeypatch):
    """The environment has no token, to start with."""
    monkeypatch.setenv(TOKEN, "x")
    monkeypatch.delenv(TOKEN)
    # Nothing is started here: a port may be that of a stand-in which listens already.
    monkeypatch.setattr("prl.launch.local.free_port", lambda host, port=None: port or 1)
    return monkeypatch.setenv


FEW = ["envs.math_retry.args.num_tasks=8", "envs.math_retry.eval_args=null"]
REVERSE = ["envs.reverse_text.args.num_tasks=8", "envs.reverse_text.eval_args=null"]


def config(*overrides):
    return compose(["run.name=x", *ENVS, *overrides])


# --- the token --------------------------------------------------------------------------------------------------------


def test_each_run_has_its_own_token_or_the_engines(token):
    running = config("engine.urls=[http://127.0.0.1:9]")
    with pytest.raises(ConfigError, match=r"^engine\.urls names servers that already run: set PRL_TOKEN"):
        planned(running)
    token(TOKEN, "given")
    own = config()
    tokens = {planned(own).token for _ in range(3)}
    assert len(tokens - {"given"}) == 3 and all(len(token) >= 32 for token in tokens)
    assert planned(running).token == "given"


# --- the teacher's tokenizer ------------------------------------------------------------------------------------------


def tokenizer(chat_template="{{ messages }}", **vocabulary):
    return SimpleNamespace(get_vocab=lambda: vocabulary, chat_template=chat_template)


def of_teacher(chosen):
    """Policy and teacher, and the config keys that refer to it."""
    return chosen.model, chosen.teacher, build_components(chosen).teacher


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["algo=opd"], "algo.teacher"),
        (["algo=sft"], None),
        (["env=[math,reverse_text]", "algo=sft", "+algo@envs.math.algo=opd"], "envs.math.algo.teacher"),
        (["algo.kl.coef=0.1", "algo.kl.reference={name:teacher}"], "algo.kl.reference"),
        (["algo=opd", "algo.teacher={name:b,base_url:http://h/v1}"], None),
        (["algo=opd", "algo.align=text", "teacher=inline"], None),
        (["algo.kl.coef=0.1", "algo.kl.reference={name:teacher}", "algo.kl.align=text"], None),
    ],
)
def test_teacher_of_another_vocabulary_may_imitate_not_score(overrides, key):
    chosen = config(*overrides)
    given = tokenizer(a=0), tokenizer(a=1), *of_teacher(chosen)
    check_vocabulary(tokenizer(a=0, b=1), tokenizer(None, b=1, a=0), *given[2:])
    if key is None:
        check_vocabulary(*given)
    else:
        with pytest.raises(ConfigError, match=rf"^{key}: the teacher \(.* has another tokenizer than the policy"):
            check_vocabulary(*given)


def test_a_teacher_of_another_vocabulary_needs_a_chat_template():
    chosen = config("algo=sft")
    with pytest.raises(ConfigError, match=r"^algo.sampling.source: .* no chat template"):
        check_vocabulary(tokenizer(a=0), tokenizer(None, a=1), *of_teacher(chosen))


@pytest.mark.parametrize(("algo", "size", "refused"), [("opd", 128, True), ("opd", 256, False), ("sft", 128, False)])
def test_a_teacher_that_scores_has_the_policys_processor(tmp_path, algo, size, refused):
    """It gets the pixels that were made for the policy. A larger picture has more tokens for one of the two."""
    policy, teacher = (Path(seeing_model("qwen3_vl", tmp_path / name)) for name in ("policy", "teacher"))
    file = teacher / "preprocessor_config.json"
    file.write_text(file.read_text().replace('"longest_edge": 65536', f'"longest_edge": {size * 256}'))
    chosen = config(f"algo={algo}", f"model.path={policy}", f"teacher.model.path={teacher}")
    given = load_tokenizer(str(policy), ""), load_tokenizer(str(teacher), ""), *of_teacher(chosen)
    if refused:
        with pytest.raises(ConfigError, match=r"^algo.teacher: the teacher \(.* makes something else of a picture"):
            check_processor(*given)
    else:
        check_processor(*given)


# --- filters ----------------------------------------------------------------------------------------------------------


def test_filters_know_vocabulary_and_longest_completion():
    given = (
        "filters=enforce",
        "envs.math.sampling.max_tokens=16",
        "sampling.max_tokens=200",
        "model.max_model_len=256",
    )
    made = prepared_run(config("env=[math,math_retry]", *FEW, *given, "~filters.post_batch.gibberish"))
    saved = json.loads((Path(made.plan.trainer.model.path) / "tokenizer.json").read_text())
    tokens = {*saved["model"]["vocab"].values(), *(token["id"] for token in saved["added_tokens"])}
    for name, longest in {"math": 16, "math_retry": 255}.items():  # several turns
        filters = made.components.envs[name].filters
        assert list(filters["pre_batch"]) == ["gibberish", "repetition", "zero_advantage"]
        assert list(filters["post_batch"]) == ["zero_advantage", "repetition"]
        for each in [*filters["pre_batch"].values(), *filters["post_batch"].values()]:
            assert (each.vocab_size, each.longest) == (len(tokens), longest)


def test_filter_that_matches_nothing_warns_with_its_key():
    window = "filters.pre_batch.repetition.window=50"
    with pytest.warns(
        UserWarning, match=r"filters\.pre_batch\.repetition\.window=50 matches nothing in this run"
    ) as caught:
        prepared_run(config("env=[math,math_retry]", *FEW, "envs.math.sampling.max_tokens=32", window))
    printed = [str(each.message) for each in caught if "matches nothing" in str(each.message)]
    assert len(printed) == 1 and printed[0].endswith("has 32 tokens"), "of math alone"


# --- buffers ----------------------------------------------------------------------------------------------------------


def curricula_of(*overrides):
    made = prepared_run(config("curriculum=pools", *overrides))
    return {name: env.curriculum for name, env in made.components.envs.items()}


def test_each_env_has_its_own_order_of_tasks():
    overrides = ("env=[math,reverse_text]", *REVERSE)
    orders = {
        name: [curriculum.tasks.index(curriculum.next()) for _ in range(8)]
        for name, curriculum in curricula_of(*overrides).items()
    }
    assert set(orders) == {"math", "reverse_text"} and orders["math"] != orders["reverse_text"]
    again = curricula_of(*overrides)["math"]
    assert [again.tasks.index(again.next()) for _ in range(8)] == orders["math"]
    assert again.env_name == "math" and again.easy_threshold == 0.95


def retire(curriculum, folder, easy=(), hard=()):
    for place in easy:
        curriculum.update(curriculum.tasks[place], 1.0)
    for place in hard:
        curriculum.update(curriculum.tasks[place], 0.0)
    write_pools(folder, {pool: curriculum.retired_to(pool) for pool in RETIRED})


def test_retired_tasks_are_known_by_what_they_say(tmp_path):
    retire(curricula_of()["math"], tmp_path, easy=[0, 3], hard=[5])
    same = curricula_of(f"curriculum.load_from={tmp_path}", "curriculum.hash_keys=[prompt]")["math"]
    pools = {0: "easy", 3: "easy", 5: "hard"}
    assert [same.pool_of(task) for task in same.tasks] == [pools.get(place, "normal") for place in range(8)]


def test_pools_that_leave_nothing_to_train_on_are_refused(tmp_path):
    retire(curricula_of()["math"], tmp_path, easy=range(8))
    given = ("curriculum.refill=false", f"curriculum.load_from={tmp_path}")
    with pytest.raises(ConfigError, match="retires every task: .*easy_fraction.*refill"):
        curricula_of(*given)
    assert curricula_of(*given, "curriculum.easy_fraction=0.5")["math"].counts()["normal"] == 4


# --- hosting a teacher ------------------------------------------------------------------------------------------------


class Processes:
    """Starts nothing, and remembers what it was asked to."""

    def __init__(self):
        self.started = {}

    def start(self, name, command, *, env, log, explain=None, stdin=None, may_finish=False):
        assert name not in self.started
        told = []
        self.started[name] = SimpleNamespace(command=command, env=env, log=log, told=told)
        return SimpleNamespace(tell=told.append)


@pytest.fixture
def run(servers, tmp_path):
    """`run(*overrides)`: a prepared run whose servers answer from the start, and after `start`, its processes."""
    policy, teacher = servers
    policy.replies |= {"/health": {}}
    teacher.replies |= {"/v1/models": {"data": [{"id": "teacher"}]}}
    transport = FileTransport(tmp_path)
    transport.publish(0, {}, None)

    def make(*overrides):
        given = config(*overrides)
        given.engine.port = policy.port
        if given.teacher.engine is not None:
            given.teacher.engine.port = teacher.port
        launcher, processes = LocalLauncher(), Processes()
        launcher.start = processes.start
        before, prepared = copy.deepcopy(given), prepared_run(given)
        probed = {"index": 0, "token_ids": [0], "prompt_token_ids": prepared.probe.token_ids}
        teacher.replies["/v1/completions"] = {"choices": [probed]}  # it has the policy's tokenizer
        return SimpleNamespace(
            given=given,
            before=before,
            run=prepared,
            launcher=launcher,
            processes=processes,
            transport=transport,
            dir=tmp_path,
        )

    return make


async def start(made):
    services = await start_services(made.run, Supervisor(made.launcher, print), made.transport)
    await services.close()
    return services


@pytest.mark.parametrize("algo", ["opd", "sft"])
async def test_hosted_teacher_is_started_and_connected(run, servers, algo):
    made = run(f"algo={algo}", "seed=5")
    services = await start(made)
    (env,) = assemble(made.run, services, made.transport).envs
    (teacher,) = services.teachers
    assert (teacher.urls, teacher.http.token) == ([servers[1].url], made.run.plan.token)
    if algo == "opd":
        pool = await env.algorithm.connect(env.algorithm.teacher)
        assert env.sampler.pool is services.policy
    else:
        pool = env.sampler.pool
        assert isinstance(pool, FrozenPool)
    assert (pool.urls, pool.model, pool.http.token) == ([servers[1].url], "teacher", made.run.plan.token)
    assert env.eval_sampler.pool is services.policy and env.sampler.run_seed == 5
    assert made.given == made.before, "the same config can be run again"
    started = made.processes.started
    assert set(started) == {"engine", "teacher", "trainer"}
    assert made.run.plan.token not in json.dumps([started["trainer"].command, started["trainer"].env])
    assert TOKEN not in os.environ, "the next job of a sweep sees nothing"
    assert started["teacher"].env[TOKEN] == started["engine"].env[TOKEN] == made.run.plan.token
    assert (started["teacher"].env["PRL_FROZEN"], started["engine"].env["PRL_FROZEN"]) == ("1", "")
    for process, name, model, server in (
        (started["engine"], "policy", made.given.model, servers[0]),
        (started["teacher"], "teacher", made.given.teacher.model, servers[1]),
    ):
        options = dict(zip(process.command, process.command[1:], strict=False))
        assert (options["--served-model-name"], options["--model"]) == (name, model.path)
        assert options["--port"] == str(server.port)
    assert [server.headers["Authorization"] for server in servers] == [f"Bearer {made.run.plan.token}"] * 2
    await env.algorithm.close()


@pytest.mark.parametrize("shared", [True, False])
async def test_processes_on_one_gpu_start_one_after_another(run, monkeypatch, shared):

    made, order = run("algo=opd"), []

    def noting(what, action):
        async def noted(*given):
            await asyncio.sleep(0.01)  # as long as others need to begin
            await action(*given)
            order.append(what)

        return noted

    made.run = replace(made.run, plan=replace(made.run.plan, shares_gpu=shared))
    monkeypatch.setattr(InferencePool, "wait_ready", noting("engine ready", InferencePool.wait_ready))
    monkeypatch.setattr(FrozenPool, "wait_ready", noting("teacher ready", FrozenPool.wait_ready))
    begin = made.launcher.start
    made.launcher.start = lambda name, *args, **kwargs: (order.append(name), begin(name, *args, **kwargs))[1]
    await start(made)
    if shared:
        assert order == ["engine", "engine ready", "teacher", "teacher ready", "trainer"]
    else:
        assert order[:3] == ["engine", "teacher", "trainer"]


async def test_several_servers_are_started_and_all_are_used(run, servers):
    made = run("algo=opd", "engine.servers=2", "teacher.engine.servers=2")
    policy, teacher = servers
    second = {"engine 2": await Server().start(), "teacher 2": await Server().start()}
    second["engine 2"].replies, second["teacher 2"].replies = policy.replies, teacher.replies
    urls = {"engine": policy.url, "teacher": teacher.url} | {name: server.url for name, server in second.items()}
    specs = []
    made.launcher.start_engine = lambda spec: specs.append(spec) or urls[spec.process]
    try:
        services = await start(made)
        assert services.policy.urls == [policy.url, second["engine 2"].url]
        assert services.teachers[0].urls == [teacher.url, second["teacher 2"].url]
        assert [(spec.process, spec.log.name, spec.frozen) for spec in specs] == [
            ("engine", "engine.log", False),
            ("engine 2", "engine_2.log", False),
            ("teacher", "teacher.log", True),
            ("teacher 2", "teacher_2.log", True),
        ]
        assert [spec.config.port for spec in specs] == [policy.port, policy.port + 1, teacher.port, teacher.port + 1]
        assert all("/health" in server.calls for server in (policy, second["engine 2"]))
        supervisor = supervise(made.run, made.launcher, Track(ORCHESTRATOR))
        assert supervisor.restarts == dict.fromkeys(["engine", "engine 2", "teacher", "teacher 2"], 1)
    finally:
        for server in second.values():
            await server.stop()


async def test_each_env_has_its_own_renderer_and_loss(run):
    made = run(
        "env=[math,reverse_text]",
        *REVERSE,
        "+renderer@envs.reverse_text.renderer=default",
        "+loss@envs.reverse_text.loss=aipo",
    )
    envs = {env.name: env for env in assemble(made.run, await start(made), made.transport).envs}
    assert type(envs["math"].sampler.renderer).__name__ == "Qwen3Renderer"
    assert type(envs["reverse_text"].sampler.renderer).__name__ == "TemplateRenderer"
    assert (envs["math"].loss, envs["reverse_text"].loss) == ("", "reverse_text")
    (shipped,) = made.processes.started["trainer"].told
    assert {name: node["_target_"] for name, node in shipped["losses"].items()} == {
        "": "prl.losses.default_loss",
        "reverse_text": "prl.losses.aipo_loss",
    }


@pytest.mark.parametrize(
    ("overrides", "initial", "hosted"),
    [
        ([], False, False),
        (["algo=opd"], False, True),
        (["algo=opd", "algo.teacher.base_url=http://127.0.0.1:9/v1"], False, False),
        (["algo=sft", "teacher=endpoint", "teacher.name=large", "teacher.base_url=http://h/v1"], False, False),
        (["algo.kl.coef=0.1"], True, False),
        (["algo.kl.coef=0.1", "+algo@envs.math.algo=opd", "algo.kl.reference=initial"], False, True),
        (["algo.kl.coef=0.1", "algo.kl.reference={name:teacher}"], False, True),
        (["algo=opd", "+algo@envs.math.algo=reward", "envs.math.algo.kl.coef=1"], True, False),
    ],
)
def test_reference_and_teacher_are_kept_where_an_algorithm_asks(overrides, initial, hosted):
    """The initial one by the trainer, the teacher by the launcher."""
    chosen = config(*overrides)
    assert (bool(build_components(chosen).references), planned(chosen).teacher is not None) == (initial, hosted)
