"""settle leaves no trace but DDP's buckets."""

from __future__ import annotations

from .gang import Gang

NET = """
from torch.nn.parallel import DistributedDataParallel as DDP
class Net(torch.nn.Module):
    def __init__(self, answer):
        super().__init__()
        self.a, self.norm, self.drop = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5)
        self.answer = answer
    def forward(self, x, scale=1.0):
        random.random()
        return self.answer(self.drop(self.norm(self.a(x))) * scale)
"""


def test_nothing_changes(gang: Gang) -> None:
    script = (
        NET
        + """
import numpy
join()
model = DDP(Net(lambda y: y))
def picture(): return [bits(*model.state_dict().values()), random.getstate()[1][:9], torch.rand(0).tolist(),
                       torch.get_rng_state().sum().item(), numpy.random.get_state()[1].tolist()[:9]]
before = picture()
evertrain.settle(model, torch.ones(3, 4))
say([before == picture(), all(p.grad is None for p in model.parameters())])
"""
    )
    for result in gang.run(script):
        assert result.said == [True, True], result.err


def test_batches_and_outputs_of_many_shapes(gang: Gang) -> None:
    script = (
        NET
        + """
import types
join()
x = torch.ones(3, 4)
done = []
answers = [
    lambda y: y, lambda y: (y, None), lambda y: {"logits": y, "n": 3}, lambda y: {"loss": y.mean(), "other": y},
    lambda y: types.SimpleNamespace(loss=y.mean()), lambda y: types.SimpleNamespace(loss=None, logits=y),
]
for answer in answers:
    for batch in (x, (x,), [x, 2.0], {"x": x, "scale": 2.0}):
        evertrain.settle(DDP(Net(answer)), batch)
        done.append(1)
evertrain.settle(torch.nn.Sequential(DDP(Net(lambda y: y))), x)          # DDP inside a wrapper
evertrain.settle(DDP(Net(lambda y: [y.sum()])), x, loss=lambda out: out[0] ** 2)
try:
    evertrain.settle(DDP(Net(lambda y: y.detach())), x)
except ValueError as error:
    say([len(done), str(error)])
"""
    )
    results = gang.run(script)
    assert results[0].status == 0, results[0].err
    done, error = results[0].said
    assert done == 24 and "pass loss=" in error


def test_without_ddp_the_model_is_not_called(gang: Gang) -> None:
    script = """
class Model(torch.nn.Module):
    def forward(self, x): raise AssertionError
evertrain.settle(Model(), torch.ones(1))
say("fine")
"""
    (result,) = gang.run(script, world=1)
    assert result.said == "fine"


def test_it_does_the_same_outside_a_job(gang: Gang) -> None:
    script = (
        NET
        + """
join()
calls = []
def count(y):
    calls.append(1)
    return y
evertrain.settle(DDP(Net(count)), torch.ones(3, 4))
say(len(calls))
"""
    )
    assert [result.said for result in gang.run(script, inside=False)] == [1, 1]
