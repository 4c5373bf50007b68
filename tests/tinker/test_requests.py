"""What the server does with requests: each once, in turns, and what is wrong is named and changes nothing."""

import copy
import math
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file
from tinker_server import KEY, datum, running, text
from transformers import AutoModelForCausalLM, AutoTokenizer

from prl.base.checkpoint_folders import verify
from prl.engines.decoding import Request, sample
from prl.tools.evaluation.targets import model_of

STEP = {"learning_rate": 0.01}


@pytest.fixture(scope="module")
def model(client):
    return client.model(rank=2)


def parts(model):
    """All that a model is, in the server's memory: weights, gradient and optimiser."""
    return model.client.learner.tensors(model.id)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_passes_add_up_until_a_step(client):
    data = [text(12, seed=place) for place in range(4)]
    apart, together = client.model(), client.model()
    for some in (data[:1], data[1:3], data[3:]):
        apart.train(some)
    apart.forward(data)  # adds nothing
    together.train(data)
    one, other = parts(apart), parts(together)
    assert one.keys() == other.keys() and any(key.startswith("gradient/") for key in one)
    for key in one:
        torch.testing.assert_close(one[key], other[key], rtol=1e-4, atol=1e-4)
    apart.step(**STEP)
    assert not any(key.startswith("gradient/") for key in parts(apart)), "a step clears the gradient"
    before = parts(apart)
    apart.step(**STEP)
    assert same(parts(apart), before), "without a gradient a step changes nothing"


def test_a_retry_is_the_first_request(client):
    data = [text(10, seed=1)]
    model = client.model()
    first = model.train(data)
    gradient = parts(model)
    answers = [model.send("/forward_backward", 1, forward_backward_input=body(data)) for _ in range(3)]
    assert {answer["request_id"] for answer in answers} == {f"{model.id}:1"}
    assert client.result(answers[0]) == first and same(parts(model), gradient)
    model.step(**STEP)
    after = parts(model)
    assert client.result(model.send("/optim_step", 2, adam_params=STEP))["metrics"]["step:max"] == 1.0
    assert same(parts(model), after)
    again = client.post("/create_model", session_id=model.session, model_seq_id=0, base_model="tiny")
    assert client.result(again)["model_id"] == model.id and same(parts(model), after)


def body(data, loss="cross_entropy", **config):
    return {"data": data, "loss_fn": loss, "loss_fn_config": config or None}


GOOD = text(6)
RL = datum(range(30, 36), range(31, 37), logprobs=[-1.0] * 6, advantages=[1.0] * 6)


def changed(given, path, value):
    """A datum with another value at a path of keys."""
    given = copy.deepcopy(given)
    *folders, last = path
    place = given
    for key in folders:
        place = place[key]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return given


