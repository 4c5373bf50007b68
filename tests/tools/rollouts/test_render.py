"""`python -m prl.tools.rollouts`: what it prints of a run, and what it says where there is nothing to print."""

import json

import pytest

from prl.tools.rollouts.__main__ import main


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def outcome(stage, reason="", source=None):
    return {"stage": stage, "reason": reason, "source": source}


def entry(**fields):
    """A `prl.rollouts.record_lines.Record` as it is written: a rollout of `math` that was trained on."""
    trained = {
        **{"step": 4, "env": "math", "agent": "agent", "task": 31, "group": 0, "samples": 1, "completion_tokens": 3},
        **{"reward": 1.0, "rewards": {"answer": 1.0}, "metrics": {"correct": 1.0}, "advantage": 0.475},
        **{"start_version": 3, "end_version": 3, "outcome": outcome("trained"), "matched": {}},
        "messages": [user("61-6="), assistant("55")],
    }
    return trained | fields


CALLS = [
    {"name": "calculate", "arguments": '{"expression": "37*48", "digits": 2}'},
    {"name": "run", "arguments": '{"co'},
]
USE = [
    {"role": "system", "content": "Use it."},
    user("37*48="),
    assistant("", tool_calls=CALLS, reasoning="I will\ncall it."),
    {"role": "tool", "content": "1776\nexactly", "name": "calculate"},
    assistant("1776"),
]
BRANCHED = [
    *(user("K."), assistant("bet"), assistant("check", sampled=False, after=0)),
    *(user("and now?"), assistant("bet", after=None)),
]
BOTH = {"pre_batch": "gibberish", "post_batch": "zero_advantage"}
DROPPED = outcome("post_filtered", "filter zero_advantage", "zero_advantage")
FAILED = {"outcome": outcome("failed", "KeyError: no JSON object", "env"), "reward": 0.0, "advantage": None}
NOTED = {"info": {"judge": "No.\nScore: 0", "seen": [1, 2]}}
KUHN = {"env": "kuhn", "group": 3}
STEP = [
    entry(),
    entry(reward=0.05, rewards={"answer": 0.05}, advantage=-0.475, matched={"pre_batch": "gibberish"}),
    entry(group=1, advantage=0.0, outcome=DROPPED, difficulty_pool="easy", matched=BOTH),
    entry(env="calculator", group=2, task=7, rewards={"answer": 0.0}, end_version=4, messages=USE, **FAILED | NOTED),
    entry(agent="player", reward=0.75, samples=2, outcome=outcome("surplus", "full"), messages=BRANCHED, **KUHN),
    entry(agent="opponent", reward=0.25, **KUHN),
]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run `outputs/toy`, seen from the directory that holds `outputs/`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    folder = tmp_path / "outputs" / "toy" / "rollouts"
    folder.mkdir(parents=True)
    write(folder / "step_000002.jsonl", [entry(step=2, messages=[user("2+2="), assistant("the old one")])])
    write(folder / "step_000004.jsonl", STEP)
    fine = entry(outcome=None, messages=[user("5+5="), assistant("held out")])
    lost = fine | {"outcome": outcome("failed", "TimeoutError: 60 s", "timeout")}
    write(folder / "eval_math_step_000004.jsonl", [fine, lost])
    write(folder / "eval_kuhn_step_000003.jsonl", [fine | {"step": 3, "env": "kuhn"}])
    return folder.parent


def write(path, entries):
    path.write_text("".join(json.dumps(line) + "\n" for line in entries))


@pytest.fixture
def shown(capsys):
    """What a command prints: its lines without trailing spaces."""

    def show(*argv):
        assert main(list(argv)) == 0
        return [line.rstrip() for line in capsys.readouterr().out.splitlines()]

    return show


def block(lines, start):
    """The lines from the one that is `start` to the next empty one."""
    at = lines.index(start)
    return lines[at : lines.index("", at)] if "" in lines[at:] else lines[at:]


def test_a_rollout_is_a_header_and_its_messages(run, shown):
    lines = shown("toy", "--env", "calculator")
    assert block(lines, "step 4 · calculator · task 7 · group 2") == [
        "step 4 · calculator · task 7 · group 2",
        "  reward 0 (answer 0) · no advantage · correct 1 · versions 3 to 4 · 3 tokens",
        "  failed (env): KeyError: no JSON object",
        "system     Use it.",
        "user       37*48=",
        "reasoning  I will",
        "           call it.",
        'assistant  calculate(expression="37*48", digits=2)',
        '           run({"co)',
        "tool       calculate: 1776",
        "           exactly",
        "assistant  1776",
        'info       judge="""',
        "           No.",
        "           Score: 0",
        '           """',
        "info       seen=[1,2]",
    ]


