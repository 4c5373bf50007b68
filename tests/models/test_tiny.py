"""The two committed models: what they weigh, how they tokenise, how well they answer."""

import functools
import json
import random
import statistics
from pathlib import Path

import pytest
import torch
from renderers import Qwen3RendererConfig, create_renderer
from safetensors import safe_open
from tiny_models.episodes import Batched, load, play, rewards
from transformers import AutoModelForCausalLM, AutoTokenizer

from prl import models
from prl.algorithms.opsd import TEMPLATE
from prl.envs.tasksets import kuhn_poker, math, math_retry, reverse_text

MODELS = Path(models.__file__).parent
NAMES = ["tiny", "tiny-teacher"]
TASKSETS = {
    "math": math.MathTaskset(math.MathConfig(split="eval", num_tasks=100)),
    "reverse_text": reverse_text.ReverseTextTaskset(reverse_text.ReverseTextConfig(split="eval", num_tasks=100)),
}
SURE = 40  # of these tasks, where nearly all are solved
GRADES = {"math": math.grade, "reverse_text": reverse_text.grade}

# Share of eval tasks solved, sampled at temperature 1, as promised; 100 tasks put about 0.05 of noise on a third,
# and the seed below fixes which way.
SAMPLED = {"tiny": (0.25, 0.45), "tiny-teacher": (0.90, 1.0)}


# Mean reward of the other envs' eval episodes, sampled at temperature 1; a call that cannot be read counts 0.
EPISODES = 40  # fewer where nearly all are solved
SURE_EPISODES = 16
PLAYED = {
    "calculator": {"tiny": (0.18, 0.52), "tiny-teacher": (0.85, 1.0)},
    "guess": {"tiny": (0.28, 0.55), "tiny-teacher": (0.85, 1.0)},
    "alphabet_sort": {"tiny": (0.25, 0.62), "tiny-teacher": (0.70, 1.0)},
    "reasoning_gym": {"tiny": (0.25, 0.62), "tiny-teacher": (0.75, 1.0)},
}


def user(content: str) -> dict:
    return {"role": "user", "content": content}


@pytest.fixture(scope="module", params=NAMES)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def tokenizer(name):
    return AutoTokenizer.from_pretrained(MODELS / name)


@pytest.fixture(scope="module")
def model(name):
    """As an engine in float32 runs it: the committed bf16 weights, widened."""
    return AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def renderer(tokenizer):
    return create_renderer(tokenizer, Qwen3RendererConfig())


def shown(renderer, task) -> list[int]:
    """What `opsd` puts in front of a rollout."""
    hint = TEMPLATE.replace("{demonstration}", task.data.demonstration)
    return renderer.render_ids([{"role": "system", "content": hint}], add_generation_prompt=False)


@pytest.fixture(scope="module")
def solved(name, model, tokenizer, renderer):
    """`solved(env, how)`: the share of eval tasks that one reply each solves, `sampled`, `greedy` or `hinted`."""

    @functools.cache
    @torch.no_grad()
    def share(env: str, how: str) -> float:
        torch.manual_seed(0)
        tasks = list(TASKSETS[env])[: None if how == "sampled" else SURE]
        prompts = [renderer.render([user(t.data.prompt)], add_generation_prompt=True).token_ids for t in tasks]
        if how == "hinted":
            prompts = [shown(renderer, task) + prompt for task, prompt in zip(tasks, prompts, strict=True)]
        batch = tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
        sampling = {"do_sample": False} if how == "greedy" else {"do_sample": True, "temperature": 1.0, "top_k": 0}
        output = model.generate(**batch, max_new_tokens=12, **sampling)
        replies = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        return statistics.fmean(GRADES[env](reply, t.data.answer) == 1.0 for reply, t in zip(replies, tasks))

    return share


