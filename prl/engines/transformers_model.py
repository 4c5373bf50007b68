"""An engine within the process of the run: transformers' model, asked in a thread of its own.

The thread takes together what waits, up to `max_num_seqs` sequences, and samples all of it to its end. New weights come
between two such batches, so that no continuation is of two policy versions.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from prl.base.errors import ConfigError, DeadlinePassed, EngineError
from prl.engines.base import EngineSpec
from prl.engines.client import ModelPool, PolicyPool
from prl.engines.decoding import Continuation, Request, Shown, sample, score
from prl.engines.frozen import ReferencePool
from prl.engines.replies import Completion, Scored
from prl.engines.rope import check_rope, fix_rope
from prl.engines.servers import Server, Traffic
from prl.engines.tokenizers import TokenizerProbe
from prl.rollouts.inputs import ModelInput

SCORED_AT_ONCE = 2048
"""Tokens whose logits over the whole vocabulary exist at one time."""
Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class TransformersModel(ModelPool):
    """A model in this process, its thread and what waits for it."""

    def __init__(self, spec: EngineSpec):
        super().__init__(spec.served_name, Traffic([Server("this process")]), spec.pictures)
        self.spec = spec
        self._closed = False
        self._thread = ThreadPoolExecutor(1, f"prl-{spec.process}", torch.set_num_threads, (spec.threads,))
        self._sampling = Batches(self._thread, self._sample, spec.config.max_num_seqs)
        self._scoring = Batches(self._thread, self._score, SCORED_AT_ONCE)
        path, code = spec.model.path, spec.model.trust_remote_code
        self.tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=code)
        self._ready = self._thread.submit(self._load, path, self.version)

    async def generate(
        self, prompt: ModelInput, sampling: dict[str, Any], *, n: int = 1, prefix: str | None = None
    ) -> list[Completion]:
        prompt_ids = prompt.token_ids
        room = self.spec.model.max_model_len - len(prompt_ids)
        if not prompt_ids or room < 1:
            raise EngineError(f"a prompt of {len(prompt_ids)} tokens leaves no room: model.max_model_len", 400)
        if unknown := sampling.keys() - Request.__dataclass_fields__.keys():
            raise EngineError(f"engine=transformers has no {', '.join(sorted(unknown))}: engine=default has it", 400)
        stops = [*self._end_tokens, *sampling.get("stop_token_ids", ())]
        limit = min(sampling.get("max_tokens") or room, room)
        options = {**sampling, "stop_token_ids": stops, "max_tokens": limit, "n": n, "pictures": self._shown(prompt)}
        with self.traffic.request(self.servers[0], n):
            return await self._sampling.ask(Request(prompt_ids=prompt_ids, **options), n)

    async def top_logprobs(self, sequence: ModelInput, top_k: int) -> Scored:
        token_ids = sequence.token_ids
        if not 0 < len(token_ids) <= self.spec.model.max_model_len:
            raise EngineError(f"{len(token_ids)} tokens, above model.max_model_len or none", 400)
        if top_k > len(self.tokenizer):
            raise EngineError(f"{top_k} top logprobs, of a vocabulary of {len(self.tokenizer)}", 400)
        with self.traffic.request(self.servers[0]):
            return await self._scoring.ask((token_ids, top_k, self._shown(sequence)), len(token_ids))

    def _shown(self, shown: ModelInput) -> Shown:
        """Return the pictures in a prompt with their features. Raises EngineError where they do not fit it."""
        placeholder = getattr(self._model.config, "image_token_id", None)
        if placeholder is None and not shown.pictures:
            return ()
        places = [place for place, token in enumerate(shown.token_ids) if token == placeholder]
        if places != [place for picture in shown.pictures for place in range(picture.start, picture.stop)]:
            raise EngineError(f"the prompt has {len(places)} placeholders, not those of its pictures", 400)
        try:
            return [(picture, self.store.features(picture)) for picture in shown.pictures]
        except ValueError as error:
            raise EngineError(str(error), 400) from error

    async def wait_ready(self, timeout_s: float, still_alive: Callable[[], None] = lambda: None) -> None:
        """Wait until the model is loaded. Raises EngineError where it cannot be."""
        await asyncio.shield(asyncio.wrap_future(self._ready))

    async def close(self) -> None:
        """Return once the thread has ended, which it does at the next token; Python's own end would wait as long."""
        self._closed = True
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    # --- in the thread ---

    def _load(self, path: str, version: int | None) -> None:
        """Load the model at `path`: in float32, since transformers would make another format torch's default."""
        transformers_logging.disable_progress_bar()
        try:
            kind = AutoModelForImageTextToText if self.spec.sees else AutoModelForCausalLM
            model: PreTrainedModel = kind.from_pretrained(
                path, dtype=torch.float32, trust_remote_code=self.spec.model.trust_remote_code
            )
            check_rope(model.config, self.spec.model.max_model_len, path)
            fix_rope(model, self.spec.model.max_model_len)
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise EngineError(f"{path} cannot be loaded: {error}") from error
        for parameter in model.parameters():  # buffers stay as they are: of bfloat16 positions would be rounded
            parameter.data = parameter.data.to(getattr(torch, self.spec.model.dtype))
        self._model = model.to(self.spec.device).eval()
        self._held = version
        end = self._model.generation_config.eos_token_id
        self._end_tokens = end if isinstance(end, list) else [] if end is None else [end]

    def _sample(self, requests: list[Request]) -> list[list[Completion]]:
        groups = sample(self._model, requests, self.tokenizer.decode, self._check)
        return [[self._completion(continuation) for continuation in group] for group in groups]

    def _completion(self, of: Continuation) -> Completion:
        logprobs = [] if self.spec.frozen else of.logprobs
        return Completion(of.token_ids, logprobs, of.finish_reason, self._held, self._held)

    def _score(self, questions: list[tuple[list[int], int, Shown]]) -> list[Scored]:
        sequences, counts, pictures = zip(*questions, strict=True)
        return score(self._model, sequences, counts, pictures)

    def _check(self) -> None:
        if self._closed:
            raise EngineError("the engine was closed")


