"""Pictures in prompts: the ids are those of the model's own processor, the features those of one picture alone."""

import numpy as np
import pytest
from seeing_models import TEMPLATES, noise, part, seeing_model, text

from prl.base.errors import ConfigError
from prl.engines.pictures import PictureProcessor
from prl.engines.renderer import (
    UnrenderablePrompt,
    input_of,
    make_renderer,
    multi_modal,
    placeholders_of,
    render_prompt,
)
from prl.engines.tokenizers import load_tokenizer
from prl.rollouts.pictures import PictureStore

BIG, SMALL = noise(64, 48), noise(37, 100, seed=1)


@pytest.fixture
def show(tmp_path):
    """`show(kind, name)`: a renderer of that kind of model, its tokenizer and the store."""

    def make(kind, name="auto", template=None):
        path = seeing_model(kind, tmp_path / kind, template)
        tokenizer, store = load_tokenizer(path, "model.path"), PictureStore(tmp_path / "pictures")
        processor = PictureProcessor(path, tokenizer, store)
        return make_renderer(tokenizer, name=name, pictures=processor), tokenizer, store

    return make


def references(store, *images):
    return ["picture:" + store.keep(image) for image in images]


def question(big, small):
    return [{"role": "user", "content": [part(big), text("Which of the two"), part(small), text(" is 3?")]}]


@pytest.mark.parametrize("kind", TEMPLATES)
def test_ids_are_those_of_the_models_own_processor(show, kind):
    renderer, tokenizer, store = show(kind)
    messages = question(*references(store, BIG, SMALL))
    prompt = input_of(render_prompt(renderer, messages))
    shown = [
        {"role": "user", "content": [{"type": "image"} if "image_url" in p else p for p in messages[0]["content"]]}
    ]
    words = tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=True)
    processor = renderer.pictures.processor
    own = processor(text=words, images=[[BIG, SMALL]] if kind == "gemma3" else [BIG, SMALL])
    assert prompt.token_ids == list(own["input_ids"][0])
    assert [(p.width, p.height) for p in prompt.pictures] == [BIG.size, SMALL.size]
    placeholder = {prompt.token_ids[at] for p in prompt.pictures for at in range(p.start, p.stop)}
    assert placeholder <= placeholders_of(renderer) and len(placeholder) == 1
    assert prompt.token_ids.count(placeholder.pop()) == sum(p.length for p in prompt.pictures)
    rows = [store.features(p)["pixel_values"] for p in prompt.pictures]
    assert np.array_equal(
        np.concatenate(rows),
        np.concatenate([np.asarray(v) for v in own["pixel_values"]]).reshape(np.concatenate(rows).shape),
    )


def test_placeholders_are_counted_by_size_as_they_are_rendered(show):
    for kind in TEMPLATES:
        renderer, _, store = show(kind)
        prompt = input_of(render_prompt(renderer, question(*references(store, BIG, SMALL))))
        lengths = [p.length for p in prompt.pictures]
        assert renderer.pictures.count([p.digest for p in prompt.pictures]) == sum(lengths)
        # Qwen's: a token for 16 by 16 pixels, each side to the nearest multiple; the others have a fixed number.
        assert lengths == {"llava": [4, 4], "gemma3": [5, 5]}.get(kind, [4 * 3, 2 * 6])


def test_qwens_renderer_of_the_package_makes_the_same_prompt(show):
    renderer, _, store = show("qwen3_vl", "qwen3-vl")
    messages = question(*references(store, BIG, SMALL))
    own, _, _ = show("qwen3_vl", "default")
    assert type(renderer) is not type(own)
    assert input_of(render_prompt(renderer, messages)) == input_of(render_prompt(own, messages))


def test_a_bridge_keeps_the_places_of_earlier_pictures(show):
    renderer, tokenizer, store = show("qwen3_vl", "qwen3-vl")
    big, small = references(store, BIG, SMALL)
    opening, behind = question(big, small), [{"role": "user", "content": [text("And this?"), part(big)]}]
    prompt = input_of(render_prompt(renderer, opening))
    reply = [*tokenizer.encode("3", add_special_tokens=False), renderer.get_stop_token_ids()[0]]
    bridged = renderer.bridge_to_next_turn(
        prompt.token_ids, reply, behind, previous_multi_modal_data=multi_modal(prompt.pictures)
    )
    whole = [*opening, {"role": "assistant", "content": "3"}, *behind]
    assert input_of(bridged) == input_of(render_prompt(renderer, whole))
    assert input_of(bridged).pictures[:2] == prompt.pictures
    with pytest.raises(UnrenderablePrompt, match="spells the token"):
        renderer.bridge_to_next_turn(prompt.token_ids, reply, [{"role": "user", "content": "<|image_pad|>"}])


@pytest.mark.parametrize(("kind", "name"), [("qwen2_5_vl", "default"), ("qwen3_vl", "qwen3-vl"), ("llava", "default")])
def test_a_text_that_spells_a_placeholder_has_no_prompt(show, kind, name):
    renderer, _, store = show(kind, name)
    spelt = renderer.pictures.mark
    (big,) = references(store, BIG)
    for content in (f"What is {spelt}?", [text(spelt), part(big)], [part(big), text(spelt)]):
        with pytest.raises(UnrenderablePrompt, match="spell"):
            render_prompt(renderer, [{"role": "user", "content": content}])


def test_a_template_that_drops_a_picture_is_refused(show):
    blind = (
        "{% for m in messages %}{{ m.content if m.content is string else m.content[-1].text }}{% endfor %}<|im_end|>"
    )
    renderer, _, store = show("qwen3_vl", "default", blind)
    with pytest.raises(UnrenderablePrompt, match=r"0 places .* for 2 pictures"):
        render_prompt(renderer, question(*references(store, BIG, SMALL)))
    text_alone, _, _ = show("qwen3_vl", "qwen3")
    with pytest.raises(UnrenderablePrompt):
        render_prompt(text_alone, question(*references(store, BIG, SMALL)))


@pytest.mark.parametrize("name", ["default", "qwen3-vl"])
def test_each_picture_is_read_and_processed_once(show, monkeypatch, name):
    renderer, _, store = show("qwen3_vl", name)
    messages = question(*references(store, BIG, SMALL))
    made, read = [], []
    keep, image = PictureStore.keep_features, PictureStore.image
    monkeypatch.setattr(PictureStore, "image", lambda *given: read.append(given[1]) or image(*given))
    monkeypatch.setattr(PictureStore, "keep_features", lambda *given: made.append(given[1]) or keep(*given))
    for _ in range(3):
        render_prompt(renderer, messages)
    assert len(made) == len(read) == 2


def test_a_model_without_a_processor_is_refused(tmp_path):
    path = seeing_model("qwen3_vl", tmp_path / "model")
    tokenizer = load_tokenizer(path, "model.path")
    (tmp_path / "model" / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"^model\.path=.*: no processor of pictures"):
        PictureProcessor(path, tokenizer, PictureStore(tmp_path))
