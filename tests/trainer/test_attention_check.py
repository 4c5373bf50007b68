"""Attention over several blocks, which a trainer checks as it starts: a wrong one is noticed, a right one passes."""

import dataclasses

import numpy as np
import pytest
import torch
from architectures import write_model
from trees import CPU, windowed

from prl.models import model_path
from prl.trainer import attention_check, blocks, worker
from prl.trainer.attention_check import Form, Heard, check_blocks, difference, of_all_pairs, row, with_gradients
from prl.trainer.blocks import BlockTree
from prl.trainer.flex import FlexTree
from prl.trainer.model import check_layout, load_model
from prl.trainer.tree import row_tree, tree_stacks


def test_the_row_has_blocks_that_see_all_a_part_and_nothing_of_another():
    depths, starts, on_path = row(attention_check.BRANCHES)
    assert starts == [0, 150, 256] and len(depths) == 320
    assert depths[[0, 149, 150, 255, 256, 319]].tolist() == [0, 149, 135, 240, 5, 68]
    assert on_path.sum(1).tolist() == (depths + 1).tolist()
    assert on_path[150].nonzero().flatten().tolist() == [*range(135), 150]
    assert on_path[257].nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 256, 257]
    assert on_path[128:256, :128].all(), "the second block of 128 sees all of the first"
    assert 0 < on_path[256:, :128].sum() < 64 * 128 and not on_path[256:, 128:256].any()


def test_attention_of_all_pairs_is_the_softmax_of_the_scores():
    query = torch.tensor([[[[1.0], [2.0]], [[0.0], [1.0]]]])  # two heads that share keys and values
    key, value = torch.tensor([[[[1.0], [3.0]]]]), torch.tensor([[[[10.0], [20.0]]]])
    seen = torch.tensor([[True, False], [True, True]])
    found = of_all_pairs(query, key, value, seen=seen, scale=0.5, sinks=None)
    late = 1 / (1 + np.exp(np.array([1.0 - 3.0, 0.5 - 1.5])))  # of the second key: scores 1 and 3, and 0.5 and 1.5
    expected = torch.tensor([[[10.0, 10.0], [10 + 10 * late[0], 10 + 10 * late[1]]]])[..., None].float()
    assert torch.allclose(found, expected)
    sunk = of_all_pairs(query, key, value, seen=seen, scale=0.5, sinks=torch.tensor([0.5, -torch.inf]))
    assert torch.allclose(sunk[0, 0], torch.tensor([[5.0], [10.0]])), "a sink as large as the one score takes half"
    assert torch.allclose(sunk[0, :, 1], expected[0, :, 1])


def test_the_difference_is_that_of_the_worst_vector():
    right = torch.tensor([[3.0, 4.0], [0.0, 1.0]])  # norms 5 and 1, mean 3
    assert difference(right, right) == 0
    assert difference(right + torch.tensor([[0.0, 0.0], [0.0, 2.0]]), right) == pytest.approx(2 / (1 + 3))


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", ["tiny", "windows", "gpt-oss"])
def test_the_attention_of_a_model_passes_with_room(tmp_path, monkeypatch, name, half):
    folder = model_path("tiny") if name == "tiny" else windowed(tmp_path) if name == "windows" else tmp_path
    if name == "gpt-oss":
        write_model(tmp_path, name, tied=False)
    model, gaps, forms = load_model(str(folder), device=CPU), [], []
    model = model.bfloat16() if half else model
    monkeypatch.setattr(attention_check, "difference", lambda *given: gaps.append(difference(*given)) or gaps[-1])
    monkeypatch.setattr(
        "prl.trainer.model.check_blocks", lambda heard, make: forms.extend(heard.forms) or check_blocks(heard, make)
    )
    check_layout(model, tree_stacks, tolerance=worker.HALF_TOLERANCE if half else worker.TOLERANCE)
    tolerance = attention_check.HALF_TOLERANCE if half else attention_check.TOLERANCE
    assert len(gaps) == (5 if name == "gpt-oss" else 4) * len(forms) and 0 < max(gaps) < tolerance / 3
    assert {form.dtype for form in forms} == {torch.bfloat16 if half else torch.float32}
    assert len({form.window for form in forms}) == (1 if name == "tiny" else 2)
    assert {form.has_sinks for form in forms} == {name == "gpt-oss"}


