"""Sampling from snapshots of clients' models in this process: one base, and adapters that are loaded beside it."""

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
from prl.engines.replies import Completion, Scored
from prl.engines.transformers_model import SCORED_AT_ONCE, Batches, TransformersModel
from prl.tinker import adapters
from prl.tinker.sampler import Snapshots, has_adapter, identity
from prl.trainer.lora import WEIGHTS, adapters_of

LOADED = 4
"""Adapters that are kept in memory."""
Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class SnapshotsInProcess(TransformersModel, Snapshots):
    """The base and the snapshots beside it, asked in a thread of their own."""

    def __init__(self, spec: EngineSpec):
        super().__init__(spec)
        self.pool = self
        self._continuing: Batches[tuple[Path | None, Request], list[Continuation] | Exception] = Batches(
            self._thread, functools.partial(self._by_snapshot, self._continue), spec.config.max_num_seqs
        )
        self._judging: Batches[tuple[Path | None, tuple[list[int], int, Shown]], Scored | Exception] = Batches(
            self._thread, functools.partial(self._by_snapshot, self._score), SCORED_AT_ONCE
        )
        self._loaded: OrderedDict[tuple[Path, int], str] = OrderedDict()
        """Names of the adapters in memory, by snapshot; the last one used is at the end."""
        self._whole: tuple[Path, int] | None = None
        """The snapshot whose weights the model has; None = those of the base."""
        self._made = 0

    async def continued(
        self, snapshot: Path | None, prompt: list[int], sampling: dict[str, Any], n: int
    ) -> list[Completion]:
        await asyncio.shield(asyncio.wrap_future(self._ready))
        ends = [] if sampling["ignore_eos"] else self._end_tokens
        known = {key: value for key, value in sampling.items() if key != "ignore_eos"}
        known["stop_token_ids"] = [*ends, *sampling["stop_token_ids"]]
        asked = Request(prompt_ids=prompt, n=n, **known)
        done = _answered(await self._continuing.ask((snapshot, asked), n))
        return [Completion(each.token_ids, each.logprobs, each.finish_reason) for each in done]

    async def scored(self, snapshot: Path | None, tokens: list[int], top_k: int) -> Scored:
        await asyncio.shield(asyncio.wrap_future(self._ready))
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
        adapter = snapshot is not None and has_adapter(snapshot)
        key = None if snapshot is None else identity(snapshot)
        whole = None if adapter else key
        if whole != self._whole:
            self._load(str(whole[0] if whole else self.spec.model.path), self.version)
            self._loaded.clear()
            self._whole = whole
        if not adapter or key is None:
            adapters.use(self._model, None)
            return
        if key not in self._loaded:
            self._loaded[key] = self._insert(key[0])
        self._loaded.move_to_end(key)
        adapters.use(self._model, self._loaded[key])

    @torch.no_grad()
    def _insert(self, folder: Path) -> str:
        """Load an adapter beside the base, where there is no room in place of the one not used for longest.

        Returns its name.
        """
        import peft

        saved = load_file(folder / WEIGHTS)
        name, held = "", {}
        if len(self._loaded) == LOADED:
            _, name = self._loaded.popitem(last=False)
            held = adapters_of(self._model, name)
        if {key: matrix.shape for key, matrix in held.items()} != {key: matrix.shape for key, matrix in saved.items()}:
            if name:
                adapters.remove(self._model, name)
            self._made += 1
            name = f"s{self._made}"
            adapters.insert(self._model, name, peft.LoraConfig.from_pretrained(str(folder)))
            held = adapters_of(self._model, name)
        for key, matrix in held.items():  # a hundred times faster than to make layers anew
            matrix.copy_(saved[key])
        return name


def _answered(answer: Answer | Exception) -> Answer:
    """Return an answer. Raises EngineError where there is none."""
    if isinstance(answer, Exception):
        raise EngineError(f"the engine failed: {type(answer).__name__}: {answer}") from answer
    return answer
