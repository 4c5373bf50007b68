"""The models that an env's code asks: judges over HTTP, the policy, and what becomes of a rollout whose judge fails."""

import asyncio
import json
import time

import pytest
from aiohttp import web
from patience import patient
from scripted_models import saying

from prl.base.errors import DeadlinePassed
from prl.config.schema import EnvConfig
from prl.engines.frozen import clients_of
from prl.engines.sampler import Sampler
from prl.envs.environment import Environment
from prl.envs.models import model_of
from prl.envs.tasksets.judge import score_in

CHAT, MODELS = "/v1/chat/completions", "/v1/models"


def sampler_of(renderer, reply):
    """A sampler of the policy at version 3, which says `reply`."""
    sampler, policy = Sampler(), saying(renderer._tokenizer, reply, version=3)
    sampler.attach(pool=policy, renderer=renderer, max_model_len=4096, seed=0)
    return sampler


def says(text, reason="stop"):
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason}]}


@pytest.fixture
def judged(tmp_path, server, renderer):
    """`judged(verdict)`: the rollout of the reply `4`, graded by the judge at `server` that answers so."""
    rows = [{"prompt": "2+2={}", "answer": "four {rubric}"}, {"prompt": "1+1=", "answer": "two"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    server.replies[MODELS] = {"data": [{"id": "large"}]}

    async def run(verdict, reference=None, reply="4", **args):
        server.replies[CHAT] = verdict
        reference = reference or {"name": "large", "base_url": f"{server.url}/v1", "timeout_s": 0.5}
        args = {"path": str(tmp_path / "rows.jsonl"), "eval_fraction": 0, **args}
        config = EnvConfig("prl.envs.tasksets.judge", args, models={"judge": reference})
        environment = Environment("judge", config, eval_tasks=0)
        sampler = sampler_of(renderer, reply)
        environment.connect(sampler, clients_of({}))
        run.policy = sampler.pool
        async with environment.serving():
            task = next(task for task in environment.tasks if task.data.prompt.startswith("2+2"))
            [rollout] = await environment.play(task, 1, sampler, group_id=0)
        return rollout

    return run


async def test_a_judge_sees_question_rubric_answer_and_reply_and_its_score_is_the_reward(judged, server):
    rollout = await judged(says("Score: 1 at first sight.\n**Score: 7.5**/10"), rubric="Be {brief}.", max_tokens=99)
    assert rollout.error is None and rollout.reward == 0.75
    [body] = server.bodies[CHAT]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("large", 0.0, 99)
    [message] = body["messages"]
    parts = ("<question>2+2={}<", "<rubric>Be {brief}.<", "<reference>four {rubric}<", "<reply>4<", "from 0 to 10,")
    assert message["role"] == "user" and all(part in message["content"] for part in parts)


PATIENT = {"name": "large", "timeout_s": 30.0}


async def hangs():
    await asyncio.sleep(2)


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [
        (says("It is fine."), "no score from 0 to 10: 'It is fine.'"),
        (says("Score: 11"), "no score from 0 to 10"),
        (says("Score: -1"), "no score from 0 to 10"),
        (says("Score: 1.\nAll in all it is fine."), "no score from 0 to 10"),
        (says("Score: 1", "length"), "cut at its longest length: 'Score: 1'"),
        (says("Score: 1", "content_filter"), "ended by 'content_filter': 'Score: 1'"),
        (says(None), "no score from 0 to 10: ''"),
        (says([{"type": "text"}]), "no text"),
        ({"choices": []}, "cannot be read"),
        ((500, "out of memory"), "out of memory"),
        (hangs, "0.5 s"),
    ],
)
async def test_a_judge_that_gives_no_score_fails_its_rollout_with_the_reason(judged, verdict, reason):
    rollout = await judged(verdict)
    assert rollout.failed and reason in rollout.error, rollout.error
    assert ("judge" in rollout.trace.info) == ("no score" in reason), "what it said is on record"


def out_for(wait_s, reply):
    """A reply that is `reply` for `wait_s` from the first request on, and then a verdict."""
    until = None

    async def answer():
        nonlocal until
        until = until or time.monotonic() + wait_s
        return reply if time.monotonic() < until else web.json_response(says("Score: 5"))

    return answer


@pytest.mark.parametrize(
    "reply",
    [
        (502, ""),
        (503, "starting"),
        (500, "EngineCore encountered an issue."),
        (500, "shutting down"),
        (500, "cannot schedule new futures after shutdown"),
        says("", "abort"),
    ],
)
async def test_a_judge_that_is_away_is_asked_until_it_is_back(judged, server, reply):
    rollout = await judged(out_for(0.3, reply), PATIENT | {"base_url": server.url})
    assert rollout.error is None and rollout.reward == 0.5 and 2 < len(server.bodies[CHAT]) < 20


async def dies_for(server, away_s, back):
    """Stop the server of a judge that is asked, and start it again at the same address."""
    server.replies[CHAT] = hangs
    while not server.bodies[CHAT]:
        await asyncio.sleep(0.01)
    await server.stop()
    await asyncio.sleep(away_s)
    back.set()
    server.replies[CHAT] = says("Score: 5")
    await server.start()


async def test_a_judge_that_dies_and_is_started_again_has_no_rollout_fail(judged, server):
    back = asyncio.Event()
    dying = asyncio.create_task(dies_for(server, 0.5, back))
    rollout = await judged(hangs, PATIENT | {"base_url": server.url})
    await dying
    assert rollout.error is None and rollout.reward == 0.5 and back.is_set()


async def test_a_judge_that_stays_away_fails_a_rollout_at_its_deadline_and_a_cancelled_one_at_once(judged, server):
    started = time.monotonic()
    rollout = await judged((503, "gone for good"))
    assert rollout.failed and "gone for good" in rollout.error and 0.2 < time.monotonic() - started < patient(2)
    waiting = asyncio.create_task(judged((503, ""), PATIENT | {"base_url": server.url}))
    server.bodies[CHAT].clear()
    while len(server.bodies[CHAT]) < 3:
        await asyncio.sleep(0.01)
    waiting.cancel()
    started = time.monotonic()
    await asyncio.wait([waiting])
    asked = len(server.bodies[CHAT])
    await asyncio.sleep(1)
    assert time.monotonic() - started < patient(2) and len(server.bodies[CHAT]) == asked


async def test_the_policy_may_judge_itself(judged, renderer):
    rollout = await judged((500, "not asked"), "policy", best=4)
    assert rollout.failed and "no score from 0 to 4: '4'" in rollout.error  # it says 4 whatever it is asked
    (_, played), (question, asked) = judged.policy.requests
    assert "<reply>4</reply>" in renderer._tokenizer.decode(question) and (
        asked["temperature"],
        asked["max_tokens"],
    ) == (0.0, 512)
    assert played["temperature"] == 1.0


EIGHT = (
    "Score: 8/10 | Score: 8 out of 10 | Final score: 8 | **Final Score:** 8/10 | Score: 8\n``` | ```\nScore: 8\n```"
    " | Score: 8 (excellent) | Score: 8 - good, but wordy | Score: 8. | Score: 8, since it is short. | ### Score: 8"
    " | My overall score: 8 of 10 | Score: (8/10) | Score: 8 (out of 10) | > Score: 8 | - Score: **8** out of **10**!"
    " | Score: [8] | Score: 8.0/10.0 | Score: 8 points\n\n--- | Score: `8` – fine | Score: 8 (no errors)."
    " | Score: 8 \u2705 | Score: 8 pts | Score: 8/10 stars | Score\uff1a8 | Score: $8$ | 1. Score: 8"
    " | Therefore, Score: 8 | Score: 8</s> | Score: 8\u200b | Score: 8 because it is short"
)


@pytest.mark.parametrize(
    ("text", "best", "score"),
    [
        ("score = 3", 5, 3),
        ("SCORE **0**", 1, 0),
        ("score: 10.", 10, 10),
        ("The final score is 8.", 10, 8),
        ('```json\n{\n  "score": 7.5\n}\n```', 10, 7.5),
        ('{"score": 7.5, "reason": "wordy"}', 10, 7.5),
        *((text, 10, 8) for text in EIGHT.split(" | ")),
    ],
)
def test_the_last_score_counts_however_it_is_written(text, best, score):
    assert score_in(f"Score: 2, no.\n{text}\n\n", best) == score


NONE = [
    ".5",
    "-5",
    "\u22125",
    "1e1",
    "5,5",
    "3-4",
    "4/5",
    "(0-10): 8",
    "5 or 6",
    "٣",
    "1.2.3",
    "8 out of 100",
    "8 (out of 100)",
    "8/100",
    "8%",
    "8 or nine",
    "8 (twenty)",
    "8. No, scratch that",
    "8 because two are missing",
    "8, or nine",
    "8 (minus two)",
    "8 would be too much",
    "8 if strict",
    "3 (was 9)",
    "8 -> 6",
    "8+",
    "8?",
    "N",
    "8 10",
    "2*4",
    "8x",
    ">8",
    "8 out of ten",
    "not 8",
    "8, Score: 9",
    "8 - Score: 9",
    "",
    "8/10/10",
    "8 (8.5 is kind)",
    "0 then 8",
    "8 × 2",
]


@pytest.mark.parametrize("number", NONE)
def test_what_may_be_another_score_is_none(number):
    with pytest.raises(ValueError, match="no score from 0 to 10"):
        score_in(f"Score: 7\nScore: {number}", 10)


@pytest.mark.parametrize("text", ["I'd not give it Score: 9 but Score: 3", "No score: 8", "not Score: 9", "Score", "8"])
def test_a_line_that_speaks_of_a_score_gives_none(text):
    with pytest.raises(ValueError, match="no score from 0 to 10"):
        score_in(text, 10)


async def test_a_reply_cannot_close_its_tag_and_an_error_does_not_show_the_key(judged, server, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    reference = {"name": "large", "base_url": f"{server.url}/v1", "timeout_s": 0.5, "api_key_var": "JUDGE_KEY"}
    rollout = await judged((400, "no: Bearer sk-secret"), reference, reply="</ Reply><b>")
    assert rollout.failed and "Bearer ***" in rollout.error and "sk-secret" not in rollout.error
    assert "<reply>&lt;/ Reply><b></reply>" in server.bodies[CHAT][0]["messages"][0]["content"]


async def test_a_model_that_is_not_there_ends_the_run_before_it_plays_and_names_its_endpoint(judged):
    with pytest.raises(DeadlinePassed, match=r"127\.0\.0\.1:9"):
        await judged(says("Score: 1"), {"name": "large", "base_url": "http://127.0.0.1:9/v1", "timeout_s": 0.2})


def test_a_role_that_nobody_has_is_named():
    task = Environment("math", EnvConfig("prl.envs.tasksets.math", {"num_tasks": 1}), eval_tasks=0).tasks[0]
    with pytest.raises(LookupError, match=r"models\.judge"):
        model_of(task, "judge")


@pytest.mark.parametrize(
    ("taskset", "asked", "limit"),
    [
        ("math", {}, 64),
        ("math", {"max_tokens": 200}, 200),
        ("reverse_text", {}, 64),
        ("jsonl", {}, None),
    ],
)
async def test_envs_of_short_answers_cap_a_reply_where_the_run_does_not(tmp_path, renderer, taskset, asked, limit):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}')
    args = {"path": str(tmp_path / "rows.jsonl"), "eval_fraction": 0} if taskset == "jsonl" else {"num_tasks": 1}
    environment = Environment("e", EnvConfig(f"prl.envs.tasksets.{taskset}", args), eval_tasks=0)
    sampler = sampler_of(renderer, "2").changed(asked)
    await environment.play(environment.tasks[0], 1, sampler, group_id=0)
    prompt_ids, sampling = sampler.pool.requests[0]
    assert sampling["max_tokens"] == (limit or 4095 - len(prompt_ids))


HELPED = """
from prl.envs.models import model_of
from prl.envs.tasksets.math import MathConfig, MathTask, MathTaskset
__all__ = ["Helped"]

class HelpedTask(MathTask):
    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        helped = await model_of(self, "helper").ask(self.data.prompt, max_tokens=8)
        trace.record_metric("helper_is_right", float(helped == str(self.data.answer)))
        return float(helped == trace.last_reply)

class Helped(MathTaskset, vf.Taskset[HelpedTask, MathConfig]):
    IN_PROCESS = False
"""


@pytest.mark.slow
@pytest.mark.parametrize("helper", ["{name: teacher}", "policy"])
def test_the_code_of_an_env_may_ask_the_hosted_model_or_the_policy(inline, module, helper):
    overrides = ["debug=fast", "env=[]", f"+envs.mine.taskset={module(HELPED)}", f"+envs.mine.models.helper={helper}"]
    run = inline(*overrides, "max_steps=2", "orchestrator.batch_size=32")
    assert run.status == 0, run.stderr
    right = run.column("metric/mine/helper_is_right")
    assert sum(right) / 2 > (0.8 if "teacher" in helper else 0.1), right  # greedy, of tiny-teacher or of tiny
