"""The parts of a run, and what is refused while they are made. Servers and processes are made up."""

import copy
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from prl.compose import compose
from prl.errors import ConfigError, DeadlinePassed
from prl.inference.frozen import FrozenPool
from prl.launch import builder as module
from prl.launch.builder import RunBuilder, check_vocabulary, run_token
from prl.orchestrator import pools
from prl.wire import files

TOKEN, RUN_TOKEN = "PRL_TOKEN", "PRL_RUN_TOKEN"
ENVS = [
    "env=math",
    "envs.math.args.num_tasks=8",
    "envs.math.eval_args=null",
    "inference.device=cpu",
    "trainer.device=cpu",
]


@pytest.fixture(autouse=True)
def token(monkeypatch):
    """What the environment gives: nothing, to start with. A run sets it for the clients that are not ours."""
    for name in (TOKEN, RUN_TOKEN):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    # Nothing is started here: a port may be that of a stand-in which listens already.
    monkeypatch.setattr("prl.launch.engine.free_port", lambda host, port=None: port or 1)
    return monkeypatch.setenv


def config(*overrides):
    return compose(["run.name=x", *ENVS, *overrides])


# --- the token --------------------------------------------------------------------------------------------------------


def test_each_run_has_a_token_of_its_own():
    tokens = {run_token(config()) for _ in range(3)}
    assert len(tokens) == 3 and all(len(token) >= 32 for token in tokens)
    assert TOKEN not in os.environ, "nothing has started"


def test_a_token_that_is_given_is_that_of_running_engines_and_of_nobody_else(token):
    token(TOKEN, "given")
    assert run_token(config()) != "given"
    assert run_token(config("inference.urls=[http://127.0.0.1:9]")) == "given"


@pytest.mark.parametrize("given", [None, ""])
def test_servers_that_already_run_have_a_token_that_has_to_be_told(token, given):
    if given is not None:
        token(TOKEN, given)
    with pytest.raises(ConfigError, match=r"^inference\.urls names servers that already run: set PRL_TOKEN"):
        run_token(config("inference.urls=[http://127.0.0.1:9]"))
    assert run_token(config())


# --- the teacher's tokenizer ------------------------------------------------------------------------------------------


def tokenizer(**vocabulary):
    return SimpleNamespace(get_vocab=lambda: vocabulary)


def test_a_teacher_of_the_same_vocabulary_is_welcome():
    check_vocabulary(tokenizer(a=0, b=1), tokenizer(b=1, a=0), config("algo=opd"))


@pytest.mark.parametrize("other", [{"a": 1, "b": 0}, {"a": 0}, {"a": 0, "b": 1, "c": 2}])
def test_a_teacher_of_another_vocabulary_is_refused_with_both_models(other):
    chosen = config("algo=opd")
    with pytest.raises(ConfigError) as caught:
        check_vocabulary(tokenizer(a=0, b=1), tokenizer(**other), chosen)
    for said in (chosen.model.path, chosen.teacher.model.path, "teacher.model.path", "teacher=endpoint"):
        assert said in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "looked_at"),
    [
        (["algo=opd"], 2),
        (["algo=sft"], 2),
        (["algo=grpo"], 1),
        (["algo=opd", "algo.teacher.base_url=http://a/v1"], 1),
    ],
)
def test_it_is_looked_at_where_a_teacher_is_hosted(monkeypatch, overrides, looked_at):
    load, keys = module.load_tokenizer, []

    def watched(model, key):
        keys.append(key)
        return load(model, key) if key == "model.path" else tokenizer(a=0)

    monkeypatch.setattr(module, "load_tokenizer", watched)
    if looked_at == 2:
        with pytest.raises(ConfigError, match="another tokenizer than the policy"):
            RunBuilder.load(config(*overrides))
    else:
        RunBuilder.load(config(*overrides))
    assert keys == ["model.path", "teacher.model.path"][:looked_at]