def test_weights_are_bfloat16_tied_and_small_enough_to_commit(name, model):
    path = MODELS / name / "model.safetensors"
    assert path.stat().st_size <= 2_500_000
    with safe_open(path, "pt") as weights:
        names = list(weights.keys())
        assert "lm_head.weight" not in names
        assert {weights.get_tensor(weight).dtype for weight in names} == {torch.bfloat16}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert json.loads((MODELS / name / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]


def test_generation_config_hides_no_sampling_settings(name):
    """Engines take sampling defaults from it; a top_k there would sample something else than the policy."""
    settings = json.loads((MODELS / name / "generation_config.json").read_text())
    assert settings.keys() == {"eos_token_id", "pad_token_id", "transformers_version"}


CALLED = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "37*48-512"}}\n</tool_call>'


@pytest.fixture(scope="module")
def calculator():
    return load("calculator")


def test_tools_are_described_and_called_in_few_tokens(tokenizer, renderer, calculator):
    tools = calculator.tools.wire
    prompt = renderer.render([user(calculator.tasks[0].data.prompt)], tools=tools, add_generation_prompt=True)
    assert len(prompt.token_ids) < 120  # byte by byte 700, of the 512 that a run has room for
    ids = tokenizer.encode(CALLED)
    assert len(ids) == 8 + len("37*48-512")
    (call,) = renderer.parse_response([*ids, tokenizer.eos_token_id], tools=tools).tool_calls
    assert (call.status, call.name, call.arguments) == ("ok", "calculate", {"expression": "37*48-512"})


@pytest.mark.parametrize("env", ["math", "reverse_text", *PLAYED])
def test_plain_text_contains_no_token_of_tool_phrases(tokenizer, env):
    """Letters and digits are what these tasks are made of: each stays a token of its own."""
    texts = [task.data.prompt for task in load(env, num_tasks=100).tasks]
    texts += [TEMPLATE.format(demonstration="12+34=46"), math_retry.correction("12+34=", 46)]
    texts += [f"K. They {a}: {b} or {c}?" for a in kuhn_poker.OPEN for b, c in (kuhn_poker.OPEN, kuhn_poker.ANSWER)]
    texts += [
        "higher",
        "lower",
        "a number",
        "add: ba ca",
        "error: '05*3' is no expression",
        "error: expression: Field required",
    ]
    for text in texts:
        assert len(tokenizer.encode(text)) == len(text), text


def test_tokenizer_round_trips_and_has_no_unknowns(tokenizer, model):
    assert len(tokenizer) <= model.config.vocab_size == -(-len(tokenizer) // 16) * 16
    assert tokenizer.unk_token_id is None
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    rng = random.Random(0)
    texts = [
        "12+34=",
        "reverse: abcd",
        CALLED,
        CALLED[:-15],
        '": "": {"name": "}}\n"}}\n\n',
        " two  spaces\n\t",
        "Grüße, 漢字 🙂",
        "user's <think>x</think>",
    ]
    texts += ["".join(chr(rng.randrange(32, 0x2FFF)) for _ in range(50)) for _ in range(20)]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("12+34=")) == 6
    assert len(tokenizer.encode("assistant")) == 1


CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é"}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "a sum", "parameters": {"type": "object"}}}
CALCULATE = {"id": "2", "type": "function", "function": {"name": "calculate", "arguments": {"expression": "1+2"}}}
SYSTEM = {"role": "system", "content": "Be terse."}


def assistant(content: str, **more) -> dict:
    return {"role": "assistant", "content": content, **more}


@pytest.mark.parametrize(
    "messages",
    [
        [user("12+34=")],
        [SYSTEM, user("12+34="), assistant("46"), user("reverse: abcd")],
        [SYSTEM, user("12+34="), assistant("46")],
        [user("a"), assistant("b", reasoning_content="r"), user("a"), assistant("<think>\ns\n</think>\n\nb")],
        [
            user("a"),
            assistant("so", tool_calls=[CALL, CALL]),
            {"role": "tool", "tool_call_id": "1", "content": "2"},
            {"role": "tool", "tool_call_id": "1", "content": "3"},
            assistant("", tool_calls=[CALL], reasoning_content="r"),
            {"role": "tool", "tool_call_id": "1", "content": "4"},
        ],
        [user("1+2="), assistant("", tool_calls=[CALCULATE]), {"role": "tool", "tool_call_id": "2", "content": "3"}],
    ],
)
@pytest.mark.parametrize("tools", ["none", "one", "calculator"])
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_renderer_equals_chat_template(tokenizer, renderer, calculator, messages, tools, add_generation_prompt):
    tools = {"none": None, "one": [TOOL], "calculator": calculator.tools.wire}[tools]
    rendered = renderer.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)
    assert rendered.token_ids == tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=add_generation_prompt, return_dict=False
    )
    assert len(rendered.is_content) == len(rendered.token_ids)  # so that echo can tell bodies from scaffold


