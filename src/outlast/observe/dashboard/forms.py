"""Forms of a page: what a running job can be asked for, each after a second click."""

from __future__ import annotations

from outlast.observe.dashboard.markup import Markup, element, joined
from outlast.observe.requests import What


def requests(action: str) -> Markup:
    """Return the forms.

    Args:
        action: where they are sent to.
    """
    node = element("label", "node ", element("input", name_="node", required="required", maxlength=200))
    return joined(
        _form(action, What.SAVE, "Save now", "All ranks save after one of the next steps."),
        _form(action, What.DRAIN, "Drain a node", "A spare takes the place of the node, after a save.", node),
        _form(action, What.STOP, "Stop the job", "All ranks save, and the job ends as after SIGTERM."),
    )


def _form(action: str, what: What, name: str, words: str, *more: Markup) -> Markup:
    value = element("input", type="hidden", name_="what", value=what.value)
    button = element("button", name)
    form = element("form", element("p", words), value, *more, button, method="post", action=action)
    key = f"request-{what.value}"
    return element("details", element("summary", f"{name} ...", id=f"{key}-summary"), form, id=key)
