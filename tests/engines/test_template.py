"""The renderer over a model's own chat template: ends of turns, thoughts, whole conversations, and what it loses.

The shapes of real templates are in `test_template_matrix.py`; here are the single rules, over a tokenizer of bytes.
"""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from prl.base.errors import ConfigError
from prl.engines.chat import Answer, Dialogue, UnusableReply, as_completion
from prl.engines.renderer import UnrenderablePrompt, make_renderer, render_prompt
from prl.engines.template_check import losses_of_prompt

BODY = "{{ '<|im_start|>' + m.role + '\n' + %s + '<|im_end|>\n' }}"
OPEN = "{%% if add_generation_prompt %%}{{ '<|im_start|>assistant\n%s' }}{%% endif %%}"
EACH = "{% for m in messages %}"
CHATML = EACH + BODY % "m.content" + "{% endfor %}" + OPEN % ""
OPENS_THOUGHT = EACH + BODY % "m.content" + "{% endfor %}" + OPEN % "<think>\n"
WITHOUT_SYSTEM = EACH + "{% if m.role != 'system' %}" + BODY % "m.content" + "{% endif %}{% endfor %}" + OPEN % ""
FLAGS = (
    EACH
    + BODY % "m.content | replace('/no_think', '') | trim"
    + "{% endfor %}"
    + OPEN % "{{ messages[0].content[:1] }}"
)
STRIPS = EACH + BODY % "m.content.split('</think>')[-1]" + "{% endfor %}" + OPEN % ""
WANTS_USER = (
    "{% if 'user' not in messages | map(attribute='role') %}{{ raise_exception('no user') }}{% endif %}" + CHATML
)
NEXT_MARK = (
    EACH + "{{ '<|im_start|>' + m.content }}{% endfor %}" + "{% if add_generation_prompt %}<|im_end|>{% endif %}"
)
PLAIN_END = EACH + "{{ m.role + ': ' + m.content + ' // ' }}{% endfor %}assistant: "


ONE_SYSTEM = (
    EACH + "{% if m.role != 'system' or loop.first %}" + BODY % "m.content" + "{% endif %}{% endfor %}" + OPEN % ""
)
AS_PYTHON = EACH + BODY % "m.content | string" + "{% endfor %}" + OPEN % ""
CALL_ALONE = EACH + BODY % "m.tool_calls[0].function.name if m.tool_calls else m.content" + "{% endfor %}" + OPEN % ""


def user(text):
    return {"role": "user", "content": text}


def system(text):
    return {"role": "system", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """A tokenizer of a chat template, as if from a model folder with the files that are given."""

    def tokenizer(template=CHATML, eos="<|endoftext|>", **files):
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        made = Tokenizer(models.BPE(vocab={byte: number for number, byte in enumerate(alphabet)}, merges=[]))
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        made.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|bos|>"])
        marks = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
        made.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
        fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=eos)
        fast.chat_template = template
        if files:
            folder = tmp_path_factory.mktemp("model")
            for name, content in files.items():
                (folder / f"{name}.json").write_text(json.dumps(content))
            fast.name_or_path = str(folder)
        return fast

    return tokenizer


def rendered(tokenizer, messages, name="default"):
    return tokenizer.decode(render_prompt(make_renderer(tokenizer, name=name), messages).token_ids)


def parsed(tokenizer, reply, prompt=(), name="default"):
    renderer = make_renderer(tokenizer, name=name)
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in (reply, "".join(prompt))]
    return renderer.parse_response(ids[0], prompt_ids=ids[1])


# --- ends of turns ----------------------------------------------------------------------------------------------------

END, TEXT_END, BOS, START = "<|im_end|>", "<|endoftext|>", "<|bos|>", "<|im_start|>"


@pytest.mark.parametrize(
    ("template", "generation", "config", "name", "ends"),
    [
        (CHATML, None, None, "default", {TEXT_END, END}),  # the template's own
        (NEXT_MARK, None, None, "default", {TEXT_END, START}),  # nothing behind a reply but the next message
        (PLAIN_END, None, None, "default", {TEXT_END}),  # a text ends a turn there, and no token
        (CHATML, [BOS, TEXT_END], None, "default", {TEXT_END, END, BOS}),
        (CHATML, BOS, None, "default", {TEXT_END, END, BOS}),
        (CHATML, None, BOS, "default", {TEXT_END, END, BOS}),  # where there is no generation_config.json
        (CHATML, TEXT_END, BOS, "default", {TEXT_END, END}),  # it counts where there is one
        (CHATML, [], BOS, "default", {TEXT_END, END, BOS}),  # that names an end
        (CHATML, [BOS], None, "qwen3", {TEXT_END, END, BOS}),  # of a renderer that knows its family's
    ],
)
def test_a_turn_ends_where_tokenizer_files_and_template_end_it(make, template, generation, config, name, ends):
    ids_of = make().convert_tokens_to_ids
    files = {
        file: {"eos_token_id": ids_of(named)} if named else {"do_sample": True}
        for file, named in (("generation_config", generation), ("config", config))
        if named is not None
    }
    tokenizer = make(template, **files)
    renderer = make_renderer(tokenizer, name=name)
    assert {tokenizer.decode([token]) for token in renderer.get_stop_token_ids()} == ends
    for end in ends:
        assert parsed(tokenizer, f"4{end}", name=name).content == "4"


