"""What a script may do, between two saves, to the objects that it saves."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3)
        self.norm = nn.BatchNorm2d(2)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))


class Held:
    """An object with the content of a mapping."""

    def __init__(self, **content: Any) -> None:
        self.content = content

    def state_dict(self) -> dict[str, Any]:
        return self.content

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.content = state


class Run:
    """What a script may do to the objects that it saves."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.net = Net()
        self.late = nn.Linear(2, 2)
        self.table = torch.ones(4, 4)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.1)
        self.box: dict[Any, Any] = {
            "x": torch.arange(16.0).view(4, 4),
            "y": torch.zeros(4, 4),
            "c": torch.zeros(4, dtype=torch.complex64),
            "m": torch.ones(4),
            "inner": {"z": torch.ones(2), "n": 1},
            "list": [torch.ones(1), 7],
            "n": 1,
        }
        scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.state: dict[str, Any] = {
            "net": self.net,
            "optimizer": self.optimizer,
            "scheduler": scheduler,
            "box": self.box,
        }

    def step(self) -> None:
        for one in self.net.parameters():
            one.grad = torch.ones_like(one)
        self.optimizer.step()
        self.state["scheduler"].step()

    def value(self) -> None:
        chosen: list[Any] = [
            1,
            1.0,
            True,
            "1",
            -0.0,
            0.0,
            float("nan"),
            None,
            numpy.float64(1),
            [1],
            (1,),
            b"1",
        ]
        self.box[self.dice.choice(["n", 3, "t"])] = self.dice.choice(chosen)

    def address(self) -> None:
        weight = self.dice.choice(list(self.net.parameters()))
        weight.data = weight.data.clone()

    def in_place(self) -> None:
        with torch.no_grad():
            self.dice.choice(list(self.net.parameters())).mul_(0.5)

    def parameter(self) -> None:
        self.net.first.weight = nn.Parameter(self.net.first.weight.detach())

    def names(self) -> None:
        self.net.first, self.net.second = self.net.second, self.net.first

    def buffer(self) -> None:
        if hasattr(self.net, "more"):
            del self.net.more
        else:
            self.net.register_buffer("more", torch.zeros(2))

    def memory_format(self) -> None:
        self.net.to(memory_format=self.dice.choice([torch.channels_last, torch.contiguous_format]))

    def shape(self) -> None:
        self.box["x"] = self.box["x"].reshape(self.dice.choice([(4, 4), (2, 8), (16,), (1, 16)]))

    def rows(self) -> None:
        self.box["rows"] = self.table[: self.dice.randrange(1, 5)]

    def order(self) -> None:
        self.box["x"] = self.box["x"].t() if self.box["x"].dim() == 2 else self.box["x"]

    def kind(self) -> None:
        if self.box["x"].is_contiguous():
            self.box["x"] = self.box["x"].view(self.dice.choice([torch.float32, torch.int32]))

    def shape_of_the_same(self) -> None:
        y = self.box["y"].detach()
        self.box["y"] = y
        if self.dice.random() < 0.5 and y.dim() == 2:
            y.t_()
        elif y.is_contiguous():
            y.resize_(2, 8)

    def conjugate(self) -> None:
        self.box["c"] = self.box["c"].conj()

    def negate(self) -> None:
        self.box["m"] = torch._neg_view(self.box["m"])

    def swap(self) -> None:
        self.box["x"], self.box["y"] = self.box["y"], self.box["x"]

    def tie(self) -> None:
        self.box["tied"] = self.dice.choice([self.box["x"], self.box["x"].clone(), self.net.first.weight])

    def nest(self) -> None:
        self.box["nest"] = self.dice.choice([{}, {"a": torch.ones(1)}, [], [torch.ones(1)], {1: 2}, ((),)])

    def grow(self) -> None:
        self.box["list"].append(self.dice.choice([1, torch.ones(2)]))

    def reorder(self) -> None:
        self.box["inner"] = dict(reversed(self.box["inner"].items()))

    def group(self) -> None:
        if len(self.optimizer.param_groups) == 1:
            self.optimizer.add_param_group({"params": list(self.late.parameters())})

    def reverse(self) -> None:
        self.optimizer.param_groups[0]["params"].reverse()

    def freeze(self) -> None:
        one = self.dice.choice(list(self.net.parameters()))
        one.requires_grad_(not one.requires_grad)

    def switch(self) -> None:
        self.net.norm.train(not self.net.norm.training)

    def version(self) -> None:
        self.net.norm._version = self.dice.choice([2, 3])

    def note(self) -> None:
        self.net.norm._version = self.dice.choice([2, True, 1])

    def keys(self) -> None:
        """Keys that are equal, and not the same."""
        key = self.dice.choice([1, True, 1.0, numpy.int64(1), numpy.str_("1"), "1"])
        self.box["keys"] = {key: self.table}

    def holder(self) -> None:
        self.state["held"] = self.dice.choice([Held, dict])(x=self.table)

    def objects(self) -> None:
        if self.state.pop("more", None) is None:
            self.state["more"] = self.dice.choice([self.late, torch.ones(2), [1, 2]])

    def type_(self) -> None:
        x = self.box["x"]
        if x.is_floating_point():
            self.box["x"] = nn.Parameter(x) if type(x) is torch.Tensor else x.detach()


CHANGES = [name for name, one in vars(Run).items() if callable(one) and not name.startswith("__")]
