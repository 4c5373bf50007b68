"""The official SDK, as it is, against the server: a table of its calls, whose answers are those of plain torch."""

import asyncio
import contextlib
import json
import subprocess
import sys

import numpy as np
import pytest
import tinker
import torch
from safetensors.torch import load_file
from tinker import types
from tinker_reference import adapter_of, datum, logprobs_of, plain, sequence, target_logprobs, text
from tinker_server import KEY

from prl.models import model_path

ADAM = types.AdamParams(learning_rate=0.05, beta1=0.8, beta2=0.9, eps=2.0)
"""With a large eps a step follows the size of the gradient, which Adam would hide."""
PROMPT = types.ModelInput.from_ints([30, 31, 32, 33, 34])
LOSSES = {
    "cross_entropy": lambda t, d: -(t * d["weights"]).sum(),
    "importance_sampling": lambda t, d: -((t - d["logprobs"]).exp() * d["advantages"]).sum(),
    "cispo": lambda t, d: -((t - d["logprobs"]).exp().clamp(0.8, 1.2).detach() * d["advantages"] * t).sum(),
    "dro": lambda t, d: -(t * d["advantages"] - 0.05 / 2 * (t - d["logprobs"]).square()).sum(),
}


@pytest.fixture(scope="module")
def url(client):
    return str(client.http.base_url).partition("/api")[0]


@pytest.fixture(scope="module")
def service(url):
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TINKER_TELEMETRY", "0")
        patched.setenv("TINKER_API_KEY", KEY)  # a client made of a handle has it from there
        service = tinker.ServiceClient(user_metadata={"a": "b"}, base_url=url)
        yield service
        service.close("success").result()


@pytest.fixture(scope="module")
def rest(service):
    return service.create_rest_client()


@pytest.fixture(scope="module")
def model(service):
    """A model whose adapter does something."""
    model = service.create_lora_training_client("tiny", rank=3, seed=1).result()
    model.forward_backward([text(20, seed=9)], "cross_entropy").result()
    model.optim_step(types.AdamParams(learning_rate=0.005)).result()
    return model


@contextlib.contextmanager
def refused(what):
    """The block raises an error of the SDK that names what the server does not do."""
    with pytest.raises((tinker.TinkerError, tinker.APIError), match=what):
        yield


def inputs_of(name, length, sampled, seed):
    """Inputs of a datum, whose prompt has neither advantages nor logprobs."""
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.arange(length) < 4
    if name == "cross_entropy":
        return {"weights": torch.rand(length, generator=generator) * ~prompt}
    near = sampled + 0.4 * torch.randn(length, generator=generator)
    advantages = torch.randn(length, generator=generator)
    return {"logprobs": near.masked_fill(prompt, 0.0), "advantages": advantages.masked_fill(prompt, 0.0)}


@pytest.mark.parametrize("name", LOSSES)
def test_passes_and_steps_are_those_of_plain_torch(client, service, model, name):
    twin = service.create_training_client_from_state(model.save_state(f"at-{name}").result().path).result()
    reference = plain(adapter_of(client, twin, "before"))
    data, expected, loss = [], [], torch.zeros((), dtype=torch.float64)
    for length in (9, 30, 17, 30):
        tokens, targets = sequence(length, seed=length)
        t = target_logprobs(reference, tokens, targets)
        given = inputs_of(name, length, t.detach(), seed=length)
        data.append(datum(tokens, targets, **given))
        expected.append(t.detach())
        loss = loss + LOSSES[name](t, {key: value.float().double() for key, value in given.items()})
    loss.backward()
    torch.optim.AdamW(reference.parameters(), lr=0.05, betas=(0.8, 0.9), eps=2.0, weight_decay=0.0).step()
    passed, stepped = twin.forward_backward(data, name), twin.optim_step(ADAM)
    assert passed.result().metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-5, abs=2e-4)
    for own, t in zip(logprobs_of(passed.result()), expected, strict=True):
        torch.testing.assert_close(own.double(), t, atol=1e-5, rtol=0)
    assert stepped.result().metrics["step:max"] == 1.0
    after = load_file(adapter_of(client, twin, "after") / "adapter_model.safetensors")
    for key, parameter in reference.named_parameters():
        if "lora_" in key:
            own = after[key.replace(".default", "")]
            torch.testing.assert_close(own.double(), parameter.detach(), atol=1e-5, rtol=0)


