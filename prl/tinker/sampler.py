"""Sampling from snapshots of clients' models, in this process: one base, and adapters that are loaded beside it.

A snapshot is a folder that never changes: peft's, of an adapter, or a model folder, of all weights.
"""

import asyncio
import functools
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file

from prl.base.errors import EngineError
from prl.engines.base import EngineSpec
from prl.engines.decoding import Continuation, Request, Shown, sample
from prl.engines.replies import Scored
from prl.engines.transformers_model import SCORED_AT_ONCE, Batches, TransformersModel
from prl.tinker import adapters
from prl.tinker.wire import RequestError, Sample
from prl.trainer.lora import WEIGHTS, adapters_of

LOADED = 16
"""Adapters that are kept in memory."""
Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class Snapshots(TransformersModel):
    """The base and the snapshots beside it, asked in a thread of their own."""

    def __init__(self, spec: EngineSpec):
        super().__init__(spec)
        self._continuing: Batches[tuple[Path | None, Request], list[Continuation] | Exception] = Batches(
            self._thread, functools.partial(self._by_snapshot, self._continue), spec.config.max_num_seqs
        )
        self._judging: Batches[tuple[Path | None, tuple[list[int], int, Shown]], Scored | Exception] = Batches(
            self._thread, functools.partial(self._by_snapshot, self._score), SCORED_AT_ONCE
        )
        self._loaded: OrderedDict[tuple[Path, int], str] = OrderedDict()
        """Names of the adapters in memory, by folder and the time of its files; the last one used is at the end."""
        self._whole: Path | None = None
        """The snapshot whose weights the model has; None = those of the base."""
        self._made = 0

    async def sample(self, snapshot: Path | None, request: Sample, prompt: list[int], seed: int) -> dict[str, Any]:
        """Answer a request for samples. Raises RequestError for what this engine does not do.

        Args:
            snapshot: The folder; None = the base.
            request: What is asked for.
            prompt: Its token ids, which have been checked.
            seed: Of the first sample; the next ones have the numbers behind it.
        """
        await asyncio.shield(asyncio.wrap_future(self._ready))
        params = request.sampling_params
        for key, off in (("top_k", (-1, 0)), ("top_p", (1,))):
            if getattr(params, key) not in off:
                raise RequestError(f"sampling_params.{key}={getattr(params, key)}: engine=transformers has none")
        stop = [params.stop] if isinstance(params.stop, str) else params.stop
        words = [word for word in stop or () if isinstance(word, str)]
        ends = [token for token in stop or () if isinstance(token, int)]
        room = self.spec.model.max_model_len - len(prompt)
        asked = Request(
            prompt_ids=prompt,
            n=request.num_samples,
            max_tokens=min(params.max_tokens or room, room),
            temperature=params.temperature,
            seed=seed,
            stop=words,
            # An empty list is a wish: not even the model's own ends stop it.
            stop_token_ids=ends if stop == [] else [*self._end_tokens, *ends],
            skip_special_tokens=False,
        )
        done = _answered(await self._continuing.ask((snapshot, asked), asked.n))
        result: dict[str, Any] = {"type": "sample", "sequences": [_sequence(each) for each in done]}
        if request.topk_sample_logprobs:
            for sequence in result["sequences"]:
                scored = await self._judged(snapshot, prompt + sequence["tokens"], request.topk_sample_logprobs)
                sequence["topk_logprobs"] = _places(scored)[len(prompt) :]
        if request.prompt_logprobs or request.topk_prompt_logprobs:
            scored = await self._judged(snapshot, prompt, request.topk_prompt_logprobs)
            hidden = len(prompt) - (request.prompt_logprobs_last_n or len(prompt) - 1)
            if request.prompt_logprobs:
                result["prompt_logprobs"] = [None] * hidden + scored.own[hidden:]
            if request.topk_prompt_logprobs:
                result["topk_prompt_logprobs"] = [None] * hidden + _places(scored)[hidden:]
        return result

    async def _judged(self, snapshot: Path | None, tokens: list[int], top_k: int) -> Scored:
        return _answered(await self._judging.ask((snapshot, (tokens, top_k, ())), len(tokens)))

    # --- in the thread ---

    def _continue(self, requests: list[Request]) -> list[list[Continuation]]:
        return sample(self._model, requests, self.tokenizer.decode, self._check)

    def _by_snapshot(
        self, answer: Callable[[list[Asked]], list[Answer]], questions: list[tuple[Path | None, Asked]]
    ) -> list[Answer | Exception]:
        """Answer questions to several snapshots, those of one together. What fails for one is its answer alone."""
        answers: dict[int, Answer | Exception] = {}
        for snapshot in dict.fromkeys(folder for folder, _ in questions):
            places = [place for place, (folder, _) in enumerate(questions) if folder == snapshot]
            try:
                self._use(snapshot)
                answers |= zip(places, answer([questions[place][1] for place in places]), strict=True)
            except Exception as error:
                answers |= dict.fromkeys(places, error)
        return [answers[place] for place in range(len(questions))]

    def _use(self, snapshot: Path | None) -> None:
        """Have the model be a snapshot."""
        adapter = snapshot is not None and (snapshot / WEIGHTS).is_file()
        whole = None if adapter else snapshot
        if whole != self._whole:
            self._load(str(whole or self.spec.model.path), self.version)
            self._loaded.clear()
            self._whole = whole
        if not adapter:
            adapters.use(self._model, None)
            return
        assert snapshot is not None
        key = (snapshot, (snapshot / WEIGHTS).stat().st_mtime_ns)  # another one may get the name of one that is deleted
        if key not in self._loaded:
            self._loaded[key] = self._insert(snapshot)
        self._loaded.move_to_end(key)
        adapters.use(self._model, self._loaded[key])

    @torch.no_grad()
    def _insert(self, folder: Path) -> str:
        """Load an adapter beside the base; that which nobody has used for longest goes. Returns its name."""
        import peft

        if len(self._loaded) == LOADED:
            _, oldest = self._loaded.popitem(last=False)
            adapters.remove(self._model, oldest)
        self._made += 1
        name = f"s{self._made}"
        adapters.insert(self._model, name, peft.LoraConfig.from_pretrained(str(folder)))
        saved = load_file(folder / WEIGHTS)
        for key, matrix in adapters_of(self._model, name).items():
            matrix.copy_(saved[key])
        return name


def _answered(answer: Answer | Exception) -> Answer:
    """Return an answer. Raises EngineError where there is none."""
    if isinstance(answer, Exception):
        raise EngineError(f"the engine failed: {type(answer).__name__}: {answer}") from answer
    return answer


def _sequence(done: Continuation) -> dict[str, Any]:
    return {"tokens": done.token_ids, "logprobs": done.logprobs, "stop_reason": done.finish_reason}


def _places(scored: Scored) -> list[list[list[Any]] | None]:
    """Return the likeliest tokens of each place with their logprobs; None of the first."""
    pairs = zip(scored.ids[1:], scored.logprobs[1:], strict=True)
    return [None, *([list(pair) for pair in zip(*place, strict=True)] for place in pairs)]
