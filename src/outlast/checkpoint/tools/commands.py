"""``outlast ckpt``: its command line, and what is printed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outlast.checkpoint.policy.resolve import CopyState
from outlast.checkpoint.tools import listing, upkeep
from outlast.checkpoint.tools.listing import Item, Target
from outlast.errors import ExitCode, RunFolderUnusable, UsageError
from outlast.observe.progress import working
from outlast.observe.run_folder import RunFolder
from outlast.observe.text import clean, say, size

_OBJECT = "state object; hf takes one (default model), dcp any number (default all)"


def main(arguments: Sequence[str]) -> int:
    """Carry out ``outlast ckpt ...`` and return its exit code.

    Raises:
        OutlastError: it cannot be done; each kind has its exit code.
    """
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.carry_out
    try:
        return command(options)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise RunFolderUnusable(f"{error}; what was done before is said above") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="outlast ckpt", description="Look after the copies of a run's checkpoints."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str, carry_out: Callable[[argparse.Namespace], int], text: str
    ) -> argparse.ArgumentParser:
        found = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        found.set_defaults(carry_out=carry_out)
        if carry_out is not _import:
            found.add_argument("run", metavar="RUN", help="a run folder, or a folder of copies")
        return found

    ls = command("ls", _ls, "list the copies, the newest first")
    show = command("show", _show, "tell what one copy says of itself")
    show.add_argument("name", metavar="NAME")
    show.add_argument("--tensors", action="store_true", help="also what is in the shards")
    check = command("verify", _verify, "read every byte of copies and compare the digests")
    check.add_argument(
        "names", metavar="NAME", nargs="*", help="default: every copy that is not in quarantine"
    )
    check.add_argument("--all", action="store_true", help="the same as no NAME")
    check.add_argument("--quarantine", action="store_true", help="set aside what is damaged")
    for each in (ls, show, check):
        each.add_argument("--json", action="store_true", help="JSON, one object a line and copy")
    prune = command("prune", _prune, "remove old copies")
    prune.add_argument("--keep-last-n", type=_count(1), required=True, metavar="N", help="how many stay")
    prune.add_argument("--keep-ancestors", type=_count(0), default=0, metavar="N", help="older ones besides")
    prune.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    aside = command("quarantine", _quarantine, "set a copy aside, so that it is never loaded")
    aside.add_argument("name", metavar="NAME")
    aside.add_argument("--reason", required=True, metavar="TEXT", help="is kept beside it")
    back = command(
        "release", _release, "let a copy that is in quarantine or a suspect be loaded again, if it is sound"
    )
    back.add_argument("name", metavar="NAME")
    export = command("export", _export, "write a copy in the format of another program")
    export.add_argument("name", metavar="NAME")
    export.add_argument("--format", choices=("hf", "dcp"), required=True, help="Hugging Face or torch DCP")
    export.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="new or empty")
    export.add_argument("--object", action="append", default=[], metavar="NAME", help=_OBJECT)
    _add_import(command("import", _import, "make a copy of what another program wrote"))
    return parser


def _add_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="SOURCE", help="a DCP folder or a file of torch.save")
    parser.add_argument("--format", choices=("dcp", "torch"), required=True)
    parser.add_argument("--to", type=Path, required=True, metavar="RUN", help="run folder; made if need be")
    parser.add_argument("--step", type=_count(0), required=True, metavar="N", help="completed steps")
    parser.add_argument("--into", default="", metavar="NAME", help="the one object that all of it becomes")
    parser.add_argument(
        "--kind", type=_kind, action="append", default=[], metavar="NAME=TYPE", help="optimizer=AdamW"
    )
    parser.add_argument("--leave-out", action="append", default=[], metavar="KEY", help="is not imported")


def _count(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
        return int(text)

    return parse


def _kind(text: str) -> tuple[str, str]:
    name, _, kind = text.partition("=")
    if not name or not kind:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=TYPE, as in optimizer=AdamW")
    return name, kind


def _say_json(value: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(value, allow_nan=False) + "\n")


def _ls(options: argparse.Namespace) -> int:
    target = listing.find(options.run)
    entries = upkeep.look_over(target, listing.items(target))
    if options.json:
        for entry in entries:
            _say_json(entry.to_json())
        return ExitCode.OK
    if entries:
        listing.print_copies(entries, target.run_id)
    else:
        say(_no_copy(target))
    for folder in listing.named_trainings(target):
        say(f"training {folder.name} has copies of its own: outlast ckpt ls {folder}")
    return ExitCode.OK


def _one(options: argparse.Namespace) -> tuple[Target, Item]:
    """Return the copy that a command is about, and where it is."""
    target = listing.find(options.run)
    (item,) = listing.pick(target, [options.name])
    return target, item


def _show(options: argparse.Namespace) -> int:
    target, item = _one(options)
    (entry,) = upkeep.look_over(target, [item])
    found = None
    if options.tensors and entry.manifest is not None:
        found = list(listing.tensors(item, entry.manifest))
    if options.json:
        _say_json(listing.details(entry, found))
    else:
        listing.print_details(entry, found, target.run_id)
    return _code(entry.copy.state is CopyState.WHOLE and not entry.stranger(target.run_id))


def _code(sound: bool) -> int:
    return ExitCode.OK if sound else ExitCode.CHECKPOINT_REFUSED


def _verify(options: argparse.Namespace) -> int:
    if options.all and options.names:
        raise UsageError("verify takes either names of copies or --all; nothing was read")
    every, target = not options.names, listing.find(options.run)
    if every:
        there = listing.items(target)
        chosen = [item for item in there if not item.aside]
        if not chosen and not options.json:
            say(_no_copy(target) + "; those in quarantine are verified by name" * bool(there))
    else:
        chosen = listing.pick(target, options.names)
    if options.quarantine:
        with upkeep.changing(target):
            pass
    sound = True
    for item in chosen:
        found = upkeep.read_all(item)
        copy, stranger, aside = found.copy, found.stranger(target.run_id), ""
        sound = sound and copy.state is CopyState.WHOLE and not stranger
        if options.quarantine and copy.state is CopyState.DAMAGED and not item.aside:
            damage = {} if copy.damage is None else vars(copy.damage)
            aside = upkeep.set_aside(target, item, copy.reason, damage)
        if options.json:
            _say_json({**found.to_json(), "moved_to": aside or None})
            continue
        verdict = f"{copy.state.value}: {copy.reason}"
        if copy.state is CopyState.WHOLE:
            verdict = f"sound, {size(found.nbytes)} read"
        more = [f"; {stranger}"] * bool(stranger) + [f"; it is now {aside}"] * bool(aside)
        say(f"{item.label}: {verdict}{''.join(more)}")
    for folder in listing.named_trainings(target) if every and not options.json else ():
        say(f"training {folder.name} has copies of its own, not read: outlast ckpt verify {folder}")
    return _code(sound)


def _no_copy(target: Target) -> str:
    return f"no copy is in {target.tier.folder}"


def _prune(options: argparse.Namespace) -> int:
    target = listing.find(options.run)
    planned = upkeep.plan(target, options.keep_last_n, options.keep_ancestors)
    for name, why in planned.left.items():
        say(f"{name} is not counted and stays: {why}")
    if not planned.removals:
        say("nothing is to be removed")
    if options.dry_run:
        for removal in planned.removals:
            say(f"{removal.name} would be removed: {removal.reason}")
        return ExitCode.OK
    with upkeep.changing(target):
        pass
    if planned.first is not None and planned.removals:
        say(f"{planned.first.name} is read before anything is removed", at_once=True)
    failed = False
    for removal, problem in upkeep.prune(target, planned):
        failed = failed or bool(problem)
        done = f"could not be removed: {problem}" if problem else f"removed: {removal.reason}"
        say(f"{removal.name} {done}")
    return ExitCode.RUN_FOLDER_UNUSABLE if failed else ExitCode.OK


def _quarantine(options: argparse.Namespace) -> int:
    target, item = _one(options)
    aside = upkeep.set_aside(target, item, options.reason)
    say(f"{item.name} is now {aside}; nothing loads it from there")
    return ExitCode.OK


def _release(options: argparse.Namespace) -> int:
    target, item = _one(options)
    name = upkeep.release(target, item)
    if item.aside:
        say(f"{name} is sound and back in {target.tier.folder}; it was set aside: {item.reason}")
    else:
        say(f"{name} is sound, and no suspect any more")
    return ExitCode.OK


def _export(options: argparse.Namespace) -> int:
    _, item = _one(options)
    names: list[str] = options.object
    if options.format == "hf" and len(names) > 1:
        raise UsageError(f"--format hf takes one --object, not {len(names)}; nothing was written")
    from outlast.checkpoint.tools import convert

    with working(f"writing {clean(item.label)} for {options.format}"):
        if options.format == "hf":
            holder = names[0] if names else "model"
            done = convert.export_hugging_face(item.tier, item.name, options.to, holder)
        else:
            done = convert.export_dcp(item.tier, item.name, options.to, names)
    say(f"{len(done.files)} file(s) are in {options.to}, with {size(done.nbytes)} of tensors")
    if done.left_out:
        say(f"left out, because the format has no place for them: {', '.join(done.left_out)}")
    return ExitCode.OK


def _import(options: argparse.Namespace) -> int:
    source: Path = options.source
    if not source.exists():
        raise UsageError(f"{source}: there is no such file or folder; nothing was written")
    target = _run_for_import(options.to)
    from outlast.checkpoint.tools import convert

    origin = convert.Origin(target.run_id, options.step, dict(options.kind))
    with upkeep.changing(target), working(f"importing {clean(str(source))}"):
        name = convert.import_from(
            options.format, source, target.tier, origin, options.into, options.leave_out
        )
    say(f"{source} is now {name} of run {target.run_id}, in {target.tier.folder}")
    newest = next(item for item in listing.items(target) if not item.aside)
    if newest.name != name:
        say(f"{newest.name} is newer: the run goes on from there, not from what was imported")
    return ExitCode.OK


def _run_for_import(root: Path) -> Target:
    """Return the run that takes what is imported, made when there is none."""
    if root.is_dir() and (any(root.iterdir()) or (root / "run.json").exists()):
        target = listing.find(str(root))
        if target.folder is None:
            raise UsageError(f"{root} is no run folder: no run.json is in it; nothing was written")
        return target
    folder = RunFolder(root)
    folder.claim()
    folder.release()
    return listing.find(str(root))
