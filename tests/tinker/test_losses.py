"""Losses, gradients and steps of the server against plain torch and peft in float64."""

import json
import math
import re

import pytest
import torch
from safetensors.torch import load_file
from tinker_reference import folder_of, plain, target_logprobs
from tinker_server import datum, text

from prl.tinker import wire
from prl.tinker.graph import Traced
from prl.tinker.wire import RequestError

LENGTHS = (9, 30, 17, 30)
ADAM = {"learning_rate": 0.05, "beta1": 0.8, "beta2": 0.9, "eps": 2.0}
"""With a large eps a step follows the size of the gradient, which Adam would hide."""


def cross_entropy(t, d):
    return -(t * d["weights"]).sum()


def importance_sampling(t, d):
    return -((t - d["logprobs"]).exp() * d["advantages"]).sum()


def ppo(t, d, low=0.8, high=1.2):
    r = (t - d["logprobs"]).exp()
    return -torch.minimum(r * d["advantages"], r.clamp(low, high) * d["advantages"]).sum()


def cispo(t, d, low=0.8, high=1.2):
    r = (t - d["logprobs"]).exp().clamp(low, high).detach()
    return -(r * d["advantages"] * t).sum()


def dro(t, d, beta=0.05):
    return -(t * d["advantages"] - beta / 2 * (t - d["logprobs"]).square()).sum()


def gspo(t, d, low=1 - 3e-4, high=1 + 4e-4):
    on = d["sequence_ratio_mask"]
    mean = ((t - d["logprobs"]) * on).sum() / on.sum()
    # The value of the sequence's ratio, with the gradient of each token's own logprob.
    s = (mean.detach() + t - t.detach()).exp()
    return -(torch.minimum(s * d["advantages"], s.clamp(low, high) * d["advantages"]) * on).sum()


CASES = [
    ("cross_entropy", cross_entropy, {}),
    ("importance_sampling", importance_sampling, {}),
    ("ppo", ppo, {}),
    ("ppo", lambda t, d: ppo(t, d, 0.9, 1.05), {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}),
    ("cispo", cispo, {}),
    ("cispo", lambda t, d: cispo(t, d, 0.5, 1.0), {"clip_low_threshold": 0.5, "clip_high_threshold": 1.0}),
    ("dro", dro, {}),
    ("dro", lambda t, d: dro(t, d, 0.7), {"beta": 0.7}),
    ("gspo", gspo, {}),
    ("gspo", lambda t, d: gspo(t, d, 0.8, 1.3), {"clip_low_threshold": 0.8, "clip_high_threshold": 1.3}),
]


def inputs(name, length, sampled, generator):
    """Inputs of a datum, whose prompt has neither advantages nor logprobs."""
    prompt = torch.arange(length) < 4
    if name == "cross_entropy":
        return {"weights": torch.rand(length, generator=generator) * ~prompt}
    given = {
        "logprobs": (sampled + 0.4 * torch.randn(length, generator=generator)).masked_fill(prompt, 0.0),
        "advantages": torch.randn(length, generator=generator).masked_fill(prompt, 0.0),
    }
    return given | ({"sequence_ratio_mask": (~prompt).float()} if name == "gspo" else {})


def node(op, name, target, *args, **kwargs):
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


def ref(name):
    return {"ref": name}


CLIPPED = [
    *(node("placeholder", name, name) for name in ("logprobs", "logprobs_old", "advantages")),
    node("call_function", "d", "operator.sub", ref("logprobs"), ref("logprobs_old")),
    node("call_function", "r", "torch.exp", ref("d")),
    node("call_function", "c", "torch.clamp", ref("r"), min=0.8, max={"float": "inf"}),
    node("call_method", "m", "minimum", ref("c"), ref("r")),
    node("call_function", "w", "operator.mul", ref("m"), ref("advantages")),
    node("call_function", "t", "operator.getitem", ref("w"), {"slice": [1, None, None]}),
    node("call_method", "s", "sum", ref("t"), dtype={"dtype": "float64"}),
    node("call_function", "shape", "getattr", ref("w"), "shape"),
    node("call_function", "n", "operator.getitem", ref("shape"), 0),
    node("call_function", "loss", "operator.truediv", ref("s"), ref("n")),
    node("output", "output", "output", {"tuple": [ref("loss"), {"dict": {"custom/w:mean": ref("loss")}}]}),
]
"""A loss as the SDK sends it."""
INPUTS = [{"name": name, "rank": 1} for name in ("logprobs", "logprobs_old", "advantages")]


