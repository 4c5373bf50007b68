"""prl's weight transfer engine within vLLM's worker, with a sender in a thread and a model of one layer."""

import threading
from types import SimpleNamespace

import pytest
import torch
from patience import patient
from safetensors.torch import save_file
from vllm.distributed.weight_transfer import nccl_engine

from prl.engines.vllm import nccl
from prl.engines.vllm.transfer import PolicyTransfer
from prl.engines.vllm.weights import WeightsError
from prl.models import model_path
from prl.transport import gloo

WEIGHT = torch.arange(6.0).reshape(2, 3)
UPDATE = {"names": ["weight"], "dtype_names": ["float32"], "shapes": [[2, 3]]}


class Model(torch.nn.Linear):
    """Loads what it has a place for, as vLLM's models do."""

    def __init__(self):
        super().__init__(3, 2, bias=False)

    def load_weights(self, weights):
        places, taken = dict(self.named_parameters()), set()
        for name, tensor in weights:
            if name in places:
                places[name].data.copy_(tensor)
                taken.add(name)
        return taken


@pytest.fixture
def engine(tmp_path):
    parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    model = SimpleNamespace(model=model_path("tiny"))
    config = SimpleNamespace(parallel_config=parallel, model_config=model, lora_config=None)
    engine = PolicyTransfer(None, config, torch.device("cpu"), Model())
    load(engine, tmp_path / "first", torch.ones(2, 3))  # the first imports for seconds, which no sender would wait
    return engine


def load(engine, folder, weight):
    """Have the engine load a folder with this weight."""
    folder.mkdir()
    save_file({"weight": weight}, folder / "model.safetensors")
    engine.start_weight_update()
    engine.update_weights({"path": str(folder)})
    engine.finish_weight_update()


@pytest.fixture
def sender(engine):
    """Sends one tensor to one engine, to the end or until that breaks off; `init` is what the engine is told."""
    listener = gloo.listening("127.0.0.1")
    address, port = listener.getsockname()
    limit_s = patient(2.0)

    def send():
        try:
            group = gloo.gather(listener, "s", 2, limit_s, lambda: False)
            gloo.broadcast(group, WEIGHT)
            gloo.part(group)
        except RuntimeError as error:
            found.error = error

    thread = threading.Thread(target=send)
    init = {
        "master_address": address,
        "master_port": port,
        "rank_offset": 1,
        "world_size": 2,
        "timeout_s": limit_s,
        "secret": "s",
    }
    found = SimpleNamespace(init=init, thread=thread, error=None)
    thread.start()
    yield found
    thread.join(patient(10.0))
    assert not thread.is_alive(), "it hangs"


def test_a_model_gets_what_is_sent(engine, sender):
    engine.init_transfer_engine(engine.parse_init_info(sender.init))
    engine.start_weight_update()
    engine.update_weights(UPDATE)
    engine.finish_weight_update()
    sender.thread.join(patient(10.0))
    assert torch.equal(engine.model.weight, WEIGHT) and sender.error is None
    engine.start_weight_update()
    with pytest.raises(RuntimeError, match="no sender"):  # each update meets one of its own
        engine.update_weights(UPDATE)


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        ({"shapes": []}, "shorter"),
        ({"shapes": [[2, 4]]}, "must match"),  # the model's own loader says so
        ({"dtype_names": ["float99"]}, "float99"),
        ({"names": ["bias"]}, "the model does not take new weights for weight"),
    ],
)
def test_what_does_not_fit_breaks_the_update_off_and_no_other_begins(engine, sender, damage, error):
    engine.init_transfer_engine(engine.parse_init_info(sender.init))
    engine.start_weight_update()
    with pytest.raises((RuntimeError, ValueError, AttributeError), match=error):
        engine.update_weights(UPDATE | damage)
    with pytest.raises(RuntimeError, match="start the engine again"):
        engine.start_weight_update()
    engine.shutdown()


@pytest.mark.parametrize("gone", [{"path": "no/such/folder"}, {"unknown": 1}])
def test_an_update_with_nothing_to_load_leaves_the_weights_and_the_next_one_goes(engine, tmp_path, gone):
    before = engine.model.weight.clone()
    engine.start_weight_update()
    with pytest.raises((WeightsError, ValueError, TypeError)):
        engine.update_weights(gone)
    assert torch.equal(engine.model.weight, before)
    load(engine, tmp_path / "next", WEIGHT)
    assert torch.equal(engine.model.weight, WEIGHT)


def test_an_engine_that_finds_no_sender_keeps_its_weights(engine):
    listener = gloo.listening("127.0.0.1")
    address, port = listener.getsockname()
    listener.close()
    info = {
        "master_address": address,
        "master_port": port,
        "rank_offset": 1,
        "world_size": 2,
        "timeout_s": 0.3,
        "secret": "s",
    }
    before = engine.model.weight.clone()
    with pytest.raises(RuntimeError):
        engine.init_transfer_engine(engine.parse_init_info(info))
    assert torch.equal(engine.model.weight, before) and not engine.halfway


def test_vllms_own_sender_is_told_and_given_the_same(monkeypatch):
    """Without GPUs: what goes to the engine, and what would go over NCCL."""
    group, sent, told = object(), [], []

    def broadcast(iterator, *, group, post_iter_func, **_):
        sent.extend((group, *each) for each in iterator)

    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: group)
    monkeypatch.setattr(nccl_engine, "packed_nccl_broadcast_producer", broadcast)
    described = [("weight", torch.float32, [2, 3])]
    nccl.send("127.0.0.1", 5, described, iter([("weight", WEIGHT)]), told.append)
    assert sent == [(group, "weight", WEIGHT)]
    (init,) = told
    known = nccl_engine.NCCLWeightTransferEngine.init_info_cls(**init)  # as the engine's workers read it
    assert (known.master_address, known.rank_offset, known.world_size) == ("127.0.0.1", 1, 5) and known.packed