@pytest.mark.parametrize("name", ["default", "qwen3"])
@pytest.mark.parametrize(
    ("marks", "reply"),
    [
        (("<answer>", "</answer>"), "<answer>4</answer>"),
        (("<step>",), "one<step>two<step>"),
        (("<|box_start|>", "<|box_end|>"), "It is <|box_start|>4<|box_end|>."),
        (("<|begin_of_thought|>", "<|end_of_thought|>"), "<|begin_of_thought|>two<|end_of_thought|>4"),
        ((), f"4{START}user"),
    ],
)
def test_only_the_end_of_a_turn_leaves_the_text(make, name, marks, reply):
    tokenizer = make(eos=END)
    tokenizer.add_special_tokens({"extra_special_tokens": list(marks)})
    assert parsed(tokenizer, f"{reply}{END}", name=name).content == reply
    assert parsed(tokenizer, reply, name=name).content == reply, "cut by its length"
    sent = rendered(tokenizer, [user("U1")], name=name)
    again = rendered(tokenizer, [user("U1"), assistant(reply), user("U2")], name=name)
    assert again.startswith(f"{sent}{reply}{END}\n"), "the second turn goes on with the tokens of the first"


def test_unended_turn_is_rendered_again(make):
    tokenizer = make(eos=END, generation_config={"eos_token_id": [make().convert_tokens_to_ids(BOS)]})
    renderer = make_renderer(tokenizer, name="qwen3", thinking_retention="all")
    prompt = renderer.render_ids([user("U1")], add_generation_prompt=True)
    for end, goes_on in ((END, True), (BOS, False)):
        reply = tokenizer.encode(f"4{end}", add_special_tokens=False)
        assert (renderer.bridge_to_next_turn(prompt, reply, [user("U2")]) is not None) == goes_on
    assert renderer.config.name == "qwen3", "else as it was"


# --- thoughts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "reply", "thought", "content"),
    [
        ("A<think>\n", "two</think>4", "two", "4"),
        ("A<think>", "<think>two</think>4", "two", "4"),  # the model opens it again
        ("A<think>\n", "two", "two", ""),  # it never ends
        ("A<think>\n\n</think>\n\n", "4", None, "4"),
        ("A", "<think>two</think>4", "two", "4"),
        ("use <think><|im_end|>\nA", "4", None, "4"),  # words of the user
    ],
)
def test_a_reply_goes_on_with_the_thought_that_its_prompt_opened(make, prompt, reply, thought, content):
    message = parsed(make(), reply + END, prompt)
    assert (message.reasoning_content, message.content) == (thought, content)


# --- whole conversations ----------------------------------------------------------------------------------------------


def test_a_template_sees_the_conversation_whole(make):
    tokenizer = make(WANTS_USER)
    messages = [system("S"), user("U1"), assistant("A1"), user("U2")]
    found = make_renderer(tokenizer, name="default").render(messages, add_generation_prompt=True)
    assert tokenizer.decode(found.token_ids) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU1<|im_end|>\n<|im_start|>assistant\nA1<|im_end|>\n"
        "<|im_start|>user\nU2<|im_end|>\n<|im_start|>assistant\n"
    )
    spans = [
        None if span is None else tokenizer.decode(found.token_ids[slice(*span)])
        for span in found.message_token_spans()
    ]
    assert spans == [
        None,  # alone it is refused: its tokens are the next message's
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU1<|im_end|>\n",
        "<|im_start|>assistant\nA1<|im_end|>\n",
        "<|im_start|>user\nU2<|im_end|>\n",
    ]