def test_a_broken_history_shows_its_branches(run, shown):
    start = "step 4 · kuhn · task 31 · group 3 · agent player"
    assert block(shown("toy"), start)[3:] == [
        "1 user       K.",
        "2 assistant  bet",
        "             ┄┄ another branch, goes on after message 1 ┄┄",
        "3 assistant  (shown to the model, not sampled)",
        "             check",
        "4 user       and now?",
        "             ┄┄ another branch, opens a history ┄┄",
        "5 assistant  bet",
    ]


def test_pictures_are_named_where_they_stand(run, shown):
    """The size of one that no model was sent is not known; what is no digest is not obeyed either."""
    one, gone = "1f3c9a2b" + 56 * "0", "\x1b[2J" + "/etc"
    prompt = user("Left: , right: ?") | {"pictures": [[6, one], [15, gone]]}
    sent = [[4, 9, one, 48, 32, "f" * 64]]
    write(run / "rollouts" / "step_000004.jsonl", [entry(messages=[prompt, assistant("3")], pictures=sent)])
    assert block(shown("toy"), "step 4 · math · task 31 · group 0")[-2:] == [
        r"user       Left: [picture 1f3c9a2b 48x32], right: [picture \x1b[2J/etc]?",
        "assistant  3",
    ]


def test_one_step_one_env_and_evaluations(run, shown):
    old = shown("outputs/toy", "--step", "2")
    assert old[0] == "outputs/toy · step 2" and "assistant  the old one" in old
    lines = shown("toy", "--env", "kuhn")
    assert {line.split(" · ")[1] for line in lines if line.startswith("step ")} == {"kuhn"}
    assert not any("calculator" in line for line in lines)
    evaluated = shown("toy", "--eval")
    assert evaluated[0] == "outputs/toy · evaluation at step 4"
    assert "assistant  held out" in evaluated and "  failed (timeout): TimeoutError: 60 s" in evaluated
    assert shown("toy", "--eval", "--env", "kuhn")[0] == "outputs/toy · evaluation at step 3"


def test_no_message_controls_the_terminal(run, capsys):
    evil = "\x1b]0;title\x07 \x1b[31mred\x1b[0m \x9b2J \u202eback\r\x08 [red]plain[/red] [/] [link=x]y :smile:"
    seen = r"\x1b]0;title\x07 \x1b[31mred\x1b[0m \x9b2J \u202eback\r\x08 [red]plain[/red] [/] [link=x]y :smile:"
    call = {"name": evil, "arguments": json.dumps({evil: evil}, ensure_ascii=False)}
    printed = [{"role": evil, "content": evil}, assistant(evil, reasoning=evil, tool_calls=[call])]
    names = dict.fromkeys(("env", "agent", "task", "difficulty_pool", "stop"), evil)
    numbers = {"rewards": {evil: 1.0}, "metrics": {evil: 1.0}, "matched": {"pre_batch": evil}, "info": {evil: evil}}
    line = entry(step=9, messages=printed, outcome=outcome("failed", evil, evil), **names, **numbers)
    write(run / "rollouts" / "step_000009.jsonl", [line])
    assert main(["toy"]) == 0
    assert main(["toy", "--env", evil + "?"]) == 2
    out, err = capsys.readouterr()
    assert not [char for char in out + err if not (char.isprintable() or char == "\n")]
    assert seen in " ".join(out.split()) and "[red]plain[/red]" in err


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["toy", "--step", "3"], "training step 3; it has 2, from 2 to 4"),
        (["toy", "--env", "guess"], "env 'guess'; it has: calculator, kuhn, math"),
        (["toy", "--eval", "--step", "2"], "no evaluation 2; it has 2, from 3 to 4"),
        (["toy", "--eval", "--env", "guess"], "no evaluation of env 'guess'"),
        (["nope"], "there is no run with rollouts at nope or outputs/nope"),
        (["torn"], "outputs/torn/rollouts/step_000001.jsonl: 2 lines cannot be read"),
    ],
)
def test_errors_name_what_there_is(run, tmp_path, capsys, argv, named):
    torn = tmp_path / "outputs" / "torn" / "rollouts"
    if argv == ["torn"]:
        torn.mkdir(parents=True)
        (torn / "step_000001.jsonl").write_bytes(b'{"step": 1, \xff\n3\n')
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and named in err
