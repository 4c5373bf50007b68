"""The queues of the models, served in turns, and what becomes of each request.

A request is accepted once: its id is made of the client's own number, so that a retry finds the first one. Training
runs in a thread, one request after the other; the event loop owns the queues and the results.
"""

import asyncio
import contextlib
import hashlib
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file

from prl.base.checkpoint_folders import seal
from prl.base.errors import PrlError
from prl.base.files import write_tensors, writing
from prl.base.text import in_one_line
from prl.config.model_folder import companion_files, tokenizer_files
from prl.config.schema import TinkerConfig
from prl.tinker import graph, losses, wire
from prl.tinker.learner import Learner
from prl.tinker.metrics import Meters
from prl.tinker.sampler import Snapshots
from prl.tinker.store import EPHEMERAL, TENSORS, ModelRecord, ModelStore, Request, State, Store, read_checkpoint, uri_of
from prl.tinker.wire import Lora, RequestError
from prl.trainer.lora import ADAPTER, write_adapters
from prl.trainer.model import write_model

log = logging.getLogger(__name__)
OF_FILES = (OSError, SafetensorError)
"""Errors of rank 0 alone, which has the files: ranks are alike all the same."""
RESULTS = 32
"""Results that a model keeps, the newest."""
SAMPLES = 4096
"""Results of samples that the server keeps."""
SAVED_S = 2.0
"""[s] Work on a model after which its state is written, at least; else 20 times what writing takes."""
ENDS = {"success": "completed", "errored": "failed"}
"""Status of a run, by how a client says that its session has ended."""
Result = dict[str, Any]
T = TypeVar("T")


@dataclass
class Model:
    """A model, what it waits for and the results that it keeps."""

    store: ModelStore
    done: int = 0
    """Number of the last request that has run."""
    order: int = 0
    """Number of the last request that was accepted."""
    queue: deque[tuple[int, Request]] = field(default_factory=deque)
    results: "OrderedDict[str, asyncio.Future[Result]]" = field(default_factory=OrderedDict)
    last: int = 0
    """Number that the client gave its last request."""
    unsaved_s: float = 0.0
    """Seconds of work since the state was written."""
    write_s: float = 0.0
    used_at: float = 0.0

    @property
    def record(self) -> ModelRecord:
        return self.store.record

    @property
    def id(self) -> str:
        return self.store.record.model_id


