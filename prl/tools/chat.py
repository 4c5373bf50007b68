"""Talk to a model by hand, on a terminal or line by line from a pipe.

    prl chat <target> [group=option …] [key=value …]

A target is a run or a checkpoint of one, a model folder, a model of prl or of
the hub, or the URL of an endpoint.

options:
  sampling.temperature=1.0      0 = greedy
  sampling.max_tokens=null      the longest reply, in tokens
  sampling.top_p=1.0            nucleus sampling
  sampling.top_k=0              the most likely tokens alone; 0 = all
  sampling.stop=[]              strings that end a reply
  seed=0                        the seed of sampling
  model.max_model_len=null      prompt and reply together, in tokens
  renderer=auto                 how messages become tokens
  engine=default                engine=transformers: in this process
  endpoint.api_key_var=null     the variable that holds an endpoint's key

examples:
  prl chat outputs/hello sampling.temperature=0
  echo "12+34=" | prl chat tiny
  prl chat http://127.0.0.1:8001/v1 endpoint.api_key_var=PRL_TOKEN
"""

import signal
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from omegaconf import DictConfig
from rich.text import Text

from prl.base.errors import ConfigError
from prl.base.terminal import Console
from prl.base.text import safe
from prl.config.compose import CONF, to_config
from prl.config.evaluation import EvaluationConfig
from prl.launch import command
from prl.launch.children import leave_none
from prl.launch.signals import run_to_end
from prl.tools.evaluation.arguments import start

if TYPE_CHECKING:
    from prl.engines.client import ModelPool
    from prl.engines.sampler import Sampler

COMMANDS = "/system TEXT  /image PATH  /reset  /quit"


def main(config: EvaluationConfig) -> None:
    """Serve the model and talk until the input ends. Raises ConfigError before anything has started."""
    from prl.engines.tokenizers import load_tokenizer
    from prl.launch import components
    from prl.launch.shared_engines import launcher_of
    from prl.tools.evaluation import play
    from prl.tools.evaluation.serving import serve_each

    engines = play.plan_engines(config, Path(f"{config.run.dir}.log"))
    if [len(served.targets) for served in engines] != [1]:
        raise ConfigError("a chat is with one model: give one checkpoint, run, model or endpoint")
    target = engines[0].targets[0]
    model = target.model
    tokenizer = load_tokenizer(model.path, target.name, model.trust_remote_code)
    renderer = components.renderer_of("renderer", config.renderer, model, tokenizer, engines[0].pictures)
    sampler = play.build(config.sampling, play.Sampler, "sampling")

    async def talk(_: object, pool: "ModelPool") -> None:
        play.attach(sampler, pool, renderer, model, config.seed)
        await Chat(sampler).until_quit()

    run_to_end(serve_each(partial(launcher_of, config.launcher), engines, talk))


@dataclass
class Chat:
    """One conversation: reads lines, prints replies."""

    sampler: "Sampler"
    messages: list[dict[str, Any]] = field(default_factory=list)
    images: list[dict[str, Any]] = field(default_factory=list)
    """Pictures for the next message, as its parts."""
    system: str = ""
    requests: int = 0

    def __post_init__(self) -> None:
        self.out = Console(highlight=False, soft_wrap=True)
        # A pipe gets replies alone.
        self.aside = self.out if sys.stdin.isatty() else Console(stderr=True, highlight=False, soft_wrap=True)

    async def until_quit(self) -> None:
        """Answer line by line until /quit, Ctrl-D, Ctrl-C, the end of the input, or of whoever reads the replies."""
        self.say(COMMANDS)
        while (line := read_line()) is not None and line.strip() != "/quit":
            if line.startswith("/"):
                self.obey(*line.strip().partition(" ")[::2])
            elif line.strip():
                await self.answer(line)

    def say(self, text: str) -> None:
        self.aside.print(Text(safe(text), "dim"))

    def obey(self, name: str, value: str) -> None:
        """Carry out a command."""
        if name == "/system":
            self.system = value
        elif name == "/reset":
            self.messages.clear()
            self.images.clear()
        elif name == "/image":
            return self.show(value)
        else:
            return self.say(f"there is no {name}: {COMMANDS}")
        self.say(f"{name[1:]}: {value or 'done'}")

    def show(self, path: str) -> None:
        """Put a picture into the next message."""
        from prl.rollouts.images import Origin, keep
        from prl.rollouts.pictures import PictureError

        store = self.sampler.pictures
        if store is None:
            return self.say("this model sees no pictures")
        file = Path(path).expanduser().absolute()
        if not file.is_file():
            return self.say(f"there is no file {path}")
        try:
            url = keep(store, str(file), Origin(Path("/")))
        except PictureError as error:
            return self.say(str(error))
        self.images.append({"type": "image_url", "image_url": {"url": url}})
        self.say(f"image: {path}, with your next message")

    async def answer(self, text: str) -> None:
        """Have the model reply to `text`, and print the reply. The request's number is part of its seed."""
        from prl.engines.renderer import UnrenderablePrompt, input_of, render_prompt
        from prl.engines.sampler import OverlongPrompt
        from prl.envs.turn import parse

        opening = [{"role": "system", "content": self.system}] if self.system else []
        content: Any = [*self.images, {"type": "text", "text": text}] if self.images else text
        asked = [*self.messages, {"role": "user", "content": content}]
        self.requests += 1
        try:
            prompt = input_of(render_prompt(self.sampler.renderer, [*opening, *asked]))
            [completion] = await self.sampler.complete(prompt, n=1, key=f"chat/{self.requests}")
        except (OverlongPrompt, UnrenderablePrompt) as error:
            return self.say(f"{error}; /reset forgets the conversation")
        reply = parse(completion.token_ids, self.sampler.renderer, prompt_ids=prompt.token_ids)
        said = str(reply.content or "")
        self.messages = [*asked, {"role": "assistant", "content": said}]
        self.images = []
        if reply.reasoning_content:
            self.say(reply.reasoning_content)
        self.out.print(Text(safe(said)))
        ended = f", ended by {completion.finish_reason}" if completion.finish_reason != "stop" else ""
        self.say(f"{len(prompt)} tokens in, {len(completion.token_ids)} out{ended}")


def read_line() -> str | None:
    """The next line of the input; None where it ends, as at Ctrl-C, for which the event loop's handler would not do."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return input("> " if sys.stdin.isatty() else "")
    except (EOFError, OSError, KeyboardInterrupt):
        return None
    finally:
        signal.signal(signal.SIGINT, before)


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="eval")
def _job(cfg: DictConfig) -> None:
    with command.errors_as_exit_codes():
        main(to_config(EvaluationConfig, cfg, []))


if __name__ == "__main__":
    leave_none()
    start(_job, sys.argv[1:], ["run.name=chat-${now:%Y%m%d-%H%M%S-%f}", "env=[]"])