def traced(client, nodes, session=None):
    body = {"session_id": session or client.session(), "custom_loss_seq_id": 0, "name": "loss", "inputs": INPUTS}
    return client.http.post("/create_custom_loss", json={**body, "graph": {"format": 1, "nodes": nodes}})


def test_a_traced_loss_is_that_of_the_client(client, trained):
    model = trained[0]
    loss_id = client.result(traced(client, CLIPPED).json())["loss_id"]
    data, expected = [], torch.zeros(2, dtype=torch.float64)
    for length in (9, 14):
        given = text(length, seed=length)
        tokens, targets = given["model_input"]["chunks"][0]["tokens"], given["loss_fn_inputs"]["target_tokens"]["data"]
        t = target_logprobs(plain(trained[1]), tokens, targets)
        old = (t.detach() + 0.4 * torch.randn(length, generator=torch.Generator().manual_seed(length))).float()
        data.append(datum(tokens, targets, logprobs_old=old, advantages=torch.linspace(-1, 1, length)))
        ratio = (t - old).exp()
        of_one = (torch.minimum(ratio.clamp(min=0.8), ratio) * torch.linspace(-1, 1, length))[1:].sum() / length
        expected += torch.stack([of_one.detach(), of_one.detach() / 2])
    result = model.forward(data, "custom", {"loss_id": loss_id})
    assert result["metrics"] == pytest.approx(
        {"loss:sum": expected[0].item(), "custom/w:mean": expected[1].item()}, abs=1e-4
    )
    short = datum(range(30, 35), range(31, 36), logprobs_old=[0.0] * 5, advantages=[1.0] * 4 + [0.0])
    short["loss_fn_inputs"]["advantages"] |= {"data": [1.0] * 4, "shape": [4]}
    failed = client.result(
        model.send(
            "/forward_backward",
            forward_backward_input={"data": [short], "loss_fn": "custom", "loss_fn_config": {"loss_id": loss_id}},
        )
    )
    assert failed["error"].startswith("graph.w: operator.mul: The size of tensor a (5)")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (node("call_function", "x", "os.system", "true"), "graph.x: call_function os.system is none of the operations"),
        (node("call_method", "x", "backward", ref("s")), "graph.x: call_method backward is none of"),
        (node("call_module", "x", "linear", ref("s")), "graph.x: call_module linear is none of"),
        (node("get_attr", "x", "_constant"), "graph.x: get_attr _constant is none of"),
        (node("placeholder", "x", "weights"), "inputs: these are not those of the graph"),
    ],
)
def test_operations_that_are_not_allowed_are_named(client, wrong, message):
    answer = traced(client, [*CLIPPED[:-1], wrong, CLIPPED[-1]])
    assert answer.status_code == 400 and message in answer.json()["detail"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (node("call_function", "x", "getattr", ref("d"), "__class__"), "the attribute '__class__' is not taken"),
        (node("call_function", "x", "operator.mul", "a", 10**9), "numbers are wanted"),
        (node("call_function", "x", "operator.pow", 9, 10**12), "a tensor is wanted"),
        (node("call_function", "x", "torch.stack", [ref("d")] * 5000), "more than 16777216 numbers"),
        (node("call_method", "x", "to", ref("d"), {"device": "cuda"}), "an argument that is a device is not taken"),
        (node("call_method", "x", "sum", ref("nowhere")), "nowhere"),
        (node("call_method", "x", "sum", "a"), "x: sum: "),
    ],
)
def test_operations_that_fail_are_named(client, wrong, message):
    traced_loss = Traced.of_id(traced(client, [*CLIPPED[:-1], wrong, CLIPPED[-1]]).json()["request_id"])
    with pytest.raises(RequestError, match=re.escape(message)):
        traced_loss.run([torch.zeros(4000)] * 3)