# --- filters ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot", ["pre_batch", "post_batch"])
@pytest.mark.parametrize(
    ("node", "says"),
    [
        ("{_target_: no_such.Filter, enforce: true}", "._target_='no_such.Filter': No module named 'no_such'"),
        ("{_target_: prl.orchestrator.buffer.Buffer, enforce: true}", "is no Filter"),
        ("{enforce: true}", " has no _target_: it must name the class of a Filter"),
        ("{_target_: prl.orchestrator.filters.zero_advantage.ZeroAdvantage}", ".enforce must be true"),
    ],
)
def test_a_filter_is_found_before_anything_starts(slot, node, says):
    with pytest.raises(ConfigError) as caught:
        RunBuilder.load(config("filters=none", f"+filters.{slot}.mine={node}"))
    assert f"filters.{slot}.mine" in str(caught.value) and says in str(caught.value)


async def test_filters_know_the_size_of_the_policys_vocabulary(run):
    made = run("filters=enforce", "~filters.post_batch.gibberish")
    orchestrator = made.parts.orchestrator(await start(made), None, made.dir)
    saved = json.loads((Path(made.given.model.path) / "tokenizer.json").read_text())
    tokens = {*saved["model"]["vocab"].values(), *(token["id"] for token in saved["added_tokens"])}
    filters = orchestrator.filters
    both = [*filters.pre_batch.filters.values(), *filters.post_batch.filters.values()]
    assert {filter_.vocab_size for filter_ in both} == {len(tokens)}
    assert list(filters.pre_batch.filters) == ["gibberish", "repetition", "zero_advantage"]
    assert list(filters.post_batch.filters) == ["zero_advantage", "repetition"]
    for env in orchestrator.envs:
        await env.close()


# --- buffers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("easy_threshold: 1.0\n", "buffer has no _target_: it must name the class of a Buffer"),
        (
            "_target_: prl.orchestrator.buffer.Buffer\neasy_threshold: 1.0\n",
            "buffer: Buffer reads 'hard_threshold', which",
        ),
        (
            "defaults: [/schema/buffer@_here_: passes, _self_]\neasy_threshold: .nan\n",
            "buffer.easy_threshold must be a finite",
        ),
    ],
)
def test_a_buffers_conf_file_of_ones_own_is_checked(tmp_path, lines, says):
    (tmp_path / "buffer").mkdir()
    (tmp_path / "buffer" / "mine.yaml").write_text(lines)
    with pytest.raises(ConfigError) as caught:
        RunBuilder.load(config(f"hydra.searchpath=[file://{tmp_path}]", "buffer=mine"))
    assert str(caught.value).startswith(says)


def test_each_env_has_its_buffer_in_an_order_of_its_own():
    overrides = ("env=[math,reverse_text]", "envs.reverse_text.args.num_tasks=8", "buffer=pools")
    parts = RunBuilder.load(config(*overrides))
    orders = {name: [buffer.tasks.index(buffer.next()) for _ in range(8)] for name, buffer in parts.buffers.items()}
    assert set(orders) == {"math", "reverse_text"} and orders["math"] != orders["reverse_text"]
    again = RunBuilder.load(config(*overrides)).buffers["math"]
    assert [again.tasks.index(again.next()) for _ in range(8)] == orders["math"]
    assert again.env_name == "math" and again.config.easy_threshold == 0.95


async def test_the_orchestrator_gets_the_buffers_and_the_factor(run):
    made = run("buffer.oversampling_factor=1.5")
    orchestrator = made.parts.orchestrator(await start(made), None, made.dir)
    assert orchestrator.oversampling == 1.5 and orchestrator.envs[0].buffer is made.parts.buffers["math"]
    await orchestrator.envs[0].close()


def pools_of(buffer, folder, easy=(), hard=()):
    for place in easy:
        buffer.update(buffer.tasks[place], 1.0)
    for place in hard:
        buffer.update(buffer.tasks[place], 0.0)
    pools.write(folder, {pool: buffer.retired_to(pool) for pool in pools.RETIRED})


