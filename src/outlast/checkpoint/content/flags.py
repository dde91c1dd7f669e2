"""What a module's state does not say of it: which parameters have gradients, which submodules are switched.

A checkpoint keeps these flags beside the state, so that a run that goes on otherwise can be told; a load
changes none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

Flags = dict[str, tuple[str, str]]  # of each module of a state, by its name there; see :func:`flags_of`


def flags_of(state: Mapping[str, object]) -> Flags:
    """Return two rows of bits for each module of a state, as hexadecimal numbers behind a 1.

    Which of its parameters have gradients, and which of its submodules are in another mode (training or
    evaluation) than itself: the mode of the whole is the script's to set for each step.
    """
    return {
        name: (_packed(_trained(one)), _packed(_apart(one)))
        for name, one in state.items()
        if isinstance(one, torch.nn.Module)
    }


def flags_that_stay(
    saved: Mapping[str, tuple[str, str]], live: Sequence[Flags], state: Mapping[str, object]
) -> list[str]:
    """Return in which flags a run differs from the checkpoint that it began from, as lines for a message.

    A flag that has changed meanwhile is the script's own business.

    Args:
        saved: of the checkpoint.
        live: of this process, at several times since it was loaded.
        state: the live objects.
    """
    found = []
    for name, then in saved.items():
        module = state.get(name)
        if not isinstance(module, torch.nn.Module) or any(name not in one for one in live):
            continue
        rows = [_differing(then[at], [one[name][at] for one in live]) for at in range(2)]
        parameters = [key for key, _ in module.named_parameters()]
        found += _lines(name, parameters, rows[0], ("trained", "frozen"))
        modules = [key for key, _ in module.named_modules()]
        found += _lines(name, modules, rows[1], ("switched to another mode than the whole", "not switched"))
    return found


def _trained(module: torch.nn.Module) -> Iterator[bool]:
    return (one.requires_grad for one in module.parameters())


def _apart(module: torch.nn.Module) -> Iterator[bool]:
    return (one.training is not module.training for one in module.modules())


def _packed(bits: Iterable[bool]) -> str:
    return f"{int('1' + ''.join('01'[one] for one in bits), 2):x}"


def _differing(then: str, live: Sequence[str]) -> list[tuple[int, bool]]:
    """Return place and saved value of each bit that is another one at all times of ``live``."""
    before, *now = (f"{int(one, 16):b}"[1:] for one in (then, *live))
    if any(len(one) != len(before) for one in now):
        return []
    pairs = enumerate(zip(before, *now, strict=True))
    return [(at, old == "1") for at, (old, *bits) in pairs if old not in bits]


def _lines(
    name: str, keys: Sequence[str], differing: Sequence[tuple[int, bool]], words: tuple[str, str]
) -> list[str]:
    found = []
    for value in (True, False):
        some = [f"{name}.{keys[at]}" for at, old in differing if old is value]
        more = f" and {len(some) - 3} more" if len(some) > 3 else ""
        then, now = words if value else words[::-1]
        if some:
            found.append(f"{', '.join(some[:3])}{more}: {then} in the checkpoint, {now} here")
    return found
