"""Tasks that are looked at before a start: which of them, what is refused and what is warned of."""

import copy
import warnings
from types import SimpleNamespace

import pytest
import verifiers.v1 as vf

from prl.engines.renderer import make_renderer
from prl.envs.tools import Tools
from prl.errors import ConfigError
from prl.launch.prompts import CHECKED, check_prompts

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
    """`look(prompts)`: what is warned of."""
    own = copy.deepcopy(tokenizer)
    own.chat_template = FIRST_SYSTEM_ALONE
    renderer = make_renderer(own, name="default")

    def looked_at(prompts):
        tasks = [vf.Task(vf.TaskData(idx=number, prompt=prompt)) for number, prompt in enumerate(prompts)]
        env = SimpleNamespace(name="e", tasks=tasks, tools=Tools(), uses_harness=False, verifiers_env=None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            check_prompts(env, renderer, "renderer")
        return [str(each.message) for each in caught]

    return looked_at


@pytest.mark.parametrize("place", [0, 5])
def test_prompt_refused_by_the_template_is_named(look, place):
    prompts = [FINE] * (CHECKED - 1)
    prompts[place] = LATE
    (warning,) = look(prompts)
    assert "late" in warning and warning.endswith("(so with 1 of 15 prompts)")


def test_prompts_of_which_none_can_be_rendered_are_refused(look):
    with pytest.raises(ConfigError, match="^renderer: .*late"):
        look([LATE] * 3)


@pytest.mark.parametrize("place", [0, 4 * (CHECKED - 1)])
def test_message_omitted_by_the_template_is_refused(look, place):
    """Every third of the prompts is rendered."""
    prompts = [FINE] * (4 * CHECKED - 1)
    prompts[place] = DROPPED
    with pytest.raises(ConfigError, match="leaves out message 2, the tool's '7'"):
        look(prompts)