def test_pools_are_loaded_before_anything_starts(tmp_path):
    """The tasks of another seed are others: the prompt finds those that are the same."""
    pools_of(RunBuilder.load(config("buffer=pools")).buffers["math"], tmp_path, easy=[0, 3], hard=[5])
    load = f"buffer.load_from={tmp_path}"
    same = RunBuilder.load(config("buffer=pools", load, "buffer.hash_keys=[prompt]")).buffers["math"]
    assert [same.pool_of(task) for task in same.tasks] == [
        {0: "easy", 3: "easy", 5: "hard"}.get(place, "normal") for place in range(8)
    ]
    assert RunBuilder.load(config("buffer=pools", load, "seed=1")).buffers["math"].counts()["normal"] == 8
    with pytest.raises(ConfigError, match=r"buffer\.hash_keys: 'question' is no field"):
        RunBuilder.load(config(load, "buffer.hash_keys=[question]"))


def test_pools_that_leave_nothing_to_train_on_are_refused(tmp_path):
    pools_of(RunBuilder.load(config("buffer=pools")).buffers["math"], tmp_path, easy=range(8))
    given = ("buffer=pools", "buffer.refill=false", f"buffer.load_from={tmp_path}")
    with pytest.raises(
        ConfigError, match=r"retires every task of every env: .*buffer\.easy_fraction.*buffer\.refill=true"
    ):
        RunBuilder.load(config(*given))
    assert RunBuilder.load(config(*given, "buffer.easy_fraction=0.5")).buffers["math"].counts()["normal"] == 4
    assert not RunBuilder.load(config(*given, "buffer.refill=true")).buffers["math"].ended


# --- hosting a teacher ------------------------------------------------------------------------------------------------


class Processes:
    """Starts nothing, and remembers what it was asked to."""

    def __init__(self):
        self.started = {}

    def start(self, name, command, *, env, log):
        assert name not in self.started
        self.started[name] = SimpleNamespace(command=command, env=env, log=log)
        return SimpleNamespace(may_finish=False)

    def check(self):
        pass


@pytest.fixture
def run(servers, tmp_path):
    """`run(*overrides)`: the parts of a run whose servers answer from the start, and after `start`, its processes."""
    policy, teacher = servers
    policy.replies |= {"/health": {}}
    teacher.replies |= {"/v1/models": {"data": [{"id": "teacher"}]}}
    ready = tmp_path / "making"
    ready.mkdir()
    (ready / "metrics.json").write_text("{}")
    (tmp_path / "weights").mkdir()
    files.announce(ready, files.weights_path(tmp_path, 0))

    def make(*overrides):
        given = config(*overrides)
        given.inference.port = policy.port
        if given.teacher.inference is not None:
            given.teacher.inference.port = teacher.port
        return SimpleNamespace(
            given=given, before=copy.deepcopy(given), parts=RunBuilder.load(given), processes=Processes(), dir=tmp_path
        )

    return make


async def start(made):
    pool = await made.parts.start(made.processes, made.dir)
    await pool.close()
    return pool


@pytest.mark.parametrize("algo", ["opd", "sft"])
async def test_a_hosted_teachers_address_reaches_its_reference_and_not_the_users_config(run, servers, algo):
    made = run(f"algo={algo}")
    await start(made)
    (reference,) = made.parts.hosted
    own = made.parts.config.algo
    assert reference is (own.teacher if algo == "opd" else own.sampling.source)
    assert (reference.base_url, reference.api_key_var) == (f"{servers[1].url}/v1", RUN_TOKEN)
    assert made.given == made.before, "the same config can be run again"
    assert (made.given.algo.teacher if algo == "opd" else made.given.algo.sampling.source).base_url is None


async def test_every_reference_to_the_hosted_model_is_told_its_address_and_no_other_is(run, servers):
    elsewhere = "http://127.0.0.1:9/v1"
    made = run(
        "algo=opd",
        "env=[math,reverse_text]",
        "+algo@envs.math.algo=sft",
        "+env@envs.third=math",
        "+algo@envs.reverse_text.algo=opd",
        f"envs.reverse_text.algo.teacher.base_url={elsewhere}",
        "envs.reverse_text.args.num_tasks=8",
    )
    await start(made)
    envs, address = made.parts.config.envs, f"{servers[1].url}/v1"
    assert envs["math"].algo.sampling.source.base_url == address
    assert envs["third"].algo is None and made.parts.config.algo.teacher.base_url == address
    other = envs["reverse_text"].algo.teacher
    assert (other.base_url, other.api_key_var) == (elsewhere, None)
    assert len(made.parts.hosted) == 2