def nll(logprobs, weights):
    loss = -(logprobs * weights).sum()
    return loss, {"custom/nll:mean": torch.nn.functional.softplus(loss) / logprobs.shape[0]}


def test_many_data_several_targets_and_losses_of_the_client(client, service, model):
    tokens, targets = sequence(12, seed=3)
    several = torch.tensor([[target, *targets[:2]] for target in targets])
    weights = torch.rand(12, 3, generator=torch.Generator().manual_seed(1)) * (torch.arange(12) > 5)[:, None]
    t = target_logprobs(plain(adapter_of(client, model, "several")), tokens, several).detach()
    sparse = model.forward([datum(tokens, several, weights=weights), text(5)], "cross_entropy").result()
    own, other = logprobs_of(sparse)
    torch.testing.assert_close(own.double(), t, atol=1e-5, rtol=0)
    assert sparse.metrics["loss:sum"] == pytest.approx(-(t * weights).sum().item() - other.sum().item(), rel=1e-5)

    model.optim_step(types.AdamParams(learning_rate=0.0)).result()
    [one] = logprobs_of(model.forward_backward([text(6)], "cross_entropy").result())
    norm = model.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics["unclipped_grad_l2:mean"]
    custom = model.forward_backward_custom([text(6)], lambda data, t: (-t[0].sum(), {"mine": 1.0}))
    assert custom.result().metrics["mine"] == 1.0
    again = model.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics["unclipped_grad_l2:mean"]
    assert again == pytest.approx(norm, rel=1e-5)
    handle = service.create_custom_loss(nll, {"logprobs": 1, "weights": 1}).result()
    assert handle.loss_id is not None, "the server runs it"
    traced = model.forward_backward_custom([text(6)], handle).result().metrics
    expected = torch.nn.functional.softplus(-one.sum()).item() / 6
    assert traced == pytest.approx({"loss:sum": -one.sum().item(), "custom/nll:mean": expected}, rel=1e-5)
    again = model.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics["unclipped_grad_l2:mean"]
    assert again == pytest.approx(norm, rel=1e-5)

    many = model.forward([text(6)] * 1100, "cross_entropy")  # more than the SDK sends in one request
    assert len(many.result().loss_fn_outputs) == 1100
    torch.testing.assert_close(logprobs_of(many.result())[-1], one, atol=1e-5, rtol=0)


def test_what_cannot_be_is_an_error_with_the_reason_and_the_client_goes_on(service, model):
    nothing = torch.full((6,), float("nan"))
    rl = datum(*sequence(6), logprobs=torch.zeros(6), advantages=nothing)
    with refused(r"data\[0\]\.loss_fn_inputs\.advantages\[0\] is not a finite number"):
        model.forward_backward([rl], "ppo").result()
    with refused("choose importance_sampling"):
        model.forward([rl], "stable_reinforce").result()
    with refused("dimuon"):
        service.create_lora_training_client("tiny", optimizer=types.DimuonOptimizerConfig()).result()
    with refused("this server has tiny"):
        service.create_lora_training_client("large").result()
    with refused("max_rank=128"):
        service.create_lora_training_client("tiny", rank=4096).result()
    with refused("path='../x'"):
        service.create_lora_training_client("tiny", rank=1).result().save_state("../x").result()
    picture = types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png", expected_tokens=3)])
    with refused("encoded_text alone"):
        service.create_sampling_client(base_model="tiny").sample(picture, 1, types.SamplingParams()).result()
    assert model.forward([text(6)], "cross_entropy").result().metrics["loss:sum"] > 0


