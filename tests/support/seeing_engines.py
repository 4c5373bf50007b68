"""Prompts with pictures for engines, and what transformers' own forward computes of them."""

import copy

import numpy as np
import torch
from seeing_models import noise, part, text
from transformers import AutoModelForImageTextToText

from prl.engines.pictures import PictureProcessor
from prl.engines.renderer import input_of, make_renderer, render_prompt
from prl.engines.tokenizers import load_tokenizer
from prl.rollouts.pictures import PictureStore


class Seeing:
    """A model that sees, its renderer with a store, and the logprobs of the model itself."""

    def __init__(self, path, folder):
        self.path, self.store = path, PictureStore(folder)
        self.tokenizer = load_tokenizer(path, "model.path")
        self.processor = PictureProcessor(path, self.tokenizer, self.store)
        self.renderer = make_renderer(self.tokenizer, pictures=self.processor)
        self.model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()

    def moved(self, folder, of, by=0.2):
        """Write the model with other weights in what has `of` in its name, by its own names. Returns the logprobs."""
        other = copy.copy(self)
        other.model, other.path = copy.deepcopy(self.model), str(folder)
        with torch.no_grad():
            for name, parameter in other.model.named_parameters():
                if of in name:
                    parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * by)
        other.model.config.save_pretrained(folder)
        other.model.generation_config.save_pretrained(folder)
        return other

    def prompt(self, *turns):
        """Return the input of turns of user and model, each a text or a list of texts and numbers of pictures."""
        messages = []
        for number, turn in enumerate(turns):
            content = turn if isinstance(turn, str) else [self.piece(each) for each in turn]
            messages.append({"role": ("user", "assistant")[number % 2], "content": content})
        return input_of(render_prompt(self.renderer, messages))

    def piece(self, piece):
        if isinstance(piece, str):
            return text(piece)
        return part("picture:" + self.store.keep(noise(*((64, 48), (37, 60), (48, 32))[piece % 3], seed=piece)))

    def prompts(self):
        """Return one picture, text alone, several pictures, several turns."""
        return [
            self.prompt([0, "Which is it?"]),
            self.prompt("No picture."),
            self.prompt(["Of ", 1, " and ", 2, ", which?"]),
            self.prompt([0, "Which?"], "That one.", [1, "And this?"]),
        ]

    @torch.no_grad()
    def logprobs(self, sequence, *, blind=False):
        """Return the logprob of each token but the first, each sequence alone; `blind` with black pictures."""
        given = [self.store.features(picture) for picture in sequence.pictures]
        names = given[0] if given else ()
        inputs = {name: torch.from_numpy(np.concatenate([each[name] for each in given])) for name in names}
        if blind:
            inputs["pixel_values"] = torch.zeros_like(inputs["pixel_values"])
        ids = torch.tensor([sequence.token_ids])
        if "image_grid_thw" in inputs:
            inputs["mm_token_type_ids"] = (ids == self.model.config.image_token_id).long()
        logits = self.model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).logits[0, :-1]
        return logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)

    def whole(self, prompt, completion):
        """Return a prompt with a reply behind it, up to a token that stands for a picture, and the reply's logprobs."""
        ids, stop = completion.token_ids, len(completion.token_ids)
        if self.processor.placeholder in ids:
            stop = ids.index(self.processor.placeholder)
        return prompt.then(ids[:stop]), torch.tensor(completion.logprobs[:stop])


def worst(a, b):
    return (torch.as_tensor(a) - torch.as_tensor(b)).abs().max().item() if len(a) else 0.0
