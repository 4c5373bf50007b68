"""vLLM samples for all clients of a server at once. One server for these tests, the last of which ends it."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from tinker_server import KEY, Client, datum, text

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("tinker engine")]
PROMPT = list(range(40, 60))
SEEDED = {"max_tokens": 16, "temperature": 1.0, "seed": 5}


class Patient(Client):
    """Waits for a result however long it takes."""

    def result(self, answer):
        while (result := super().result(answer)).get("type") == "try_again":
            pass
        return result


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """A server with room for two adapters."""
    folder = tmp_path_factory.mktemp("served")
    options = ["engine=default", "model=tiny", "model.max_model_len=128", "models=2", "max_rank=8", "port=0"]
    command = [sys.executable, "-m", "prl.serve", "api=tinker", f"dir={folder / 'state'}", *options]
    environment = {**os.environ, "TINKER_API_KEY": KEY, "OMP_NUM_THREADS": "1"}
    with (
        (folder / "printed").open("w") as printed,
        subprocess.Popen(command, env=environment, stderr=printed, cwd=folder) as server,
    ):
        try:
            deadline = time.monotonic() + 240
            while "TINKER_BASE_URL=" not in (text := (folder / "printed").read_text()):
                assert server.poll() is None and time.monotonic() < deadline, text
                time.sleep(0.1)
            client = Patient(text.partition("TINKER_BASE_URL=")[2].split()[0])
            client.server, client.printed = psutil.Process(server.pid), folder / "printed"
            yield client
            client.http.close()
        finally:
            server.send_signal(signal.SIGTERM)


def trained(client, seed, rank=4):
    """A model after three steps, and a sampling session over it."""
    model = client.model(rank=rank, seed=seed)
    for _ in range(3):
        model.train([text(20, seed=seed + place) for place in range(4)])
        model.step(learning_rate=3e-3)
    return model, model.snapshot()


@pytest.fixture(scope="module")
def models(client):
    """Three models with their sampling sessions, and the base."""
    base = client.model(rank=1)
    session = {"session_id": base.session, "sampling_session_seq_id": 99, "base_model": "tiny"}
    sampler = client.post("/create_sampling_session", **session)["sampling_session_id"]
    return [trained(client, 1), trained(client, 2, rank=8), trained(client, 3), (base, sampler)]


def own(model, sequences, prompt=PROMPT):
    """Logprobs of replies by the trainer."""
    whole = [prompt + sequence["tokens"] for sequence in sequences]
    logprobs = model.logprobs([datum(ids[:-1], ids[1:], weights=[1.0] * (len(ids) - 1)) for ids in whole])
    return [values[len(prompt) - 1 :] for values in logprobs]


def close(values, others):
    return all(one == pytest.approx(other, abs=1e-5) for one, other in zip(values, others, strict=True))


def test_four_clients_at_once_are_as_each_alone_and_as_the_trainer(client, models):
    def ask(place, number):
        model, sampler = models[place]
        return model.sample(sampler, PROMPT, n=4, seq=number, params=SEEDED)["sequences"]

    alone = [ask(place, 1) for place in range(4)]
    with ThreadPoolExecutor(12) as threads:  # of three adapters, two have room at once
        several = list(threads.map(ask, [0, 1, 2, 3] * 3, range(2, 14)))
    for place, sequences in enumerate(several):
        expected = alone[place % 4]
        assert [s["tokens"] for s in sequences] == [s["tokens"] for s in expected]
        assert close([s["logprobs"] for s in sequences], [s["logprobs"] for s in expected])
    for (model, _), sequences in zip(models, alone, strict=True):
        assert close([s["logprobs"] for s in sequences], own(model, sequences))
    assert len({str(sequences) for sequences in alone}) == 4


def test_what_is_asked_of_a_sample(client, models):
    model, sampler = models[0]
    numbers = iter(range(100, 200))

    def ask(n=1, more=None, **params):
        return model.sample(sampler, PROMPT, n=n, seq=next(numbers), params=params, **more or {})

    def tokens(**params):
        return ask(**params)["sequences"][0]["tokens"]

    free = tokens(stop=[])
    assert tokens(temperature=1.0, top_k=1, stop=[]) == tokens(temperature=1.0, top_p=1e-6, stop=[]) == free
    cut = free.index(free[3]) + 1
    assert tokens(stop=[free[3]]) == free[:cut]
    [first, second] = ask(n=2, **SEEDED)["sequences"]
    [again] = ask(**SEEDED | {"seed": 6})["sequences"]
    assert again["tokens"] == second["tokens"] != first["tokens"] and close([again["logprobs"]], [second["logprobs"]])
    more = {"prompt_logprobs": True, "topk_prompt_logprobs": 2, "topk_sample_logprobs": 3}
    scored = ask(more=more, temperature=1.0, max_tokens=4)
    assert close([scored["prompt_logprobs"][1:]], own(model, [{"tokens": PROMPT[1:]}], PROMPT[:1]))
    assert [len(place or ()) for place in scored["topk_prompt_logprobs"]] == [0] + [2] * 19
    [sequence] = scored["sequences"]
    for token, logprob, best in zip(*(sequence[k] for k in ("tokens", "logprobs", "topk_logprobs")), strict=True):
        ordered = sorted((value for _, value in best), reverse=True)
        assert [value for _, value in best] == ordered and len(best) == 3
        assert dict(best).get(token, logprob) == pytest.approx(logprob, abs=1e-5)
    refused = ask(temperature=3.0)
    assert refused["category"] == "user" and "temperature must be in [0, 2]" in refused["error"]


def test_all_weights_of_one_model_take_the_place_of_the_base(client, models):
    def ask(model, sampler, number):
        return model.sample(sampler, PROMPT, n=2, seq=number, params=SEEDED)["sequences"]

    before = [ask(*models[place], 200) for place in (0, 3)]
    model, sampler = trained(client, 4, rank=None)
    with ThreadPoolExecutor(3) as threads:
        whole = threads.submit(ask, model, sampler, 1)
        beside = [threads.submit(ask, *models[place], 201) for place in (0, 3)]
    assert close([s["logprobs"] for s in whole.result()], own(model, whole.result()))
    for future, sequences in zip(beside, before, strict=True):
        assert close([s["logprobs"] for s in future.result()], [s["logprobs"] for s in sequences])


def test_an_engine_that_is_killed_is_started_again_once(client, models):
    def kill():
        [core] = [child for child in client.server.children(recursive=True) if "EngineCor" in child.name()]
        core.kill()

    model, sampler = models[0]
    long = {"max_tokens": 100, "temperature": 1.0, "seed": 1, "stop": []}
    before = model.sample(sampler, PROMPT, n=8, seq=300, params=long)
    with ThreadPoolExecutor(1) as threads:
        during = threads.submit(model.sample, sampler, PROMPT, n=8, seq=301, params=long)
        kill()
    assert during.result() == before
    kill()
    assert client.server.wait(60) == 1
    last = client.printed.read_text().splitlines()[-1]
    assert last.startswith("error: process 'engine' ended") and "its engine core was killed by SIGKILL" in last
