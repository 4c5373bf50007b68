"""A chat from a pipe, with a model that says the same to everyone."""

import io
import sys

import pytest
from seeing_models import noise, seeing_model

from prl.base.errors import ConfigError
from prl.config.evaluation import EvaluationConfig
from prl.engines.pictures import PictureProcessor
from prl.engines.renderer import make_renderer
from prl.engines.sampler import Sampler
from prl.engines.tokenizers import load_tokenizer
from prl.rollouts.pictures import PictureStore
from prl.tools.chat import Chat
from prl.tools.evaluation.serving import Served


@pytest.fixture
def chat(renderer, tokenizer, make_pool, monkeypatch, capsys):
    """`await chat(text, reply=…)`: what is printed of replies, what is said aside, and the model."""

    async def run(text, reply="46", room=512):
        pool, sampler = make_pool(reply), Sampler(max_tokens=9)
        sampler.attach(pool=pool, renderer=renderer, max_model_len=room, seed=0)
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        await Chat(sampler).until_quit()
        printed = capsys.readouterr()
        return printed.out, printed.err, [(tokenizer.decode(ids), sampling) for ids, sampling in pool.requests]

    return run


async def test_each_line_is_answered_and_the_conversation_goes_on(chat):
    out, aside, prompts = await chat("12+34=\n\n1+1=\n")
    assert out == "46\n46\n"
    assert [prompt.count("<|im_start|>user") for prompt, _ in prompts] == [1, 2]
    assert prompts[0][0].endswith("<|im_start|>user\n12+34=<|im_end|>\n<|im_start|>assistant\n")
    assert "tokens in, 3 out" in aside
    assert prompts[0][1]["seed"] != prompts[1][1]["seed"] and prompts[0][1]["temperature"] == 1.0


async def test_commands(chat):
    text = "/system 1+1\n2=\n/reset\n/system\n3=\n/quit\n4=\n"
    out, _, prompts = await chat(text)
    assert out == "46\n46\n" and len(prompts) == 2
    assert prompts[0][0].startswith("<|im_start|>system\n1+1<|im_end|>")
    assert "2=" not in prompts[1][0] and "system" not in prompts[1][0]


async def test_unknown_command_and_overlong_prompt_are_explained(chat):
    out, aside, prompts = await chat("/nope\n" + "1" * 40 + "\n2=\n", room=30)
    assert "there is no /nope: /system TEXT" in aside and "leaves no room" in aside
    assert out == "46\n" and len(prompts) == 1 and "111" not in prompts[0][0], "what had no room is forgotten"


async def test_what_the_model_says_does_not_command_the_terminal(chat, monkeypatch):
    evil = type("Reply", (), {"content": "a\x1b[31mb\x07", "reasoning_content": "\x1b]0;t\x07"})
    monkeypatch.setattr("prl.envs.turn.parse", lambda *_, **__: evil)
    out, aside, _ = await chat("1=\n")
    assert out == "a\\x1b[31mb\\x07\n" and "\\x1b]0;t\\x07" in aside and "\x1b" not in out + aside


@pytest.mark.parametrize("typed", [[], ["env=math"]])
def test_what_is_typed_replaces_what_a_chat_presets(typed, monkeypatch):
    from prl.eval import start
    from prl.launch import command

    started = []
    monkeypatch.setattr(command, "run", lambda job, arguments, root: started.append(arguments))
    start(lambda: None, ["tiny", *typed], ["run.name=chat", "env=[]"])
    keys = [argument.split("=")[0] for argument in started[0]]
    assert sorted(keys) == ["env", "run.name", "targets"] and set(typed) <= set(started[0])


def test_a_chat_is_with_one_model(monkeypatch):
    from prl.tools import chat
    from prl.tools.evaluation import play

    monkeypatch.setattr(play, "plan_engines", lambda config, log: [Served([1, 2], None)])
    with pytest.raises(ConfigError, match="a chat is with one model"):
        chat.main(EvaluationConfig(targets=["a", "b"]))


@pytest.fixture
def sees(tmp_path):
    """A renderer of a model that sees, and its tokenizer."""
    path = seeing_model("qwen3_vl", tmp_path / "model")
    tokenizer = load_tokenizer(path, "model")
    store = PictureStore(tmp_path / "pictures")
    return make_renderer(tokenizer, pictures=PictureProcessor(path, tokenizer, store)), tokenizer


async def test_a_picture_goes_with_the_next_message(sees, chat, make_pool, monkeypatch, capsys, tmp_path):
    """Of 32 x 48 pixels in patches of 8, four of which are a token: 6 tokens."""
    seeing, tokenizer = sees
    noise(32, 48).save(tmp_path / "a b.png")
    (tmp_path / "text.png").write_text("no picture")
    pool, sampler = make_pool("46"), Sampler(max_tokens=9)
    sampler.attach(pool=pool, renderer=seeing, max_model_len=512, seed=0)
    images = ["/image a b.png", "/image gone.png", "/image text.png"]
    lines = [*images, "what is it?", "and now?", f"/image {tmp_path}/a b.png", "/reset", "x"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    await Chat(sampler).until_quit()
    printed = capsys.readouterr()
    assert printed.out == "46\n" * 3 and "there is no file gone.png" in printed.err
    assert "text.png is no picture that can be read" in printed.err
    prompts = [tokenizer.decode(ids) for ids, _ in pool.requests]
    shown = f"user\n<|vision_start|>{'<|image_pad|>' * 6}<|vision_end|>what is it?"
    assert [shown in prompt for prompt in prompts] == [True, True, False]
    assert "<|image_pad|>" not in prompts[2]


async def test_a_model_of_text_sees_no_picture(chat, tmp_path):
    _, aside, prompts = await chat("/image x.png\n1=\n")
    assert "this model sees no pictures" in aside and len(prompts) == 1