INPUTS, TOKENS = "loss_fn_inputs", ("model_input", "chunks", 0, "tokens")
WRONG = [
    (changed(GOOD, TOKENS, [10**6] * 6), "cross_entropy", {}, r"data\[1\]\.model_input: 1000000 is no token"),
    (changed(GOOD, TOKENS, [-1] * 6), "cross_entropy", {}, r"data\[1\]\.model_input: -1 is no token"),
    (changed(GOOD, TOKENS, [30] * 5), "cross_entropy", {}, r"data\[1\].*target_tokens has shape \[6\] for 5 tokens"),
    (changed(GOOD, TOKENS, []), "cross_entropy", {}, r"data\[1\]\.model_input has no tokens"),
    (text(200), "cross_entropy", {}, r"data\[1\]\.model_input has 200 tokens, above model.max_model_len=128"),
    (changed(GOOD, (INPUTS, "weights"), None), "cross_entropy", {}, r"data\[1\]\.loss_fn_inputs\.weights is missing"),
    (changed(GOOD, (INPUTS, "mask"), GOOD[INPUTS]["weights"]), "cross_entropy", {}, r"data\[1\].*inputs\.mask: "),
    (changed(GOOD, (INPUTS, "weights", "shape"), [7]), "cross_entropy", {}, r"data\[1\].*weights: .*size 6"),
    (changed(RL, (INPUTS, "advantages", "data"), [1.0] * 5 + [1e39]), "ppo", {}, r"advantages\[5\] is not a finite"),
    (changed(RL, (INPUTS, "logprobs", "data"), [-9999.0] * 6), "ppo", {}, r"logprobs has a number below -9000"),
    (changed(RL, (INPUTS, "target_tokens", "data"), [99999] * 6), "dro", {}, r"target_tokens: 99999 is no token"),
    (changed(GOOD, ("model_input", "chunks", 0, "type"), "image"), "cross_entropy", {}, r"chunks\[0\]\.type=image"),
    (changed(GOOD, ("model_input", "pieces"), []), "cross_entropy", {}, "unknown field `pieces`"),
    (
        changed(GOOD, (INPUTS, "target_tokens", "data"), [30.5] * 6),
        "cross_entropy",
        {},
        "int64 has whole numbers alone",
    ),
    (changed(GOOD, (INPUTS, "target_tokens", "dtype"), "float32"), "cross_entropy", {}, "target_tokens has the dtype"),
    (RL, "stable_reinforce", {}, "loss_fn=stable_reinforce: .*choose importance_sampling, ppo or cispo"),
    (RL, "custom", {}, "loss_id: an id of create_custom_loss is wanted"),
    (RL, "custom", {"loss_id": "graph:AAAA"}, "loss_id: "),
    (RL, "dpo", {}, "loss_fn=dpo: there is no such loss; known are cross_entropy, "),
    (RL, "ppo", {"beta": 1.0}, r"loss_fn_config\.beta: ppo takes clip_low_threshold, clip_high_threshold"),
    (RL, "ppo", {"clip_low_threshold": 1.5}, r"loss_fn_config.*clip_low"),
    (RL, "dro", {"beta": "much"}, r"loss_fn_config\.beta='much': a number is wanted"),
]


@pytest.mark.parametrize(("wrong", "loss", "config", "message"), WRONG)
def test_what_is_wrong_with_data_is_named_and_changes_nothing(client, model, wrong, loss, config, message):
    right = GOOD if loss == "cross_entropy" else RL
    model.train([GOOD])
    before = parts(model)
    code, detail = client.refused(
        "/forward_backward", model_id=model.id, seq_id=900, forward_backward_input=body([right, wrong], loss, **config)
    )
    assert code == 400 and re.search(message, detail), detail
    assert same(parts(model), before)


@pytest.mark.parametrize(
    ("adam", "message"),
    [
        ({"learning_rate": -1.0}, "adam_params.learning_rate"),
        ({"beta1": 1.0}, "adam_params.beta1"),
        ({"eps": 1e400}, "cannot be read"),
        ({"eps": 0.0}, "adam_params.eps"),
        ({"momentum": 0.9}, "unknown field `momentum`"),
    ],
)
def test_parameters_of_a_step_are_checked(client, model, adam, message):
    model.train([GOOD])
    before = parts(model)
    content = f'{{"model_id": "{model.id}", "seq_id": 901, "adam_params": {_json(adam)}}}'
    answer = client.http.post("/optim_step", content=content)
    assert answer.status_code == 400 and message in answer.json()["detail"]
    assert same(parts(model), before)
    code, detail = client.refused("/optim_step", model_id=model.id, optimizer_params={"type": "dimuon"})
    assert code == 400 and detail.startswith("optimizer_params: ")


def _json(values):
    return "{" + ", ".join(f'"{key}": {"1e400" if value == math.inf else value}' for key, value in values.items()) + "}"


def test_a_gradient_that_is_not_finite_is_dropped_alone(client):
    model = client.model()
    model.train([GOOD])
    before = parts(model)
    far = datum(range(30, 36), range(31, 37), logprobs=[-40.0] * 6, advantages=[3e38] * 6)
    result = model.train([RL, far], "importance_sampling")
    assert result["category"] == "user" and result["error"].startswith("the norm of this gradient is")
    assert same(parts(model), before)
    assert model.step(**STEP)["metrics"]["step:max"] == 1.0