def test_samples_are_those_of_the_model(client, service, model):
    sampler = model.save_weights_and_get_sampling_client()
    reference = plain(adapter_of(client, model, "sampled"))
    params = types.SamplingParams(max_tokens=8, seed=1)
    replies = sampler.sample(PROMPT, 4, params).result().sequences
    for reply in replies:
        tokens = PROMPT.to_ints() + reply.tokens
        t = target_logprobs(reference, tokens[:-1], tokens[1:]).detach()[len(PROMPT.to_ints()) - 1 :]
        torch.testing.assert_close(torch.tensor(reply.logprobs).double(), t, atol=1e-5, rtol=0)
    again = sampler.sample(PROMPT, 4, params).result().sequences
    assert [reply.tokens for reply in again] == [reply.tokens for reply in replies]
    named = service.create_sampling_client(model_path=model.save_weights_for_sampler("two").result().path)
    assert [reply.tokens for reply in named.sample(PROMPT, 4, params).result().sequences] == [
        reply.tokens for reply in replies
    ]
    greedy = types.SamplingParams(max_tokens=20, temperature=0.0, stop=[])
    assert len(sampler.sample(PROMPT, 1, greedy).result().sequences[0].tokens) == 20
    ended = types.SamplingParams(max_tokens=20, temperature=0.0, stop=[replies[0].tokens[0]])
    assert sampler.sample(PROMPT, 1, ended).result().sequences[0].stop_reason in ("stop", "length")
    scored = sampler.compute_logprobs(PROMPT).result()
    t = target_logprobs(reference, PROMPT.to_ints()[:-1], PROMPT.to_ints()[1:]).detach()
    assert scored[0] is None
    torch.testing.assert_close(torch.tensor(scored[1:]).double(), t, atol=1e-5, rtol=0)
    one = types.SamplingParams(max_tokens=1)
    likely = sampler.sample(PROMPT, 1, one, include_prompt_logprobs=True, topk_prompt_logprobs=3).result()
    assert likely.prompt_logprobs == pytest.approx(scored) and len(likely.topk_prompt_logprobs[1]) == 3
    last = sampler.sample(PROMPT, 1, one, include_prompt_logprobs=True, prompt_logprobs_last_n=2).result()
    assert last.prompt_logprobs[:3] == [None] * 3
    top = sampler.sample(PROMPT, 1, one, topk_sample_logprobs=2).result().sequences[0].topk_logprobs
    assert len(top[0]) == 2
    with refused("prompt_alt_tokens_k"):
        sampler.sample(PROMPT, 1, one, prompt_alt_tokens_k=2).result()


def test_clients_of_one_sampling_session_share_it(service):
    sampler = service.create_sampling_client(base_model="tiny")
    other = tinker.SamplingClient.from_sampler_handle(sampler.get_sampler_handle())
    params = types.SamplingParams(max_tokens=4, temperature=0.0)
    one, two = (some.sample(PROMPT, 1, params).result().sequences[0] for some in (sampler, other))
    assert one.tokens == two.tokens


def test_a_sample_that_nobody_waits_for_is_cancelled(client, service):
    sampler = service.create_sampling_client(base_model="tiny")
    long = types.SamplingParams(max_tokens=120, stop=[])

    async def abandoned():
        waiting = [asyncio.ensure_future(sampler.sample_async(PROMPT, 1, long)) for _ in range(8)]
        await asyncio.sleep(0.5)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(abandoned())
    assert len(sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=2, stop=[])).result().sequences[0].tokens) == 2
    asked = {"prompt": {"chunks": [{"tokens": [30]}]}, "sampling_params": {"max_tokens": 120, "stop": []}}
    answer = client.post("/asample", **asked)
    assert client.http.post("/cancel_future", json={"request_id": answer["request_id"]}).status_code == 204
    assert client.result(answer)["error"] == "this request was cancelled"