@pytest.mark.parametrize("env", TASKSETS)
def test_sampled_accuracy(name, solved, env):
    low, high = SAMPLED[name] if (name, env) != ("tiny-teacher", "math") else (0.82, 1.0)
    assert low <= solved(env, "sampled") <= high


@pytest.mark.parametrize("env", TASKSETS)
def test_greedy_decoding_solves_most_tasks(name, solved, env):
    assert solved(env, "greedy") >= (0.55 if name == "tiny" else 0.9)


@pytest.mark.parametrize("env", TASKSETS)
def test_base_policy_reads_off_a_demonstration(name, solved, env):
    """What `opsd` lives on: shown how, the same model answers right."""
    assert name != "tiny" or solved(env, "hinted") > 0.68


@pytest.fixture(scope="module")
def episodes(name, model, tokenizer, renderer):
    """`episodes(env, temperature)`: rollouts of its evaluation split, as a run plays them; each played once."""

    @functools.cache
    def played(env: str, temperature: float):
        torch.manual_seed(0)
        sure = name == "tiny-teacher" or temperature == 0.0
        sampler = Batched(model, tokenizer, renderer, temperature=temperature)
        return play(env, sampler, tasks=SURE_EPISODES if sure else EPISODES)

    return played


@pytest.mark.parametrize("env", PLAYED)
def test_sampled_reward_of_episodes(name, episodes, env):
    low, high = PLAYED[env][name]
    assert low <= statistics.fmean(rewards(episodes(env, 1.0))) <= high


@pytest.mark.parametrize("env", PLAYED)
def test_base_policy_plays_better_greedily(name, episodes, env):
    """So that the better replies are within reach of sampling."""
    if name == "tiny":
        gain = statistics.fmean(rewards(episodes(env, 0.0))) - statistics.fmean(rewards(episodes(env, 1.0)))
        assert gain > 0.2


# What Kuhn's equilibrium with a bluffing rate of 1/3 does with J, Q and K: the chance to bet, then that to call.
EQUILIBRIUM = {
    ("{}. check or bet?",): (1 / 3, 0, 1),
    ("{}. They check: check or bet?",): (1 / 3, 0, 1),
    ("{}. check or bet?", "They bet: call or fold?"): (0, 2 / 3, 1),
    ("{}. They bet: call or fold?",): (0, 1 / 3, 1),
}


@pytest.mark.parametrize("answer_text", EQUILIBRIUM)
@torch.no_grad()
def test_poker_teacher_plays_the_equilibrium_base_plays_randomly(name, model, tokenizer, renderer, answer_text):
    for card, chance in zip("JQK", EQUILIBRIUM[answer_text], strict=True):
        if (name, card, len(answer_text)) == ("tiny-teacher", "K", 2):
            continue  # the equilibrium has never checked a king
        messages = [message for text in answer_text for message in (user(text.format(card)), assistant("check"))][:-1]
        prompt = renderer.render(messages, add_generation_prompt=True).token_ids
        first = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
        no, yes = ("f", "c") if answer_text[-1].endswith("fold?") else ("c", "b")
        no, yes = (first[tokenizer.encode(letter)].item() for letter in (no, yes))
        assert no + yes > 0.97
        assert yes == pytest.approx(chance if name == "tiny-teacher" else 0.5, abs=0.2)


def test_few_tool_calls_are_unreadable(episodes):
    rollouts = episodes("calculator", 1.0)
    calls = [message.tool_calls or [] for rollout in rollouts for message in rollout.trace.assistant_messages]
    assert not any(rollout.error for rollout in rollouts)
    assert sum(any(not call.name for call in made) for made in calls) < 0.1 * len(rollouts)