def test_a_traced_loss_without_a_gradient_is_refused(client, trained):
    nodes = [
        *CLIPPED[:3],
        node("call_method", "e", "exp", ref("logprobs")),
        node("call_function", "r", "torch.nn.functional.relu", ref("e"), True),  # in place of what exp needs
        node("call_method", "s", "sum", ref("r")),
        node("output", "output", "output", {"tuple": [ref("s"), {"dict": {}}]}),
    ]
    loss_id = traced(client, nodes).json()["request_id"]
    one = datum(range(30, 35), range(31, 36), logprobs_old=[0.0] * 5, advantages=[1.0] * 5)
    failed = trained[0].train([one], "custom", {"loss_id": loss_id})
    assert failed["category"] == "user" and failed["error"].startswith("graph: its gradient cannot be computed: ")


@pytest.mark.parametrize("name", ["ppo", "cispo"])
def test_bounds_of_each_token_come_before_those_of_the_call(client, trained, name):
    given = text(12)
    tokens, targets = given["model_input"]["chunks"][0]["tokens"], given["loss_fn_inputs"]["target_tokens"]["data"]
    t = target_logprobs(plain(trained[1]), tokens, targets).detach()
    old, advantages = (t + torch.linspace(-0.5, 0.5, 12)).float(), torch.linspace(1, -1, 12)
    low = torch.linspace(0.5, 1.0, 12)
    sent = datum(tokens, targets, logprobs=old, advantages=advantages, clip_low_threshold=low)
    found = trained[0].forward([sent], name, {"clip_high_threshold": 1.1})["metrics"]["loss:sum"]
    loss = {"ppo": ppo, "cispo": cispo}[name](
        t, {"logprobs": old, "advantages": advantages}, low, torch.full((12,), 1.1)
    )
    assert found == pytest.approx(loss.item(), abs=12e-5)


def saved(model, name):
    return folder_of(model.client, model.do("/save_weights_for_sampler", path=name)["path"]) / "adapter"


@pytest.fixture(scope="module")
def trained(client):
    """A model whose adapter does something, and its folder."""
    model = client.model(rank=3)
    model.train([text(20, seed=9)])
    model.step(learning_rate=0.02)
    return model, saved(model, "start")


@pytest.mark.parametrize(("name", "formula", "config"), CASES)
def test_a_loss_its_gradient_and_a_step_are_those_of_plain_torch(client, trained, name, formula, config):
    source, folder = trained
    generator = torch.Generator().manual_seed(len(name))
    reference = plain(folder)
    sequences = [text(length, seed=length + place) for place, length in enumerate(LENGTHS)]
    data, loss, expected = [], torch.zeros((), dtype=torch.float64), []
    for sequence in sequences:
        tokens = sequence["model_input"]["chunks"][0]["tokens"]
        targets = sequence["loss_fn_inputs"]["target_tokens"]["data"]
        t = target_logprobs(reference, tokens, targets)
        given = inputs(name, len(tokens), t.detach(), generator)
        given = {key: value.float() for key, value in given.items()}
        data.append(datum(tokens, targets, **given))
        expected.append(t.detach())
        loss = loss + formula(t, {key: value.double() for key, value in given.items()})
    loss.backward()
    torch.optim.AdamW(
        reference.parameters(), lr=ADAM["learning_rate"], betas=(0.8, 0.9), eps=ADAM["eps"], weight_decay=0.0
    ).step()

    model = client.model(rank=3)
    path = source.do("/save_weights", path=f"at-{name}-{len(config)}")["path"]
    assert model.do("/load_weights", path=path, optimizer=False)["type"] == "load_weights"
    result = model.train(data, name, config)
    assert result["metrics"]["loss:sum"] == pytest.approx(loss.item(), rel=1e-5, abs=sum(LENGTHS) * 1e-5)
    for output, t in zip(result["loss_fn_outputs"], expected, strict=True):
        torch.testing.assert_close(torch.tensor(output["logprobs"]["data"]).double(), t, atol=1e-5, rtol=0)
    norm = math.sqrt(sum(p.grad.square().sum().item() for p in reference.parameters() if p.grad is not None))
    assert model.step(**ADAM)["metrics"]["unclipped_grad_l2:mean"] == pytest.approx(norm, rel=1e-5)
    after = load_file(saved(model, "after") / "adapter_model.safetensors")
    for key, parameter in reference.named_parameters():
        if "lora_" in key:
            own = after[key.replace(".default", "")]
            torch.testing.assert_close(own.double(), parameter.detach(), atol=1e-5, rtol=0)