def rounds(model, number):
    """A loop of a client: three steps with their results, and a sample."""
    results = []
    for step in range(3):
        results.append(model.train([text(14, seed=10 * number + step), text(9, seed=step)]))
        results.append(model.step(**STEP))
    sampled = model.sample(model.snapshot(), [30, 31, 32], 2, params={"temperature": 1.0, "seed": number})
    return results, sampled["sequences"], parts(model)


def test_four_clients_at_once_are_as_each_alone(client):
    alone = [rounds(client.model(rank=2 + number, seed=number), number) for number in range(4)]
    models = [client.model(rank=2 + number, seed=number) for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        at_once = list(pool.map(rounds, models, range(4)))
    for (results, sampled, state), (others, others_sampled, other_state) in zip(alone, at_once, strict=True):
        assert results == others and same(state, other_state)
        for one, other in zip(sampled, others_sampled, strict=True):
            assert one["tokens"] == other["tokens"]
            torch.testing.assert_close(one["logprobs"], other["logprobs"], atol=1e-5, rtol=0)


def test_a_client_that_diverges_touches_no_other(client):
    models = [client.model(rank=2, seed=number) for number in range(2)]
    [expected] = models[1].sample(models[1].snapshot(), [30, 31])["sequences"]
    models[0].train([GOOD])
    models[0].step(learning_rate=1e25)
    samplers = [model.snapshot() for model in models]
    asked = [
        (model, sampler, [30, 31], 1, seq) for seq in range(6) for model, sampler in zip(models, samplers, strict=True)
    ]
    with ThreadPoolExecutor(12) as pool:
        results = list(pool.map(lambda each: each[0].sample(*each[1:]), asked))
    assert all("not finite" in result["error"] and result["category"] == "server" for result in results[::2])
    for result in results[1::2]:
        [sequence] = result["sequences"]
        assert sequence["tokens"] == expected["tokens"]
        torch.testing.assert_close(sequence["logprobs"], expected["logprobs"], atol=1e-5, rtol=0)
    assert "error" in models[0].train([GOOD]) and "error" not in models[1].train([GOOD])


def test_models_beyond_those_in_memory_come_back_and_limits(tmp_path):
    with running(tmp_path, models=2, max_models=4, max_queued_tokens=1000) as client:
        models = [client.model(rank=2, seed=number) for number in range(3)]
        for model in models:
            model.train([GOOD])
        for model in models:
            model.step(**STEP)
        assert len(client.learner.tenants) == 2
        expected = client.model(rank=2, seed=1)
        expected.train([GOOD])
        expected.step(**STEP)
        assert models[1].logprobs([GOOD]) == expected.logprobs([GOOD])

        assert (
            "4 models, of at most 4" in client.refused("/create_model", session_id=client.session(), model_seq_id=0)[1]
        )
        large = models[0].send("/forward", forward_input=body([text(100)] * 200))  # alone it may be larger
        asked = {"model_id": models[1].id, "seq_id": 900, "forward_input": body([GOOD])}
        code, detail = client.refused("/forward", **asked)
        assert code == 429 and detail.startswith("20000 tokens wait")
        client.result(large)
        assert client.do("/forward", **asked)["metrics"]


def test_all_weights_of_one_model(tmp_path):
    with running(tmp_path) as client:
        adapter = client.model(seed=3)
        base = adapter.logprobs([GOOD])
        whole = client.model(rank=None)
        assert whole.logprobs([GOOD]) == base
        whole.train([GOOD])
        whole.step(learning_rate=1e-3)
        now = whole.logprobs([GOOD])
        assert now != base
        sampler = whole.snapshot()
        scored = whole.sample(sampler, GOOD["model_input"]["chunks"][0]["tokens"], prompt_logprobs=True)
        torch.testing.assert_close(scored["prompt_logprobs"][1:], now[0][:5], atol=1e-5, rtol=0)
        assert adapter.logprobs([GOOD]) == base, "an adapter is beside the base again"
        assert whole.logprobs([GOOD]) == now


# --- sampling ---


def test_samples_are_those_of_the_model_that_was_saved(client):
    prompt = [31, 40, 28]
    model = client.model(rank=2, seed=4)
    model.train([text(20, seed=3)])
    model.step(learning_rate=0.01)
    sampler = model.snapshot()
    asked = {"params": {"temperature": 1.3, "seed": 5, "max_tokens": 12}, "topk_sample_logprobs": 3}
    result = model.sample(sampler, prompt, 3, prompt_logprobs=True, topk_prompt_logprobs=2, **asked)
    assert len(result["sequences"]) == 3 and len({tuple(s["tokens"]) for s in result["sequences"]}) > 1
    for sequence in result["sequences"]:
        tokens = sequence["tokens"]
        assert sequence["stop_reason"] == ("length" if len(tokens) == 12 else "stop")
        own = model.logprobs(
            [datum([*prompt, *tokens[:-1]], [*prompt[1:], *tokens], weights=[0.0] * (len(tokens) + 2))]
        )
        at_one = own[0][2:]
        places = [dict(map(tuple, place)) for place in sequence["topk_logprobs"]]
        known = [(place[t], logprob) for place, t, logprob in zip(places, tokens, at_one, strict=True) if t in place]
        assert known and all(abs(one - other) < 1e-5 for one, other in known)
    torch.testing.assert_close(result["prompt_logprobs"][1:], own[0][:2], atol=1e-5, rtol=0)
    assert result["prompt_logprobs"][0] is None and [len(p or ()) for p in result["topk_prompt_logprobs"]] == [0, 2, 2]
    again = model.sample(sampler, prompt, 3, seq=2, **asked)
    model.train([text(20, seed=4)])
    model.step(learning_rate=0.05)
    still = model.sample(sampler, prompt, 3, seq=3, **asked)
    assert again["sequences"] == still["sequences"] == result["sequences"], "a snapshot never changes"
    newer = model.sample(model.snapshot(), prompt, 3, **asked)
    assert newer["sequences"] != result["sequences"]


def test_a_sample_of_the_base_and_its_ends(client, model):
    session = client.session()
    base = client.post("/create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model="tiny")
    sampler = base["sampling_session_id"]
    prompt = [31, 40, 28]
    free = model.sample(sampler, prompt, params={"stop": [], "max_tokens": 20})["sequences"][0]["tokens"]
    assert len(free) == 20, "an empty list is no end at all"
    base = client.learner.load(torch.device("cpu"))
    reference = sample(base, [Request(prompt_ids=prompt, max_tokens=20, temperature=0.0)], str)
    assert free == reference[0][0].token_ids
    cut = free.index(free[3])
    for seq, stop in enumerate(([free[3]], [free[3], 10**5]), 2):
        ended = model.sample(sampler, prompt, seq=seq, params={"stop": stop, "max_tokens": 20})["sequences"][0]
        assert (ended["tokens"], ended["stop_reason"]) == (free[: cut + 1], "stop")
    words = AutoTokenizer.from_pretrained(client.learner.model.config._name_or_path).decode([free[3]])
    for seq, stop in enumerate((words, [words]), 6):
        ended = model.sample(sampler, prompt, seq=seq, params={"stop": stop, "max_tokens": 20})["sequences"][0]
        assert len(ended["tokens"]) <= cut + 1 and ended["stop_reason"] == "stop"
    last = model.sample(sampler, prompt, seq=9, prompt_logprobs=True, prompt_logprobs_last_n=1)["prompt_logprobs"]
    assert last[:2] == [None, None] and last[2] < 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"num_samples": 0}, "num_samples"),
        ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"seed": -1}}, "sampling_params.seed"),
        ({"sampling_params": {"seed": 2**64}}, "sampling_params.seed"),
        ({"prompt": {"chunks": [{"tokens": [10**6]}]}}, "prompt: 1000000 is no token"),
        ({"prompt": {"chunks": [{"tokens": [30] * 128}]}}, "prompt has 128 tokens, above"),
        ({"prompt": {"chunks": [{"type": "image", "data": "x"}]}}, "prompt.chunks[0].type=image"),
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k: this server does not have it"),
        ({"sampling_session_id": "nobody"}, "sampling_session_id='nobody'"),
        ({"model_path": "tinker://a/weights/../../x"}, "model_path='tinker://a/weights/../../x': give tinker://"),
        ({"base_model": "large"}, "base_model='large': this server has tiny"),
        ({"num_samples": 5000}, "num_samples=5000"),
    ],
)
def test_wrong_samples_are_refused_by_their_field(client, more, message):
    asked = {"prompt": {"chunks": [{"tokens": [30]}]}, "sampling_params": {}} | more
    assert message in client.refused("/asample", **asked)[1]