async def test_the_server_of_the_teacher_is_started_with_its_name_its_model_and_the_runs_token(run, servers):
    made = run("algo=opd")
    await start(made)
    assert set(made.processes.started) == {"inference", "teacher", "trainer"}
    teacher, policy = made.processes.started["teacher"], made.processes.started["inference"]
    assert teacher.env[TOKEN] == policy.env[TOKEN] == made.parts.token
    assert (teacher.env["PRL_FROZEN"], policy.env["PRL_FROZEN"]) == ("1", ""), "only the policy takes weights"
    for process, name, model, server in (
        (policy, "policy", made.given.model, servers[0]),
        (teacher, "teacher", made.given.teacher.model, servers[1]),
    ):
        options = dict(zip(process.command, process.command[1:], strict=False))
        assert (options["--served-model-name"], options["--model"]) == (name, model.path)
        assert options["--port"] == str(server.port)
    assert teacher.log.name == "teacher.log" and servers[1].calls == ["/v1/models"]
    assert [server.headers["Authorization"] for server in servers] == [f"Bearer {made.parts.token}"] * 2


@pytest.mark.parametrize("given", [None, "given"])
async def test_the_runs_token_is_where_the_clients_in_its_process_look_for_it(run, token, given):
    if given:
        token(TOKEN, given)
    made = run()
    assert RUN_TOKEN not in os.environ, "nothing has started"
    await start(made)
    assert os.environ[RUN_TOKEN] == made.parts.token and os.environ.get(TOKEN) == given
    assert run_token(config()) not in (given, made.parts.token), "the next run has its own"


async def test_no_token_reaches_the_trainer(run):
    made = run("algo=opd")
    await start(made)
    trainer = made.processes.started["trainer"]
    assert made.parts.token not in json.dumps([trainer.command, trainer.env])


@pytest.mark.parametrize(
    "overrides",
    [
        ["algo=grpo"],
        ["algo=opd", "algo.teacher.base_url=http://127.0.0.1:9/v1"],
        ["algo=sft", "teacher=endpoint", "teacher.name=large", "teacher.base_url=http://127.0.0.1:9/v1"],
    ],
)
async def test_no_teacher_is_hosted_unless_one_is_referred_to(servers, run, overrides):
    made = run(*overrides)
    assert made.parts.hosted == []
    await start(made)
    assert set(made.processes.started) == {"inference", "trainer"} and not servers[1].calls


async def test_a_teacher_that_does_not_come_ends_the_start_and_is_named(run, servers):
    servers[1].replies["/v1/models"] = (503, "")
    made = run("algo=opd", "teacher.inference.startup_timeout_s=0.2")
    with pytest.raises(DeadlinePassed, match=f"'teacher' at {servers[1].url} was not ready after 0.2 s"):
        await made.parts.start(made.processes, made.dir)


@pytest.mark.parametrize("algo", ["sft", "opd", "grpo"])
async def test_an_env_samples_from_its_source_and_is_evaluated_with_the_policy(run, servers, algo):
    made = run(f"algo={algo}", "orchestrator.group_size=4", "orchestrator.batch_size=16", "seed=5")
    pool = await start(made)
    (env,) = made.parts.orchestrator(pool, None, made.dir).envs
    assert env.policy_sampler.pool is pool and env.group_size == 4
    if algo == "sft":
        assert isinstance(env.sampler.pool, FrozenPool) and env.sampler.pool.urls == [servers[1].url]
        assert env.sampler.pool.model == "teacher" and env.sampler.config == env.policy_sampler.config
    else:
        assert env.sampler is env.policy_sampler
    assert env.sampler.max_model_len == made.given.model.max_model_len and env.sampler.seed == 5
    await env.close()
