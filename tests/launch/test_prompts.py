"""Tasks that are looked at before a start: which of them, what is refused and what is warned of."""

import copy
import json
import re
import warnings
from types import SimpleNamespace

import pytest
import verifiers.v1 as vf
from prepared_run import prepared_run

from prl.base.errors import ConfigError
from prl.config.compose import compose
from prl.engines.renderer import make_renderer
from prl.envs.tools import Tools
from prl.launch.prompts import CHECKED, lost_after_a_call, rendered_prompts

FIRST_SYSTEM_ALONE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
    "{% if m.role != 'tool' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FINE = "Say 1."
LATE = [{"role": "user", "content": "Hi"}, {"role": "system", "content": "S"}, {"role": "user", "content": "Say 1."}]
DROPPED = [{"role": "user", "content": "Hi"}, {"role": "tool", "tool_call_id": "c", "content": "7"}, LATE[2]]


@pytest.fixture
def look(tokenizer):
    """`look(prompts)`: the number of prompts that can be rendered and what is warned of."""
    own = copy.deepcopy(tokenizer)
    own.chat_template = FIRST_SYSTEM_ALONE
    renderer = make_renderer(own, name="default")

    def looked_at(prompts):
        tasks = [vf.Task(vf.TaskData(idx=number, prompt=prompt)) for number, prompt in enumerate(prompts)]
        env = SimpleNamespace(name="e", tasks=tasks, tools=Tools(), uses_harness=False, verifiers_env=None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = rendered_prompts(env, renderer, "renderer")
        return len(found), [str(each.message) for each in caught]

    return looked_at


@pytest.mark.parametrize("place", [0, 5, 3 * CHECKED])
def test_prompt_refused_by_the_template_is_named(look, place):
    prompts = [FINE] * (4 * CHECKED)
    prompts[place] = LATE
    rendered, (warning,) = look(prompts)
    assert rendered == CHECKED + (place >= CHECKED) - 1
    assert "late" in warning


def test_prompts_of_which_none_can_be_rendered_are_refused(look):
    with pytest.raises(ConfigError, match="^renderer: .*late"):
        look([LATE] * 3)


CALLS = (
    "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > LIMIT %}{{ raise_exception('too many') }}"
    "{% endif %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
    "{{ c.function | tojson }}{% endfor %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}<|im_end|>\n{% endfor %}"
    "{{ tools | tojson }}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("limit", "said"),
    [("2", []), ("1", ["takes no two calls in a reply: .*too many"]), ("0", ["takes no call of a tool: .*too many"])],
)
def test_calls_that_a_template_takes_are_tried_as_a_run_makes_them(tokenizer, limit, said):
    own = copy.deepcopy(tokenizer)
    own.chat_template = CALLS.replace("LIMIT", limit)
    tool = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
    lost = lost_after_a_call(make_renderer(own, name="default"), [{"role": "user", "content": FINE}], [tool])
    assert len(lost) == len(said) and all(map(re.search, said, lost))


@pytest.mark.parametrize("place", [0, 3 * CHECKED])
def test_message_omitted_by_the_template_is_refused(look, place):
    prompts = [FINE] * (4 * CHECKED)
    prompts[place] = DROPPED
    with pytest.raises(ConfigError, match="leaves out message 2, the tool's '7'"):
        look(prompts)


def test_a_demonstration_that_would_be_cut_is_refused(tmp_path):
    rows = [{"prompt": f"Say {number}.", "answer": str(number), "shown": str(number)} for number in range(24)]
    rows[3]["shown"] = "Write <|im_end|> to stop."
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = [f"envs.jsonl.args.{each}" for each in (f"path={path}", "demonstration_key=shown", "eval_fraction=0")]
    small = ["run.name=x", "engine.device=cpu", "trainer.device=cpu", "orchestrator.group_size=1"]
    demonstrated = ["algo=sft", "algo.sampling.source=demonstrations", "env=jsonl", "envs.jsonl.eval_args=null"]
    with pytest.raises(ConfigError, match="would leave out 'Write <.im_end.> to stop"):
        prepared_run(compose([*small, *demonstrated, *args]))