def test_few_tokens_to_choose_from(client):
    def ask(**params):
        asked = {
            "prompt": {"chunks": [{"tokens": [30, 31]}]},
            "sampling_params": {"max_tokens": 3, "seed": 1, **params},
        }
        return client.do("/asample", **asked)

    greedy, first = ask(temperature=0.0)["sequences"][0]["tokens"], ask(top_k=1)["sequences"][0]
    assert first["tokens"] == ask(top_p=1e-6)["sequences"][0]["tokens"] == greedy and first["logprobs"] == [0.0] * 3
    for wrong in ({"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -2}):
        assert ask(**wrong)["error"].startswith("sampling_params: top_k=")
    assert ask(temperature=1e-30)["error"].startswith("sampling_params.temperature=1e-30: ")


def test_numbers_of_samples_count_within_a_session_alone(client):
    asked = {"seq_id": 1, "sampling_params": {"max_tokens": 1}}
    done = [
        client.do("/asample", prompt={"chunks": [{"tokens": [30, 31]}]}, num_samples=n, **asked)["sequences"]
        for n in (1, 2)
    ]
    assert [*map(len, done)] == [1, 2]


# --- models and checkpoints ---


def test_checkpoints_are_listed_loaded_and_deleted(client):
    model = client.model(rank=2, train_attn=False)
    model.train([GOOD])
    model.step(**STEP)
    path = model.do("/save_weights", path="first.1", user_metadata={"a": "b"})["path"]
    named = model.do("/save_weights_for_sampler", path="second")["path"]
    assert path == f"tinker://{model.id}/weights/first.1"
    listed = client.http.get(f"/training_runs/{model.id}/checkpoints").json()["checkpoints"]
    assert [(c["checkpoint_type"], c["tinker_path"]) for c in listed] == [("training", path), ("sampler", named)]
    assert listed[0]["user_metadata"] == {"a": "b"} and listed[0]["size_bytes"] > 10**6 > listed[1]["size_bytes"]
    assert client.post("/weights_info", tinker_path=path) == {
        "base_model": "tiny",
        "is_lora": True,
        "lora_rank": 2,
        "train_unembed": False,
        "train_mlp": True,
        "train_attn": False,
    }
    asked = {"session_id": client.session(), "model_seq_id": 0, "path": path, "optimizer": True}
    twin = client.do("/load_weights", **asked)["model_id"]
    assert same(client.learner.tensors(twin), parts(model)), "with its optimiser"
    before = parts(model)
    assert "there is a checkpoint of this name" in model.do("/save_weights", path="first.1")["error"]
    model.train([GOOD])
    model.step(**STEP)
    assert model.do("/save_weights", path="first.1", overwrite=True)["path"] == path
    assert not same(parts(model), before)
    model.do("/load_weights", path=path, optimizer=False)
    assert {key.partition("/")[0] for key in parts(model)} == {"weight"}, "the optimiser begins anew"
    other = client.model(rank=3)
    kept = parts(other)
    assert "has shape" in other.do("/load_weights", path=path, optimizer=True)["error"] and same(parts(other), kept)
    assert "are for sampling" in other.do("/load_weights", path=named, optimizer=True)["error"]
    for checkpoint in listed:
        url = f"/training_runs/{model.id}/checkpoints/{checkpoint['checkpoint_id']}"
        assert client.http.delete(url).status_code == 204 and client.http.delete(url).status_code == 404
    assert client.http.get(f"/training_runs/{model.id}/checkpoints").json() == {"checkpoints": []}
    assert client.refused("/load_weights", **asked | {"model_seq_id": 1})[0] == 404


def test_a_checkpoint_is_a_model_folder_with_an_adapter(client):
    model = client.model(rank=2)
    model.train([text(20)])
    model.step(learning_rate=0.05)
    model.do("/save_weights", path="whole")
    folder = Path(client.folder) / "models" / model.id.replace(":", "-") / "weights" / "whole"
    assert verify(folder) == 1 and model_of(str(folder)).path == str(folder)
    merged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.tensor([GOOD["model_input"]["chunks"][0]["tokens"]])
    targets = torch.tensor(GOOD["loss_fn_inputs"]["target_tokens"]["data"])
    with torch.no_grad():
        t = merged(input_ids=tokens).logits[0].log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(model.logprobs([GOOD])[0], t.tolist(), atol=1e-5, rtol=0)
    assert load_file(folder / "adapter" / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("route", "body", "code", "message"),
    [
        ("/create_model", {"base_model": "large"}, 400, "base_model='large': this server has tiny"),
        ("/create_model", {"session_id": "x"}, 404, "session_id='x'"),
        ("/create_model", {"lora_config": {"rank": 0}}, 400, "lora_config.rank=0"),
        ("/create_model", {"lora_config": {"rank": 999}}, 400, "lora_config.rank=999"),
        ("/create_model", {"lora_config": {"rank": 2, "seed": 2**63}}, 400, "lora_config.seed"),
        ("/create_model", {"optimizer_config": {"type": "dimuon"}}, 400, "'dimuon'"),
        ("/create_model", {"model_seq_id": -4}, 400, "model_seq_id"),
        ("/create_model", {"model_seq_id": "x"}, 400, "$.model_seq_id"),
    ],
)
def test_models_that_cannot_be_are_refused(client, route, body, code, message):
    asked = {"session_id": client.session(), "model_seq_id": 0, "base_model": "tiny"} | body
    refused = client.refused(route, **asked)
    assert refused[0] == code and message in refused[1]


def test_names_and_models_that_are_not_there(client, model):
    for path in ("a/b", "../x", ".hidden", "", "x" * 200, "a.writing"):
        assert client.refused("/save_weights", model_id=model.id, path=path)[1].startswith("path=")
    assert "'inflight'" in client.refused("/save_weights_for_sampler", model_id=model.id, kind="inflight")[1]
    assert client.refused("/optim_step", model_id="nobody", adam_params={})[0] == 404
    assert client.refused("/retrieve_future", request_id=f"{model.id}:99999")[0] == 410
    assert client.refused("/get_info", model_id="nobody")[0] == 404
    none = client.do("/create_model", session_id=client.session(), model_seq_id=0, base_model="tiny", lora_config=NONE)
    assert "no layers are left" in none["error"]


NONE = {"rank": 2, "train_attn": False, "train_mlp": False}


# --- doors ---


def test_the_key_is_asked_of_every_request(client):
    url = str(client.http.base_url)
    for headers in ({}, {"X-API-Key": "tml-other"}, {"Authorization": f"Basic {KEY}x"}):
        assert httpx.post(f"{url}create_session", json={}, headers=headers).status_code == 401
        assert httpx.get(f"{url}nowhere", headers=headers).status_code == 401
    assert httpx.get(f"{url}healthz", headers={"Authorization": f"Bearer {KEY}"}).json() == {"status": "ok"}


def test_requests_that_nobody_can_read(client, model):
    for content in (b"", b"{", b"\xff", b"[" * 100000, b"null"):
        assert client.http.post("/optim_step", content=content).status_code == 400
    packed = client.http.post("/optim_step", content=b"x", headers={"Content-Encoding": "zstd"})
    assert packed.status_code == 415
    for content in (b"\xff\xff", b"\x0a\xff"):
        answer = client.http.post("/forward_backward", content=content, headers=PROTOBUF)
        assert answer.status_code == 400 and "protobuf" in answer.json()["detail"]
    assert client.http.get("/nowhere").status_code == 404


def test_a_large_body_is_refused(client, monkeypatch):
    monkeypatch.setattr("prl.tinker.server.LONGEST_BODY", 1000)
    assert client.http.post("/optim_step", content=b" " * 2000).status_code == 413


PROTOBUF = {"Content-Type": "application/x-protobuf", "Accept": "application/x-protobuf"}
