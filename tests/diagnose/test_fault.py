"""Which runs a drill spoils, and that it flips just one bit."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from evertrain.diagnose import fault
from evertrain.diagnose.fault import VARIABLE, Fault, parse


def test_what_can_be_said() -> None:
    assert parse("") == ()
    assert parse("flip:node=n1") == (Fault(node="n1"),)
    assert parse("flip:node=n1,p=0.1,rank=2,matmul=7,bit=3,seed=5; flip:node=n2") == (
        Fault(node="n1", p=0.1, rank=2, matmul=7, bit=3, seed=5), Fault(node="n2"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("burn:node=a", "known is flip"), ("flip:", "node is needed"), ("flip:node=a,x=1", "flip takes"),
        ("flip:node=a,p=no", "no number"),
    ],
)  # fmt: skip
def test_what_cannot(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse(text)


def test_a_fraction_of_the_runs_is_drawn_the_same_with_a_seed() -> None:
    one = Fault(node="a", p=0.1, seed=1)
    drawn = [one.is_drawn(str(run)) for run in range(5000)]
    assert 400 < sum(drawn) < 600
    assert drawn == [one.is_drawn(str(run)) for run in range(5000)]
    assert drawn != [Fault(node="a", p=0.1, seed=2).is_drawn(str(run)) for run in range(5000)]
    assert 300 < sum(Fault(node="a", p=0.1).is_drawn("") for _ in range(5000)) < 700


def test_only_its_node_and_rank() -> None:
    environ = {VARIABLE: "flip:node=a,rank=1"}
    assert isinstance(fault.during("b", 1, "", environ), nullcontext)
    assert isinstance(fault.during("a", 0, "", environ), nullcontext)
    assert isinstance(fault.during("a", 1, "", {}), nullcontext)
    assert not isinstance(fault.during("a", 1, "", environ), nullcontext)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_one_bit_of_one_product(dtype: torch.dtype) -> None:
    a, b = torch.randn(8, 8).to(dtype), torch.randn(8, 8).to(dtype)
    good = a @ b
    with fault.during("n", 0, "", {VARIABLE: "flip:node=n,matmul=1"}):
        first, second, third = a @ b, a @ b, a @ b
    assert torch.equal(first, good) and torch.equal(third, good)
    differs = (second != good).nonzero()
    assert differs.tolist() == [[int(good.abs().argmax()) // 8, int(good.abs().argmax()) % 8]]
    # the third bit from the top of the mantissa: at least a sixteenth, at most an eighth of the value
    change = float(((second.double() - good.double()) / good.double()).abs().max())
    assert 1 / 16 < change <= 1 / 8


def test_products_of_the_backward_pass_count_too() -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(4, 4)
    (x @ weight).sum().backward()
    good = weight.grad
    assert good is not None
    weight.grad = None
    with fault.during("n", 0, "", {VARIABLE: "flip:node=n,matmul=1"}):
        (x @ weight).sum().backward()
    assert weight.grad is not None and int((weight.grad != good).sum()) == 1