class TransformersPolicy(TransformersModel, PolicyPool):
    """The live policy in this process."""

    def __init__(self, spec: EngineSpec):
        super().__init__(spec)
        self.counts = Counter[str]()

    async def update_weights(self, version: int, path: str, timeout_s: float = 300.0) -> None:
        """Load new weights once the batch that is sampled has ended; requests that wait are sampled from them.

        Raises DeadlinePassed or EngineError where they are not loaded.
        """
        try:
            with self.traffic.loading(self.servers[0], version):
                async with asyncio.timeout(timeout_s):
                    await asyncio.wrap_future(self._thread.submit(self._load, path, version))
            self.version = version
        except TimeoutError:
            raise DeadlinePassed(f"policy version {version} was not loaded within {timeout_s:g} s") from None


class TransformersReference(TransformersModel, ReferencePool):
    """A frozen model in this process, of which all clients are this one, until the run has ended."""

    def __init__(self, spec: EngineSpec):
        super().__init__(spec)
        self.timeout_s = spec.config.startup_timeout_s

    async def require_tokenizer(self, probe: TokenizerProbe) -> None:
        if self.tokenizer.encode(probe.text, add_special_tokens=False) != probe.token_ids:
            raise ConfigError(f"model {self.model!r} has another tokenizer than {probe.model}: choose algo.align=text")


@dataclass(eq=False)
class Waiting(Generic[Asked, Answer]):
    """A question, how much of a batch it takes, and its answer to be."""

    asked: Asked
    size: int
    answer: "Future[Answer]"


class Batches(Generic[Asked, Answer]):
    """Questions that wait for a thread, which answers together what waits, up to a size."""

    def __init__(self, thread: ThreadPoolExecutor, answer: Callable[[list[Asked]], list[Answer]], limit: int):
        self.thread, self.answer, self.limit = thread, answer, limit
        self.waiting: deque[Waiting[Asked, Answer]] = deque()

    async def ask(self, asked: Asked, size: int) -> Answer:
        """The answer to a question. Raises EngineError where there is none."""
        question = Waiting[Asked, Answer](asked, size, Future())
        self.waiting.append(question)
        await asyncio.sleep(0)  # others may be about to ask
        self.thread.submit(self._take)
        return await asyncio.wrap_future(question.answer)

    def _take(self) -> None:
        """Answer what waits, in the thread."""
        # Each question has one look submitted, and a look may take several: then a later one finds none.
        taken: list[Waiting[Asked, Answer]] = []
        size = 0
        while self.waiting and (not taken or size + self.waiting[0].size <= self.limit):
            question = self.waiting.popleft()
            if question.answer.set_running_or_notify_cancel():
                taken.append(question)
                size += question.size
        try:
            answers = self.answer([question.asked for question in taken]) if taken else []
        except Exception as error:
            for question in taken:
                question.answer.set_exception(EngineError(f"the engine failed: {type(error).__name__}: {error}"))
            return
        for question, answer in zip(taken, answers, strict=True):
            question.answer.set_result(answer)
