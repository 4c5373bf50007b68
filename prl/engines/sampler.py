"""The sampler of an env: a model's client pool, its renderer, and the sampling settings of its requests."""

import copy
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from prl.base.errors import ConfigError, EngineError
from prl.config.schema import SamplingConfig
from prl.rollouts.inputs import ModelInput

if TYPE_CHECKING:
    from renderers import Renderer

    from prl.engines.chat import Dialogue, MessageSource
    from prl.engines.client import ModelPool
    from prl.engines.replies import Completion
    from prl.rollouts.pictures import PictureStore

MIN_TEMPERATURE = 0.01
"""Servers raise temperatures between 0 and this one to it."""

NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""The values that leave the model's distribution as it is; a request names only settings that differ."""

ANY_TOKEN = 1 << 32
"""Above every token id that can be written down."""


@dataclass(kw_only=True, eq=False)
class Sampler(SamplingConfig):
    """Samples from one model, the live policy or a frozen one; only its client pool knows which.

    Requests to the policy carry its version as cache salt, so that no cached prefix outlives the weights behind it.
    """

    def check(self, where: str) -> None:
        """Raise ConfigError for settings that bounds cannot rule out; `where` is the node's config key."""
        if "" in self.stop:
            raise ConfigError(f"{where}.stop has an empty string: it would end every completion at once")

    def attach(
        self,
        *,
        pool: "ModelPool | MessageSource",
        renderer: "Renderer",
        max_model_len: int,
        seed: int,
        tokenizer_path: str = "",
        reserve: int = 0,
        vocab_size: int | None = None,
        priority: int = 0,
    ) -> None:
        """Take the live objects that requests need.

        Args:
            pool: The model to sample from.
            renderer: Of the policy's chat template; says which tokens end a turn.
            max_model_len: Longest sequence, prompt and completion together, tokens.
            seed: The run's.
            tokenizer_path: Where the tokenizer lies, for clients that load their own.
            reserve: Tokens that a reference needs beside the rollout's own to score it.
            vocab_size: Rows of the policy's embedding; None = not known.
            priority: Of its requests at a server that answers those of a lower one first; 0 = any server.
        """
        self.pool: ModelPool | MessageSource = pool
        self.renderer: Renderer = renderer
        self.max_model_len = max_model_len
        self.run_seed = seed
        self.tokenizer_path = tokenizer_path
        self.reserve = reserve
        self.priority = priority
        self.vocab_size = ANY_TOKEN if vocab_size is None else vocab_size

    @property
    def pictures(self) -> "PictureStore | None":
        """The store of the pictures that the model is shown; None = it sees none."""
        processor = getattr(self.renderer, "pictures", None)
        return None if processor is None else processor.store

    @property
    def version(self) -> int | None:
        """Policy version that a request sent now starts from; None where a frozen model samples."""
        return self.pool.version

    def parameters(self, key: str) -> dict[str, Any]:
        """The sampling parameters (`prl.engines.protocol`) of the request that `key` names, its seed among them."""
        seed = self.run_seed if self.seed is None else self.seed
        result: dict[str, Any] = {"temperature": self.temperature, "seed": derive_seed(seed, key)}
        if self.max_tokens is not None:
            result["max_tokens"] = self.max_tokens
        result |= {name: getattr(self, name) for name, neutral in NEUTRAL.items() if getattr(self, name) != neutral}
        if self.stop:  # they may name special tokens, which a server would else leave out of the text it searches
            result |= {"stop": list(self.stop), "skip_special_tokens": False}
        return result

    def limited(self, max_tokens: int) -> Self:
        """This sampler with replies of at most `max_tokens`, if it has no limit of its own."""
        return self if self.max_tokens is not None else self.changed({"max_tokens": max_tokens})

    def changed(self, settings: dict[str, Any]) -> Self:
        """This sampler with other settings."""
        own = copy.copy(self)
        vars(own).update(settings)
        return own

    async def complete(
        self,
        prompt: ModelInput,
        *,
        n: int,
        key: str,
        dialogue: "Dialogue | None" = None,
        prefix: str | None = None,
    ) -> "list[Completion]":
        """`n` continuations of one prompt; `key` names the request. Raises OverlongPrompt where there is no room.

        `dialogue` is the prompt as messages, for a source that takes no tokens; `prefix` names what other
        requests have in common with it.
        """
        from prl.engines.chat import MessageSource, as_completion  # configs are composed without an HTTP client

        # The last place stays free: a reference that scores the sequence has to sample one token behind it.
        room = self.max_model_len - 1 - self.reserve - len(prompt)
        if room <= 0:
            kept = f", {self.reserve} of them kept for scoring" if self.reserve else ""
            raise OverlongPrompt(
                f"a prompt of {len(prompt)} tokens leaves no room for an answer: "
                f"model.max_model_len is {self.max_model_len}{kept}"
            )
        sampling = self.parameters(key) | {"stop_token_ids": self.renderer.get_stop_token_ids()}
        sampling["max_tokens"] = min(room, self.max_tokens or room)
        # Greedy continuations of one prompt are all the same, and a server refuses to make several.
        distinct = 1 if self.temperature == 0 else n
        if isinstance(self.pool, MessageSource):
            if dialogue is None:
                raise TypeError(f"{self.pool.model} takes messages: pass the prompt's as `dialogue`")
            answers = await self.pool.answer(dialogue, sampling, n=distinct)
            completions = [as_completion(self.renderer, dialogue, each, sampling["max_tokens"]) for each in answers]
        else:
            sampling |= {"priority": self.priority} if self.priority else {}
            completions = await self.pool.generate(prompt, sampling, n=distinct, prefix=prefix)
            for completion in completions:
                self._check_tokens(completion.token_ids, sampling["max_tokens"])
        # A greedy reply stands for all of its group, so that the group has as many rollouts as any other.
        return completions * (n // distinct)

    def _check_tokens(self, token_ids: list[int], max_tokens: int) -> None:
        """Raise EngineError for tokens that the policy does not have, or more than were asked for."""
        least, most = min(token_ids, default=0), max(token_ids, default=0)
        problem = ""
        if least < 0 or most >= self.vocab_size:
            bad = least if least < 0 else most
            problem = f"token {bad}, which the policy does not have: its embedding has {self.vocab_size} rows"
        elif len(token_ids) > max_tokens:
            problem = f"{len(token_ids)} tokens, where at most {max_tokens} were asked for"
        if problem:
            raise EngineError(f"{whose(self.pool)} sent {problem}")


def whose(pool: "ModelPool | MessageSource") -> str:
    """The name of a source and its servers, for messages."""
    urls = ", ".join(getattr(pool, "urls", ()))
    return f"model {pool.model!r} at {urls}" if urls else f"model {pool.model!r}"


class OverlongPrompt(ValueError):
    """A prompt leaves no room for a completion."""

    kind = "overlong_prompt"


def validate_for_training(sampler: Sampler, where: str, *, live: bool, max_model_len: int) -> None:
    """Raise ConfigError for settings that evaluation may use and training may not.

    The trainer recomputes logprobs as log-softmax of the logits, divided by the temperature, over the whole vocabulary.
    The engine's logprobs are those of the distribution it samples from. Settings that change that distribution in
    another way than the temperature does are refused where the two are compared.

    Args:
        sampler: The source of an env's training rollouts.
        where: Its config key, for messages.
        live: Whether it samples from the live policy; the logprobs of a frozen source are not used.
        max_model_len: Longest sequence of the model, prompt and completion together, tokens.
    """
    if live and sampler.temperature < MIN_TEMPERATURE:
        raise ConfigError(
            f"{where}.temperature must be at least {MIN_TEMPERATURE}, got {sampler.temperature}: the policy trains on "
            "its own samples here. Greedy is for evaluation, +sampling@orchestrator.eval.sampling=greedy, and for the "
            "envs that a frozen model plays, +sampling@envs.<name>.sampling=greedy"
        )
    if sampler.max_tokens is not None and not sampler.max_tokens < max_model_len:
        raise ConfigError(f"{where}.max_tokens={sampler.max_tokens} must be below model.max_model_len={max_model_len}")
    # Nobody compares the logprobs of a frozen model: it may sample as it likes.
    for name, neutral in NEUTRAL.items() if live else ():
        if (value := getattr(sampler, name)) != neutral:
            raise ConfigError(
                f"{where}.{name}={value}: the engine would give each token its probability over the tokens it keeps, "
                f"and the trainer computes it over the whole vocabulary: leave {name} at {neutral:g} for training "
                f"(evaluation may set it with orchestrator.eval.sampling.{name})"
            )


def derive_seed(seed: int, key: str) -> int:
    """A 31-bit seed that depends on nothing but `seed` and the request's name."""
    # Not `hash`, which Python salts anew in each process.
    digest = hashlib.blake2b(f"{seed}/{key}".encode(), digest_size=4).digest()
    return int.from_bytes(digest) >> 1