class Service:
    """All models and sampling sessions of a server.

    Args:
        config: the server's.
        learner: trains.
        sampler: samples.
    """

    def __init__(self, config: TinkerConfig, learner: Learner, sampler: Snapshots):
        self.config, self.learner, self.sampler = config, learner, sampler
        self.name, self.path = config.name, sampler.spec.model.path
        self.store = Store(Path(config.dir).absolute(), self.path)
        code = sampler.spec.model.trust_remote_code
        self.files = companion_files(self.path) | tokenizer_files(self.path, trust_remote_code=code)
        self.meters = Meters(self.path)
        self.models: dict[str, Model] = {}
        self.turns: asyncio.Queue[Model] = asyncio.Queue()
        """Models with requests that wait, but for the one whose turn it is."""
        self.sampled: OrderedDict[str, asyncio.Task[Result]] = OrderedDict()
        self.sampling = 0
        """Replies that are sampled or wait."""
        for model_store in self.store.models():
            self._found(model_store)

    def _found(self, store: ModelStore) -> None:
        """Go on with a model of the server before this one."""
        model = self.models[store.record.model_id] = Model(store)
        saved = store.load()
        if saved is not None:
            model.done, _, state = saved
            model.last = state.last
            for request_id, result in state.results.items():
                model.results[request_id] = asyncio.get_running_loop().create_future()
                model.results[request_id].set_result(result)
        model.order = model.done
        for order, request in store.journal(model.done):
            self._enqueue(model, order, request)

    # --- accepting ---

    def model(self, model_id: str) -> Model:
        """Return a model by its id. Raises RequestError."""
        return looked_up(self.models, model_id, "model_id")

    def models_of(self, session_id: str) -> list[Model]:
        """Return the models of a session."""
        return [model for model in self.models.values() if model.record.session_id == session_id]

    def check_base(self, name: str | None) -> None:
        """Raise RequestError for another base than the server's."""
        if name is not None and name not in (self.name, self.path):
            raise RequestError(f"base_model={name[:200]!r}: this server has {self.name}")

    def create(self, request: wire.NewModel, lora: Lora | None, kind: str, body: bytes) -> dict[str, str]:
        """Accept a new model, by `create` or `restore`. Of one that is there it is a retry. Raises RequestError."""
        looked_up(self.store.sessions.sessions, request.session_id, "session_id")
        if request.model_seq_id is None:
            raise RequestError("model_seq_id is missing")
        self.check_base(request.base_model)
        if lora is not None and not 1 <= lora.rank <= self.config.max_rank:
            raise RequestError(f"lora_config.rank={lora.rank}: it has to be from 1 to max_rank={self.config.max_rank}")
        model_id = f"{request.session_id}:train:{request.model_seq_id}"
        if model_id not in self.models:
            if len(self.models) >= self.config.max_models:
                raise RequestError(f"this server has {len(self.models)} models, of at most {self.config.max_models}")
            record = ModelRecord(model_id, request.session_id, lora, request.user_metadata)
            self.models[model_id] = Model(self.store.add(record))
        model = self.models[model_id]
        if not model.order:  # a server that was killed may have written its record alone
            self._accept(model, Request(f"{model_id}:create", kind, body))
        return {"request_id": f"{model_id}:create", "model_id": model_id}

    def submit(
        self, asked: wire.Numbered, kind: str, body: bytes, content_type: str = "", tokens: int = 0
    ) -> dict[str, str]:
        """Accept a request that was checked, unless it was before. Returns what its result is asked for by.

        Raises RequestError where its tokens and those that wait are too many: then the client is to try again.
        """
        model, number = self.model(asked.model_id), asked.seq_id
        request_id = f"{model.id}:{model.order + 1}-" if number is None else f"{model.id}:{number}"
        if number is None or number > model.last:  # else a retry, or one whose result will be asked for in vain
            self._check_room(tokens)
            self._accept(model, Request(request_id, kind, body, content_type, tokens))
        return {"request_id": request_id, "model_id": model.id}

    def _check_room(self, tokens: int) -> None:
        """Raise RequestError where too many tokens wait; without any, a request may have more."""
        waiting = sum(request.tokens for model in self.models.values() for _, request in model.queue)
        if waiting and tokens and waiting + tokens > self.config.max_queued_tokens:
            most = f"max_queued_tokens={self.config.max_queued_tokens}"
            raise RequestError(f"{waiting} tokens wait, and {tokens} more are above {most}: try again", 429)

    def _accept(self, model: Model, request: Request) -> None:
        model.store.accept(model.order + 1, request)
        self._enqueue(model, model.order + 1, request)

    def _enqueue(self, model: Model, order: int, request: Request) -> None:
        number = request.request_id.rpartition(":")[2]
        if number.isdigit():
            model.last = max(model.last, int(number))
        model.order = order
        model.results[request.request_id] = asyncio.get_running_loop().create_future()
        model.queue.append((order, request))
        if len(model.queue) == 1:
            self.turns.put_nowait(model)

    def read_forward(self, body: bytes, content_type: str, forward_only: bool) -> wire.Forward:
        """Read a pass. Raises RequestError, naming the field, for one that cannot be run."""
        asked = wire.read_forward(body, content_type, forward_only)
        loss, _ = losses.loss_of(asked.loss_fn, asked.config)
        losses.check_data(asked.data, asked.loss_fn, loss, self.learner.vocabulary, self.learner.longest)
        return asked

    # --- results ---

    async def result(self, request_id: str, timeout_s: float) -> Result | None:
        """Wait for the result of a request; None where there is none yet. Raises RequestError where none will be."""
        if request_id.startswith(graph.MARK):
            return {"type": "create_custom_loss", "loss_id": request_id}
        future: asyncio.Future[Result] | None = self.sampled.get(request_id)
        model = self.models.get(request_id.rpartition(":")[0])
        if model is not None:
            future = model.results.get(request_id)
        if future is None:
            raise RequestError(f"request_id={request_id[:200]!r}: its result is not here, or not any more", 410)
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(asyncio.shield(future), timeout_s)
        return None

    # --- training, in turns ---

    async def run(self) -> None:
        """Serve the models in turns, one request of each, until cancelled; then write their states."""
        try:
            while True:
                model = await self.turns.get()
                order, request = model.queue[0]
                running = asyncio.ensure_future(asyncio.to_thread(self._run, model, order, request))
                try:
                    await asyncio.shield(running)
                finally:  # a thread cannot be stopped half way
                    self._finish(model, order, request, await running)
                await asyncio.to_thread(self._save_if_due, model, request.kind)
        except asyncio.CancelledError:  # not where a request has failed half way: then the journal has what counts
            for model in self.models.values():
                if model.id in self.learner.tenants and model.unsaved_s:
                    self._save(model)
            raise
        finally:
            for model in self.models.values():
                self.meters.end(model.store.folder, "stopped")

    def _finish(self, model: Model, order: int, request: Request, result: Result) -> None:
        model.done = order
        if "sampling_session_id" in result:
            self.open_sampler(result["sampling_session_id"], model.store.folder / EPHEMERAL / str(order))
        model.results[request.request_id].set_result(result)
        model.queue.popleft()
        if model.queue:
            self.turns.put_nowait(model)
        finished = [key for key, future in model.results.items() if future.done()]
        for key in finished[:-RESULTS]:
            del model.results[key]

    def _run(self, model: Model, order: int, request: Request) -> Result:
        """Run a request. What is wrong with it is its result."""
        began = time.monotonic()
        handlers: dict[str, Callable[[Model, int, Request], Result]] = {
            "create": self._create,
            "restore": self._restore,
            "forward": self._forward,
            "forward_backward": self._forward,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_weights,
            "load_weights": self._load_weights,
        }
        try:
            with self.meters.of(model.store).working():
                if request.kind not in ("create", "restore"):
                    self._bring(model)
                return handlers[request.kind](model, order, request)
        except Exception as error:
            if self.learner.ranks > 1 and not isinstance(error, (PrlError, *OF_FILES)):
                raise  # ranks may not be alike any more: the next start goes on from the journal
            return _failed(error)
        finally:
            model.used_at = time.monotonic()
            model.unsaved_s += max(model.used_at - began, 1e-6)

    def _bring(self, model: Model) -> None:
        """Have a model in memory. Raises RequestError for one that could not be made."""
        if model.id in self.learner.tenants:
            return
        saved = model.store.load()
        if saved is None:
            raise RequestError(f"model_id={model.id!r}: this model could not be made")
        self._make_room(model)
        self.learner.add(model.id, model.record.lora)
        self.learner.put(model.id, saved[1], saved[2].step)

    def _make_room(self, coming: Model) -> None:
        """Write models out for another one: those that were used longest ago, all where either has all weights."""
        present = sorted(self.learner.tenants, key=lambda name: self.models[name].used_at)
        alone = coming.record.lora is None or any(self.learner.tenants[name].adapter is None for name in present)
        for name in present if alone else present[: max(0, len(present) + 1 - self.config.models)]:
            if self.models[name].unsaved_s:
                self._save(self.models[name])
            self.learner.remove(name)

    def _save_if_due(self, model: Model, kind: str) -> None:
        often = kind in ("forward", "forward_backward", "optim_step", "save_weights_for_sampler")
        if often and model.unsaved_s < max(SAVED_S, 20 * model.write_s):
            return
        if model.id in self.learner.tenants:
            try:
                self._save(model)
            except OF_FILES as error:  # as of a full disk: the journal has what counts
                log.warning("the state of a model cannot be written: %s", in_one_line(error))

    def _save(self, model: Model) -> None:
        """Write the state of a model, which is that after its last request."""
        began = time.monotonic()
        done = {key: future.result() for key, future in list(model.results.items()) if future.done()}
        state = State(self.learner.tenants[model.id].step, done, model.last)
        model.store.save(model.done, self.learner.tensors(model.id), state)
        model.write_s = time.monotonic() - began
        model.unsaved_s = 0.0

    # --- the requests, in the thread ---

    def _create(self, model: Model, order: int, request: Request) -> Result:
        self._make_room(model)
        self.learner.add(model.id, model.record.lora)
        return {"model_id": model.id, "type": "create_model"}

    def _restore(self, model: Model, order: int, request: Request) -> Result:
        self._create(model, order, request)
        try:
            return self._load_weights(model, order, request)
        except BaseException:
            self.learner.remove(model.id)
            raise

    def _forward(self, model: Model, order: int, request: Request) -> Result:
        asked = wire.read_forward(request.body, request.content_type, request.kind == "forward")
        result = self.learner.forward(model.id, asked)
        if not asked.forward_only:
            self.meters.of(model.store).passed(asked, result)
        return result

    def _optim_step(self, model: Model, order: int, request: Request) -> Result:
        adam = wire.decode(request.body, wire.OptimStep).adam_params
        result = self.learner.optim_step(model.id, adam)
        self.meters.of(model.store).stepped(adam, result)
        return result

    def _load_weights(self, model: Model, order: int, request: Request) -> Result:
        load = wire.decode(request.body, wire.LoadWeights)
        folder, record = self.store.checkpoint(load.path)
        if not (folder / "state" / TENSORS).is_file():
            raise RequestError(f"path={load.path!r}: these weights are for sampling: load those of save_state")
        tensors = load_file(folder / "state" / TENSORS)
        self.learner.put(model.id, tensors, record.step, optimizer=load.optimizer)
        return {"path": load.path, "model_id": model.id, "type": "load_weights"}

    def _save_weights(self, model: Model, order: int, request: Request) -> Result:
        asked = wire.decode(request.body, wire.SaveWeights)
        sampler = request.kind == "save_weights_for_sampler"
        folder = self.snapshot_folder(model, asked, sampler, order)
        there = read_checkpoint(folder)
        again = there is not None and there.order == order  # of a server that was killed then
        if there is not None and not again and not asked.overwrite:
            raise RequestError(f"path={asked.path!r}: there is a checkpoint of this name; give another, or overwrite")
        if not again:
            self._write(model, folder, order, asked, sampler=sampler)
        model.store.prune()
        if sampler and asked.path is None:
            sampler_id = f"{model.record.session_id}:sample:{asked.sampling_session_seq_id}"
            return {"sampling_session_id": sampler_id, "type": request.kind}
        return {"path": uri_of(model.id, folder), "type": request.kind}

    def _write(self, model: Model, folder: Path, order: int, asked: wire.SaveWeights, *, sampler: bool) -> None:
        """Write a checkpoint, or what sampling needs of it."""
        tenant, base = self.learner.tenants[model.id], self.learner.model
        with writing(folder) as new:
            matrices, merged = self.learner.weights(model.id, tenant.adapter is None or not sampler)
            if tenant.adapter is not None:
                write_adapters(new / ADAPTER, base, matrices, tenant.adapter)
            if merged:
                write_model(new, base, merged, self.files)
            if not sampler:
                (new / "state").mkdir()
                tensors = self.learner.tensors(model.id).items()
                kept = {key: tensor for key, tensor in tensors if not key.startswith("gradient/")}
                write_tensors(kept, new / "state" / TENSORS)
            seal(new, tenant.step)
            model.store.describe(new, folder, order, tenant.step, asked)

    def snapshot_folder(self, model: Model, asked: wire.SaveWeights, sampler: bool, order: int) -> Path:
        """Return the folder of the weights that are to be saved."""
        if sampler and asked.path is None:
            return model.store.folder / EPHEMERAL / str(order)
        name = asked.path or f"step_{self.learner.tenants[model.id].step:06d}"
        return model.store.folder / ("sampler_weights" if sampler else "weights") / name

    def finish(self, session_id: str, status: str, detail: str | None) -> None:
        """Record that a client has no more work for the models of its session."""
        for model in self.models_of(session_id):
            self.meters.end(model.store.folder, ENDS.get(status, "stopped"), detail)

    def state(self) -> str:
        """Return how much there is to do."""
        waiting = sum(len(model.queue) for model in self.models.values())
        return f"models={len(self.meters.courses)}  waiting: {waiting} to train, {self.sampling} to sample"

    # --- sampling ---

    def open_sampler(self, sampler_id: str, folder: Path | None) -> None:
        """Begin a sampling session over a snapshot; None = the base."""
        path = None if folder is None else str(folder.relative_to(self.store.folder))
        self.store.sessions.samplers[sampler_id] = path
        self.store.write_sessions()

    def join_sampler(self, sampler_id: str) -> int:
        """Return the number of a further client of a sampling session. Raises RequestError."""
        self.folder_of_sampler(sampler_id)
        joined = self.store.sessions.joined
        joined[sampler_id] = joined.get(sampler_id, 0) + 1
        self.store.write_sessions()
        return joined[sampler_id]

    def folder_of_sampler(self, sampler_id: str) -> Path | None:
        """Return the folder of a sampling session's snapshot; None = the base. Raises RequestError."""
        path = looked_up(self.store.sessions.samplers, sampler_id, "sampling_session_id")
        return None if path is None else self.store.folder / path

    def checkpoint_of(self, model_path: str | None) -> Path | None:
        """Return the folder of the checkpoint that a client samples from; None = the base. Raises RequestError."""
        return None if model_path is None else self.store.checkpoint(model_path, "model_path")[0]

    def snapshot_of(self, request: wire.Sample) -> Path | None:
        """Return the snapshot that a request for samples names; None = the base. Raises RequestError."""
        self.check_base(request.base_model)
        if request.sampling_session_id is None:
            folder = self.checkpoint_of(request.model_path)
        else:
            folder = self.folder_of_sampler(request.sampling_session_id)
        if folder is None:
            return None
        if not folder.is_dir():
            raise RequestError("sampling_session_id: this snapshot is gone; a model keeps its last ones", 404)
        return folder / ADAPTER if (folder / ADAPTER).is_dir() else folder

    def sample(self, request: wire.Sample) -> str:
        """Begin to sample, unless this is a retry. Returns the id of the request."""
        prompt = self._prompt(request)
        snapshot = self.snapshot_of(request)
        # Numbers are those of a session: without one, two clients may have the same.
        session, number = request.sampling_session_id, request.seq_id
        known = session is not None and number is not None
        request_id = f"{session}:{number}" if known else f"sample:{len(self.sampled)}-{time.time_ns()}"
        if request_id in self.sampled:
            return request_id
        if self.sampling + request.num_samples > self.config.max_samples:
            raise RequestError(
                f"{self.sampling} replies are sampled or wait, of at most {self.config.max_samples}: try again", 429
            )
        self.sampling += request.num_samples
        self.sampled[request_id] = asyncio.ensure_future(self._sample(request, request_id, prompt, snapshot))
        finished = [key for key, task in self.sampled.items() if task.done()] if len(self.sampled) > SAMPLES else []
        for key in finished[: len(self.sampled) - SAMPLES]:
            del self.sampled[key]
        return request_id

    def cancel(self, request_id: str) -> None:
        """Stop sampling for a request, whose result nobody waits for."""
        if request_id in self.sampled:
            self.sampled[request_id].cancel()

    def _prompt(self, request: wire.Sample) -> list[int]:
        """Return the prompt of a request for samples. Raises RequestError, naming the field."""
        prompt = wire.token_ids(request.prompt, "prompt")
        losses.check_tokens(prompt, "prompt", self.learner.vocabulary, self.learner.longest - 1)
        limits = {
            "num_samples": self.config.max_samples,
            "topk_prompt_logprobs": self.learner.vocabulary,
            "topk_sample_logprobs": self.learner.vocabulary,
            "prompt_logprobs_last_n": max(1, len(prompt) - 1),
        }
        for key, most in limits.items():
            if (getattr(request, key) or 0) > most:
                raise RequestError(f"{key}={getattr(request, key)}: it may be {most} at most")
        return prompt

    async def _sample(self, request: wire.Sample, request_id: str, prompt: list[int], snapshot: Path | None) -> Result:
        seed = request.sampling_params.seed
        if seed is None:  # another one for each request, the same of a retry
            seed = int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:6], "big")
        try:
            with self.meters.busy["engine"].working():
                result = await self.sampler.sample(snapshot, request, prompt, seed)
            self.meters.sampled(snapshot, result["sequences"])
            return result
        except asyncio.CancelledError:
            return _failed(RequestError("this request was cancelled"))
        except Exception as error:  # as of a snapshot that is deleted now
            return _failed(error)
        finally:
            self.sampling -= request.num_samples


def looked_up(known: dict[str, T], name: str, field: str) -> T:
    """Return what a request names. Raises RequestError."""
    if name not in known:
        raise RequestError(f"{field}={name[:200]!r}: this server has none of this name", 404)
    return known[name]


def _failed(error: Exception) -> Result:
    """Return the result of a request that an error has ended."""
    if isinstance(error, RequestError):
        return {"error": str(error), "category": "user"}
    kind = "" if isinstance(error, PrlError) else f"{type(error).__name__}: "
    return {"error": f"{kind}{in_one_line(error)}", "category": "server"}