@pytest.mark.parametrize(
    "template",
    [
        EACH + BODY % "'final: ' + m.content" + "{% endfor %}" + OPEN % "",  # replies have a part of a format's own
        EACH + BODY % "m.content" + "{% endfor %}",  # no generation prompt: a model would write the header itself
    ],
)
def test_a_template_whose_replies_are_read_as_others_is_refused(make, template):
    with pytest.raises(ConfigError, match=r"^renderer\.name=default does not fit .* so that it is read as '.+Reply"):
        make_renderer(make(template), name="default")


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (CHATML, []),
        (CHATML, [user("U"), assistant("Sure: ")]),
        (WANTS_USER, [system("S")]),
        ("{{ messages[9].content }}", [user("U")]),
        (CHATML, [user("half a character: \ud83d")]),
    ],
)
def test_a_conversation_without_a_prompt_is_refused(make, template, messages):
    with pytest.raises(UnrenderablePrompt):
        rendered(make(template), messages)


# --- what is lost -----------------------------------------------------------------------------------------------------

NAMES_TOOLS = CHATML.replace("{% for", "{{ tools | tojson }}{% for")


def calling(name):
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": '{"city": "Oslo"}'}}
    return {**assistant(""), "tool_calls": [call]}


JOINS = CHATML.replace("m.content", "(m.content if m.content is string else m.content | map(attribute='text') | join)")


def calls_as(expression):
    return CHATML.replace("m.content", f"({expression} if m.tool_calls else m.content) | string")


def two_calls():
    calls = [*calling("f")["tool_calls"], *calling("g")["tool_calls"]]
    return [user("U"), {**assistant(""), "tool_calls": calls}, user("V")]


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {}}}


@pytest.mark.parametrize(
    ("template", "messages", "tools", "left_out"),
    [
        (CHATML, [system("S"), user("U"), assistant("A"), user("V")], None, []),
        (CHATML, [user("  U\n ")], None, []),
        (WITHOUT_SYSTEM, [system("Be brief."), user("U")], None, [True]),
        (FLAGS, [system("/no_think"), user("U")], None, [False]),  # a command to the template, which it obeys
        (STRIPS, [user("U"), assistant("<think>R</think>A"), user("V")], None, []),  # as many do with earlier thoughts
        (STRIPS, [user("not </think> this"), assistant("A"), user("V")], None, [False]),
        (CHATML, [user("U")], [WEATHER], [True]),
        (ONE_SYSTEM, [system("S"), system("T"), user("U")], None, [True]),
        (AS_PYTHON, [user([{"type": "text", "text": "U"}])], None, [True]),
        (JOINS, [user([{"type": "text", "text": text} for text in ("U", "V")])], None, []),
        (CALL_ALONE, [user("U"), {**assistant("x"), "tool_calls": [WEATHER]}, user("V")], None, [False]),
        (NAMES_TOOLS, [user("U"), calling("weather"), user("V")], [WEATHER], [False]),  # it is in the list of tools
        (CHATML, [user("What does the tool weather do?")], [WEATHER], [True]),
        (calls_as("m.tool_calls[:1]"), two_calls(), None, [False]),
    ],
)
def test_what_a_prompt_loses_is_found(make, template, messages, tools, left_out):
    renderer = make_renderer(make(template), name="default")
    assert [loss.left_out for loss in losses_of_prompt(renderer, messages, tools)] == left_out


@pytest.mark.parametrize(
    ("template", "message", "trained"),
    [
        (CHATML, assistant("<think>R</think>A"), "<think>R</think>A<|im_end|>"),
        (STRIPS, assistant("<think>R</think>A"), None),
        (CHATML, {**assistant("A"), "reasoning_content": "R"}, None),  # the template does not know the field
        (CHATML, {**assistant(""), "tool_calls": [WEATHER]}, None),
        (CHATML, assistant("Write <|im_end|> to stop."), None),
        (CHATML, assistant("Write <|im_start|> to begin."), "Write <|im_start|> to begin.<|im_end|>"),
        (STRIPS, assistant("The tag </think> closes it."), None),
        (CHATML, assistant([{"type": "text", "text": "A"}]), None),
        ("{{ raise_exception('no') }}", assistant("A"), None),
        (OPENS_THOUGHT, assistant("A"), None),  # what the policy would have sampled begins with a thought
    ],
)
def test_a_demonstration_is_trained_whole_or_refused(make, template, message, trained):
    tokenizer = make(template)

    def completion():
        return as_completion(make_renderer(tokenizer, name="default"), Dialogue([user("U")]), Answer(message), 100)

    if trained is None:
        with pytest.raises((UnusableReply, UnrenderablePrompt)):
            completion()
    else:
        assert tokenizer.decode(completion().token_ids) == trained
