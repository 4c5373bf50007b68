"""The queues of the models, served in turns, and what becomes of each request.

A request is accepted once: its id is made of the client's own number, so that a retry finds the first one. Training
runs in a thread, one request after the other; the event loop owns the queues and the results.
"""

import asyncio
import contextlib
import hashlib
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from safetensors.torch import load_file

from prl.base.checkpoint_folders import seal
from prl.base.errors import PrlError
from prl.base.files import read_json, write_tensors, writing
from prl.base.text import in_one_line
from prl.config.model_folder import companion_files, tokenizer_files
from prl.config.schema import TinkerConfig
from prl.tinker import graph, losses, wire
from prl.tinker.learner import Learner
from prl.tinker.sampler import Snapshots
from prl.tinker.store import CHECKPOINT, SCHEME, TENSORS, Checkpoint, ModelRecord, ModelStore, Request, State, Store
from prl.tinker.wire import RequestError
from prl.trainer.lora import ADAPTER, write_adapters
from prl.trainer.model import write_model

RESULTS = 32
"""Results that a model keeps, the newest."""
SAMPLES = 4096
"""Results of samples that the server keeps."""
SAVED_S = 2.0
"""[s] Work on a model after which its state is written, at least; else 20 times what writing takes."""
Result = dict[str, Any]


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
        self.store = Store(Path(config.dir).absolute())
        self.name, self.path = config.name, sampler.spec.model.path
        code = sampler.spec.model.trust_remote_code
        self.files = companion_files(self.path) | tokenizer_files(self.path, trust_remote_code=code)
        self.models: dict[str, Model] = {}
        self.turns: deque[Model] = deque()
        self.work = asyncio.Event()
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
        if model_id not in self.models:
            raise RequestError(f"model_id={model_id[:200]!r}: this server has no such model", 404)
        return self.models[model_id]

    def check_base(self, name: str | None) -> None:
        """Raise RequestError for another base than the server's."""
        if name is not None and name not in (self.name, self.path):
            raise RequestError(f"base_model={name[:200]!r}: this server has {self.name}")

    def create(self, request: wire.CreateModel | wire.LoadWeights, body: bytes) -> Model:
        """Accept a new model. Of one that is there already it is a retry. Raises RequestError."""
        session_id, number = request.session_id or "", request.model_seq_id
        restored = isinstance(request, wire.LoadWeights)
        lora = self.store.record(request.path).lora if isinstance(request, wire.LoadWeights) else request.lora_config
        if session_id not in self.store.sessions.sessions:
            raise RequestError(f"session_id={session_id[:200]!r}: this server has no such session", 404)
        if number is None or number < 0:
            raise RequestError(f"model_seq_id={number}: a number from 0 is wanted")
        self.check_base(request.base_model)
        if lora is not None and not 1 <= lora.rank <= self.config.max_rank:
            raise RequestError(f"lora_config.rank={lora.rank}: it has to be from 1 to max_rank={self.config.max_rank}")
        model_id = f"{session_id}:train:{number}"
        if model_id not in self.models:
            record = ModelRecord(model_id, session_id, lora, request.user_metadata)
            self.models[model_id] = Model(self.store.add(record))
        model = self.models[model_id]
        if not model.order:  # a server that was killed may have written its record alone
            self._accept(model, Request(f"{model_id}:create", "restore" if restored else "create", body))
        return model

    def submit(self, model_id: str, number: int | None, kind: str, body: bytes, content_type: str = "") -> str:
        """Accept a request that was checked, unless it was before. Returns its id, by which its result is asked for."""
        model = self.model(model_id)
        request_id = f"{model_id}:{model.order + 1}-" if number is None else f"{model_id}:{number}"
        if number is not None and number <= model.last:  # a retry, or one whose result will be asked for in vain
            return request_id
        self._accept(model, Request(request_id, kind, body, content_type))
        return request_id

    def _accept(self, model: Model, request: Request) -> None:
        model.store.accept(model.order + 1, request)
        self._enqueue(model, model.order + 1, request)

    def _enqueue(self, model: Model, order: int, request: Request) -> None:
        number = request.request_id.rpartition(":")[2]
        if number.isdigit():
            model.last = max(model.last, int(number))
        if request.kind == "save_weights_for_sampler":
            self._name_snapshot(model, order, wire.decode(request.body, wire.SaveWeights))
        model.order = order
        model.results[request.request_id] = asyncio.get_running_loop().create_future()
        model.queue.append((order, request))
        if model not in self.turns:
            self.turns.append(model)
        self.work.set()

    def _name_snapshot(self, model: Model, order: int, asked: wire.SaveWeights) -> None:
        """Begin the sampling session of a snapshot without a name, which will be there when the client may know it."""
        if asked.path is None:
            sampler_id = self.sampler_id(model.record, asked)
            if sampler_id not in self.store.sessions.samplers:
                self.open_sampler(sampler_id, self.snapshot_folder(model, asked, True, order))

    def check(self, request: wire.Forward) -> None:
        """Raise RequestError for a pass that cannot be run, naming the field."""
        self.model(request.model_id)
        loss, _ = losses.loss_of(request.loss_fn, request.config)
        losses.check_data(request.data, request.loss_fn, loss, self.learner.vocabulary, self.learner.longest)

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
                while not self.turns:
                    self.work.clear()
                    await self.work.wait()
                model = self.turns.popleft()
                order, request = model.queue.popleft()
                running = asyncio.ensure_future(asyncio.to_thread(self._run, model, order, request))
                try:
                    result = await asyncio.shield(running)
                except asyncio.CancelledError:
                    result = await running  # a thread cannot be stopped half way
                    self._finish(model, order, request, result)
                    raise
                self._finish(model, order, request, result)
                if model.queue and model not in self.turns:
                    self.turns.append(model)
                await asyncio.to_thread(self._save_if_due, model, request.kind)
        finally:
            for model in self.models.values():
                if model.id in self.learner.tenants and model.unsaved_s:
                    self._save(model)

    def _finish(self, model: Model, order: int, request: Request, result: Result) -> None:
        model.done = order
        model.results[request.request_id].set_result(result)
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
            if request.kind not in ("create", "restore"):
                self._bring(model)
            return handlers[request.kind](model, order, request)
        except PrlError as error:
            return {"error": in_one_line(error), "category": "user" if isinstance(error, RequestError) else "server"}
        except Exception as error:
            if self.learner.ranks > 1:  # which do not do the same any more: the next start goes on from the journal
                raise
            return {"error": f"{type(error).__name__}: {in_one_line(error)}", "category": "server"}
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
        often = kind in ("forward", "forward_backward", "optim_step")
        if often and model.unsaved_s < max(SAVED_S, 20 * model.write_s):
            return
        if model.id in self.learner.tenants:
            self._save(model)

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
        return self.learner.forward(model.id, asked)

    def _optim_step(self, model: Model, order: int, request: Request) -> Result:
        return self.learner.optim_step(model.id, wire.decode(request.body, wire.OptimStep).adam_params)

    def _load_weights(self, model: Model, order: int, request: Request) -> Result:
        load = wire.decode(request.body, wire.LoadWeights)
        folder, record = self.store.checkpoint(load.path), self.store.record(load.path)
        if not (folder / "state" / TENSORS).is_file():
            raise RequestError(f"path={load.path!r}: these weights are for sampling: load those of save_state")
        tensors = load_file(folder / "state" / TENSORS)
        self.learner.put(model.id, tensors, record.step, optimizer=load.optimizer)
        return {"path": load.path, "model_id": model.id, "type": "load_weights"}

    def _save_weights(self, model: Model, order: int, request: Request) -> Result:
        asked = wire.decode(request.body, wire.SaveWeights)
        sampler = request.kind == "save_weights_for_sampler"
        folder = self.snapshot_folder(model, asked, sampler, order)
        record = model.record
        step = self.learner.tenants[model.id].step
        made = Checkpoint(model.id, order, step, record.lora, datetime.now(UTC).isoformat(), asked.user_metadata)
        there = folder / CHECKPOINT
        again = there.is_file() and read_json(there, Checkpoint).order == order  # of a server that was killed then
        if there.is_file() and not again and not asked.overwrite:
            raise RequestError(f"path={asked.path!r}: there is a checkpoint of this name; give another, or overwrite")
        if not again:
            self._write(model, folder, made, sampler=sampler)
        model.store.prune()
        if sampler and asked.path is None:
            return {"sampling_session_id": self.sampler_id(record, asked), "type": request.kind}
        return {"path": f"{SCHEME}{model.id}/{folder.parent.name}/{folder.name}", "type": request.kind}

    def _write(self, model: Model, folder: Path, made: Checkpoint, *, sampler: bool) -> None:
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
            (new / CHECKPOINT).write_bytes(msgspec.json.encode(made))
            seal(new, made.step)

    def snapshot_folder(self, model: Model, asked: wire.SaveWeights, sampler: bool, order: int) -> Path:
        """Return the folder of the weights that are to be saved."""
        if sampler and asked.path is None:
            return model.store.folder / "ephemeral" / str(order)
        name = asked.path or f"step_{self.learner.tenants[model.id].step:06d}"
        return model.store.folder / ("sampler_weights" if sampler else "weights") / name

    @staticmethod
    def sampler_id(record: ModelRecord, asked: wire.SaveWeights) -> str:
        """Return the id of the sampling session that a snapshot without a name gets."""
        return f"{record.session_id}:sample:{asked.sampling_session_seq_id}"

    # --- sampling ---

    def open_sampler(self, sampler_id: str, folder: Path | None) -> None:
        """Begin a sampling session over a snapshot; None = the base."""
        path = None if folder is None else str(folder.relative_to(self.store.folder))
        self.store.sessions.samplers[sampler_id] = path
        self.store.write_sessions()

    def snapshot_of(self, request: wire.Sample) -> Path | None:
        """Return the snapshot that a request for samples names; None = the base. Raises RequestError."""
        self.check_base(request.base_model)
        samplers = self.store.sessions.samplers
        if request.sampling_session_id is not None:
            if request.sampling_session_id not in samplers:
                raise RequestError(f"sampling_session_id={request.sampling_session_id[:200]!r}: there is none", 404)
            path = samplers[request.sampling_session_id]
            folder = None if path is None else self.store.folder / path
        else:
            folder = None if request.model_path is None else self.store.checkpoint(request.model_path, "model_path")
        if folder is None:
            return None
        if not folder.is_dir():
            raise RequestError("sampling_session_id: this snapshot is gone; a model keeps its last ones", 404)
        return folder / ADAPTER if (folder / ADAPTER).is_dir() else folder

    def sample(self, request: wire.Sample) -> str:
        """Begin to sample, unless this is a retry. Returns the id of the request."""
        prompt = self._prompt(request)
        snapshot = self.snapshot_of(request)
        number = f"{len(self.sampled)}-{time.time_ns()}" if request.seq_id is None else request.seq_id
        request_id = f"{request.sampling_session_id or 'sample'}:{number}"
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

    def _prompt(self, request: wire.Sample) -> list[int]:
        """Return the prompt of a request for samples. Raises RequestError, naming the field."""
        prompt = wire.token_ids(request.prompt, "prompt")
        losses.check_tokens(prompt, "prompt", self.learner.vocabulary, self.learner.longest - 1)
        params = request.sampling_params
        for key, value, low, high in (
            ("num_samples", request.num_samples, 1, self.config.max_samples),
            ("sampling_params.max_tokens", 1 if params.max_tokens is None else params.max_tokens, 1, 1 << 31),
            ("sampling_params.temperature", params.temperature, 0, 100),
            ("sampling_params.seed", params.seed or 0, 0, (1 << 63) - 1),
            ("topk_prompt_logprobs", request.topk_prompt_logprobs, 0, self.learner.vocabulary),
            ("topk_sample_logprobs", request.topk_sample_logprobs, 0, self.learner.vocabulary),
            ("prompt_logprobs_last_n", request.prompt_logprobs_last_n or 1, 1, max(1, len(prompt) - 1)),
        ):
            if not low <= value <= high:
                raise RequestError(f"{key}={value}: it has to be from {low} to {high}")
        return prompt

    async def _sample(self, request: wire.Sample, request_id: str, prompt: list[int], snapshot: Path | None) -> Result:
        seed = request.sampling_params.seed
        if seed is None:  # another one for each request, the same of a retry
            seed = int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:6], "big")
        try:
            return await self.sampler.sample(snapshot, request, prompt, seed)
        except RequestError as error:
            return {"error": str(error), "category": "user"}
        except PrlError as error:
            return {"error": in_one_line(error), "category": "server"}
        finally:
            self.sampling -= request.num_samples