def test_state_is_saved_loaded_listed_and_removed(service, rest, model):
    info = model.get_info()
    assert (info.model_id, info.lora_rank, info.is_lora) == (model.model_id, 3, True)
    assert model.get_tokenizer().decode(model.get_tokenizer().encode("3 + 4")) == "3 + 4"
    before = model.forward([text(9)], "cross_entropy").result()
    saved = model.save_state("one", ttl_seconds=3600, user_metadata={"x": "y"}).result().path
    twin = service.create_training_client_from_state_with_optimizer(saved).result()
    np.testing.assert_array_equal(
        *(logprobs_of(x)[0] for x in (before, twin.forward([text(9)], "cross_entropy").result()))
    )
    twin.forward_backward([text(9)], "cross_entropy").result()
    twin.optim_step(types.AdamParams(learning_rate=0.1, grad_clip_norm=1.0, weight_decay=0.1)).result()
    twin.load_state_with_optimizer(saved).result()
    assert twin.optim_step(ADAM).result().metrics["step:max"] > 1, "the count of steps is that of the state"
    twin.load_state(saved).result()
    assert twin.optim_step(ADAM).result().metrics["step:max"] == 1
    with refused("there is a checkpoint of this name"):
        model.save_state("one").result()
    model.save_state("one", overwrite=True, ttl_seconds=7200).result()

    [one] = [c for c in rest.list_checkpoints(model.model_id).result().checkpoints if c.tinker_path == saved]
    assert one.checkpoint_type == "training" and 7100 < (one.expires_at - one.time).total_seconds() < 7300
    rest.set_checkpoint_ttl_from_tinker_path(saved, None).result()
    run = rest.get_training_run(model.model_id).result()
    assert run.last_checkpoint.tinker_path == saved and run.last_checkpoint.expires_at is None
    assert rest.get_training_run_by_tinker_path(saved).result() == run and run.base_model == "tiny"
    runs = rest.list_training_runs(limit=2, offset=1).result()
    assert len(runs.training_runs) == 2 and runs.cursor.offset == 1 and runs.cursor.total_count > 2
    assert saved in [c.tinker_path for c in rest.list_user_checkpoints(limit=1000).result().checkpoints]
    weights = rest.get_weights_info_by_tinker_path(saved).result()
    assert (weights.base_model, weights.lora_rank, weights.train_mlp) == ("tiny", 3, True)
    session_id = model.model_id.partition(":")[0]
    session = rest.get_session(session_id).result()
    assert model.model_id in session.training_run_ids and session.user_metadata == {"a": "b"}
    assert session_id in rest.list_sessions(limit=1000).result().sessions
    assert rest.get_sampler(session.sampler_ids[0]).result().base_model == "tiny"
    assert rest.get_server_capabilities().result().supported_models[0].model_name == "tiny"

    rest.delete_checkpoint_from_tinker_path(saved).result()
    with refused("no such checkpoint"):
        service.create_training_client_from_state(saved).result()


def test_what_one_machine_does_not_do_is_refused_by_name(rest, model):
    path = model.save_weights_for_sampler("kept").result().path
    kept = "checkpoints are folders of the server's machine"
    for ask in (rest.publish_checkpoint_from_tinker_path, rest.unpublish_checkpoint_from_tinker_path):
        with refused(f"publish: .*{kept}"):
            ask(path).result()
    with refused("copy_weights: .*create_training_client_from_state"):
        rest.copy_weights(path, "another project").result()


@pytest.mark.slow
def test_a_recipe_of_the_cookbook_runs_to_its_end(url, tmp_path):
    options = {
        "env": "arithmetic",
        "model_name": model_path("tiny"),
        "renderer_name": "role_colon",
        "base_url": url,
        "log_path": tmp_path / "log",
        "loss_fn": "importance_sampling",
        "groups_per_batch": 8,
        "max_tokens": 8,
        "learning_rate": 1e-3,
        "max_steps": 3,
    }
    command = [sys.executable, "-m", "tinker_cookbook.recipes.math_rl.train", *(f"{k}={v}" for k, v in options.items())]
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TINKER_API_KEY", KEY)
        patched.setenv("HF_HUB_OFFLINE", "1")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Training completed successfully" in done.stdout + done.stderr
    steps = [json.loads(line) for line in (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()]
    gaps = [step["optim/kl_sample_train_v2"] for step in steps if "optim/kl_sample_train_v2" in step]
    assert len(gaps) == 3 and max(gaps) < 1e-9, "sampler and trainer are one model in float32"