def lost_key(depths, starts, wanted, *, real=blocks.walk):
    """A path before a block that lacks the key just before it."""
    ends, befores = real(depths, starts, wanted)
    return ends, {start: path[:-1] if start >= blocks.MOST else path for start, path in befores.items()}


def further_key(depths, starts, wanted, *, real=blocks.walk):
    """A branch that is seen by the first token after its end, beyond the first block."""
    ends, befores = real(depths, starts, wanted)
    later = np.arange(len(ends)) >= blocks.MOST
    return np.where(later & (ends < len(ends)), ends + 1, ends), befores


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("broken", [lost_key, further_key])
def test_a_wrong_key_between_blocks_is_noticed(monkeypatch, broken, half):
    model = load_model(model_path("tiny"), device=CPU)
    model = model.bfloat16() if half else model
    tolerance = worker.HALF_TOLERANCE if half else worker.TOLERANCE
    monkeypatch.setattr(blocks, "walk", broken)
    says = r"attention over several blocks of a row: results off by .* set trainer\.share_prefixes=false"
    with pytest.raises(ValueError, match=says):
        check_layout(model, tree_stacks, tolerance=tolerance)


def test_a_wrong_gradient_is_noticed():
    """Of a kernel whose backward lacks the second block's keys for the third."""

    @dataclasses.dataclass
    class Wrong(BlockTree):
        def attend(self, query, key, value, **how):
            key, value = (torch.cat((each[:, :, :128], each[:, :, 128:].detach()), 2) for each in (key, value))
            return super().attend(query, key, value, **how)

    form = Form((2, 1, 1), (8, 8, 8), torch.float32, CPU, None, None, False)
    check_blocks(Heard(None, {form: None}), row_tree)
    with pytest.raises(ValueError, match="gradients of keys off by"):
        check_blocks(Heard(None, {form: None}), Wrong.of_row)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_gradient_of_sinks_is_noticed(dtype):
    """That of one head of four, which is left out."""

    @dataclasses.dataclass
    class Wrong(BlockTree):
        def attend(self, query, key, value, *, sinks, **how):
            return super().attend(query, key, value, sinks=torch.cat((sinks[:1].detach(), sinks[1:])), **how)

    form = Form((4, 2, 2), (8, 8, 8), dtype, CPU, 60, None, True)
    heard = Heard(None, {form: torch.tensor([1.0, -0.5, 0.2, 0.7], dtype=dtype)})
    check_blocks(heard, row_tree)
    with pytest.raises(ValueError, match=r"gradients of sinks off by .*, window 60; set"):
        check_blocks(heard, Wrong.of_row)


def form_of(window, dtype=torch.float32, has_sinks=False):
    """Of a layer with two heads, and its sinks."""
    form = Form((2, 1, 1), (8, 8, 8), dtype, CPU, window, None, has_sinks)
    return Heard(None, {form: torch.tensor([0.5, -0.5], dtype=dtype) if has_sinks else None})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("window", [200, 241, 512, 9000])
def test_a_window_that_ends_a_token_off_is_noticed(monkeypatch, window, by, dtype):
    """As one of 4,096 tokens where it is longer."""
    exact, until = blocks.Blocks.mask, min(window, attention_check.LONGEST)

    def mask(self, window, dtype):
        return exact(self, window + by if window == until else window, dtype)

    for has_sinks in (False, True):
        check_blocks(form_of(window, dtype, has_sinks), row_tree)
    monkeypatch.setattr(blocks.Blocks, "mask", mask)
    for has_sinks in (False, True):
        with pytest.raises(ValueError, match=f" off by .*, window {until}; set"):
            check_blocks(form_of(window, dtype, has_sinks), row_tree)


def test_a_long_window_as_on_a_gpu(graphs, monkeypatch):
    """But for the kernels."""
    heard = form_of(300, has_sinks=True)
    check_blocks(heard, FlexTree.of_row)
    assert graphs
    exact = FlexTree.mask
    monkeypatch.setattr(FlexTree, "mask", lambda self, window: exact(self, window + 1))
    with pytest.raises(ValueError, match=r" off by .*, window 300; set"):
        check_blocks(heard, FlexTree.of_row)


def test_it_has_the_gradients_of_what_it_calls():
    inputs = [torch.tensor([float(number)]) for number in (2, 3, 4)]
    found = with_gradients(lambda a, b, c: a * b + c * c, inputs, torch.tensor([10.0]))
    assert [each.item() for each in found] == [22, 30, 20, 80] and not any(each.requires_grad for each in inputs)