def test_several_targets_in_one_position_and_a_sparse_matrix(client, trained):
    source, folder = trained
    tokens = list(range(30, 42))
    targets = torch.randint(20, 90, (12, 3), generator=torch.Generator().manual_seed(0))
    weights = torch.rand(12, 3, generator=torch.Generator().manual_seed(1)) * (torch.arange(12) > 5)[:, None]
    t = target_logprobs(plain(folder), tokens, targets).detach()
    whole = datum(tokens, targets, weights=weights)
    sparse = datum(tokens, targets, weights=weights)
    places, columns = weights.nonzero(as_tuple=True)
    starts = torch.cat([torch.zeros(1), torch.bincount(places, minlength=12).cumsum(0)]).long()
    sparse["loss_fn_inputs"]["weights"] |= {
        "data": weights[places, columns].tolist(),
        "sparse_crow_indices": starts.tolist(),
        "sparse_col_indices": columns.tolist(),
    }
    for given in (whole, sparse):
        result = source.forward([given, text(5)])
        first, second = (output["logprobs"] for output in result["loss_fn_outputs"])
        assert (first["shape"], second["shape"]) == ([12, 3], [5])
        torch.testing.assert_close(torch.tensor(first["data"]).view(12, 3).double(), t, atol=1e-5, rtol=0)
        other = -sum(second["data"])
        assert result["metrics"]["loss:sum"] == pytest.approx(-(t * weights).sum().item() + other, rel=1e-5)


def test_small_requests_that_become_large_are_refused(monkeypatch):
    """Sparse tensors without a number have four bytes for each of their places all the same."""
    monkeypatch.setattr(wire, "UNPACKED", 2 * 16_000 + 1000)  # a datum has 8,000 bytes of targets, 8,000 of weights
    one = datum([7] * 1000, torch.full((1000,), 8))
    empty = {"dtype": "float32", "shape": [1000, 2], "data": [], "sparse_col_indices": []}
    one["loss_fn_inputs"]["weights"] = {**empty, "sparse_crow_indices": [0] * 1001}
    pack = {"data": [one] * 3, "loss_fn": "cross_entropy"}
    few = {"data": [one] * 2, "loss_fn": "cross_entropy"}
    bodies = [
        json.dumps({"model_id": "m", "seq_id": 1, "forward_backward_input": each}).encode() for each in (few, pack)
    ]
    assert len(wire.read_forward(bodies[0], "application/json", False).data) == 2
    with pytest.raises(RequestError, match=r"data\[2\]: the inputs take more than 33000 bytes"):
        wire.read_forward(bodies[1], "application/json", False)


def test_clipping_and_weight_decay_are_those_of_torch(client, trained):
    source, folder = trained
    reference = plain(folder)
    sequence = text(25, seed=4)
    tokens, targets = (
        sequence["model_input"]["chunks"][0]["tokens"],
        sequence["loss_fn_inputs"]["target_tokens"]["data"],
    )
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.1, betas=(0.9, 0.95), eps=1.0, weight_decay=0.3)
    model = client.model(rank=3)
    path = source.do("/save_weights", path="at-clipping")["path"]
    model.do("/load_weights", path=path, optimizer=False)
    for _ in range(3):
        optimizer.zero_grad()
        (-target_logprobs(reference, tokens, targets).sum()).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 5.0)
        optimizer.step()
        model.train([sequence])
        model.step(learning_rate=0.1, eps=1.0, weight_decay=0.3, grad_clip_norm=5.0)
    after = load_file(saved(model, "after") / "adapter_model.safetensors")
    for key, parameter in reference.named_parameters():
        if "lora_" in key:
            own = after[key.replace(".default", "")]
            torch.testing.assert_close(own.double(), parameter.detach(), atol=1e-5, rtol=0)
