"""From a YAML file and ``key=value`` overrides to a ``Config``, with errors a person can act on."""

from __future__ import annotations

import copy
import difflib
import math
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from rollart.config import Config, Task
from rollart.errors import ConfigError

__all__ = ["load_config"]

REFUSED_SAMPLING = {
    "top_p": "it cuts the distribution's tail, and the trainer does not yet apply the same cut",
    "top_k": "it cuts the distribution's tail, and the trainer does not yet apply the same cut",
    "min_p": "it cuts the distribution's tail, and the trainer does not yet apply the same cut",
    "presence_penalty": "it changes the distribution by what was sampled before",
    "frequency_penalty": "it changes the distribution by what was sampled before",
    "repetition_penalty": "it changes the distribution by what was sampled before",
    "logit_bias": "the trainer does not apply it",
    "bad_words": "it changes the distribution by what was sampled before; allowed_token_ids is supported",
    "structured_outputs": "the trainer does not know the grammar's state at each token",
    "guided_decoding": "the trainer does not know the grammar's state at each token",
    "grammar": "the trainer does not know the grammar's state at each token",
    "min_tokens": "it forbids end-of-sequence tokens at first, which the trainer does not reproduce",
    "use_beam_search": "what it returns is not sampled from the policy",
    "logits_processors": "the trainer does not apply them",
}


class _Loader(yaml.SafeLoader):
    """YAML 1.2's scalars: 1e-3 is a number, and on, off, yes, no, y, n are words."""


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in resolvers
        if tag not in ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:float")
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
    ),
    list("-+0123456789."),
)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[object, object]:
    seen: set[object] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, Hashable):
            continue  # construct_mapping says so below
        if key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key!r} is there twice", key_node.start_mark
            )
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The run that the file at ``path`` and the ``key=value`` overrides describe.

    ``ConfigError`` names the key's path and the nearest right name.  Token names in ``sampling`` are ids
    afterwards.
    """
    raw = _parse(Path(path))
    for override in overrides:
        _override(raw, override)
    config = _convert(raw)
    return _resolve_tokens(config)


def _parse(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise ConfigError(f"there is no config file {path}{_near_files(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read the config file {path}: {error}") from None
    raw = _yaml(text, str(path))
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold a mapping of settings, not {type(raw).__name__}")
    return raw


def _near_files(path: Path) -> str:
    found = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.y*ml")], n=1)
    return f"; did you mean {path.parent / found[0]}?" if found else ""


def _yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{where}{line}: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: {str(error).splitlines()[0]}") from None


def _override(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"{override!r} is no override: write key=value, such as rollout.group_size=16")
    at: Any = raw
    *parents, last = key.split(".")
    walked: list[str] = []
    for part in parents:
        walked.append(part)
        at = _descend(at, part, ".".join(walked), key)
    value = _yaml(text, f"override {key}") if text else None
    if isinstance(at, list):
        at[_index(at, last, key)] = value
    elif last.isdigit() and int(last) in at:  # a curriculum's step
        at[int(last)] = value
    else:
        at[last] = value


def _descend(at: Any, part: str, path: str, key: str) -> Any:
    if isinstance(at, list):
        found = at[_index(at, part, path)]
    else:
        found = at.setdefault(part, {})
        if found is None:
            found = at[part] = {}
    if not isinstance(found, dict | list):
        raise ConfigError(f"override {key}: {path} is {found!r}, which has no settings in it")
    return found


def _index(items: list[Any], part: str, path: str) -> int:
    if not part.isdigit() or int(part) >= len(items):
        raise ConfigError(
            f"override {path}: {part!r} is no position in a list of {len(items)} (0 is the first)"
        )
    return int(part)


# --- into the Structs ---------------------------------------------------------------------------------------


def _convert(raw: dict[str, Any]) -> Config:
    _refuse_sampling(raw.get("sampling"))
    tasks = raw.get("tasks")
    for position, task in enumerate(tasks if isinstance(tasks, list) else ()):
        if isinstance(task, dict):
            _refuse_sampling(task.get("sampling"), f"tasks.{position}.")
    for path, number in _numbers(raw, ""):
        if not math.isfinite(number):
            raise ConfigError(f"{path}: must be a finite number (it is {number})")
    try:
        return msgspec.convert(raw, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(_sentence(str(error), raw)) from None


def _numbers(raw: object, path: str) -> Iterator[tuple[str, float]]:
    """Every float, with its key's path."""
    if isinstance(raw, float):
        yield path, raw
    entries: Iterable[tuple[object, object]] = ()
    if isinstance(raw, dict):
        entries = raw.items()
    elif isinstance(raw, list):
        entries = enumerate(raw)
    for key, value in entries:
        name = ascii(str(key))[1:-1]  # a message is one line, whatever a file has for a key
        yield from _numbers(value, f"{path}.{name}" if path else name)


def _refuse_sampling(sampling: object, prefix: str = "") -> None:
    for name in sampling if isinstance(sampling, dict) else ():
        if name in REFUSED_SAMPLING:
            raise ConfigError(
                f"{prefix}sampling.{name} is not supported: {REFUSED_SAMPLING[name]}, so the log-probabilities of "
                "training would not be those of the distribution that was sampled"
            )


def _sentence(message: str, raw: dict[str, Any]) -> str:
    """msgspec's message, with the key's path first and the nearest right name last."""
    message = "".join(c if c.isprintable() else repr(c)[1:-1] for c in message)  # a key may be anything
    text, _, where = message.partition(" - at `")
    where, of_key = where.removeprefix("key` in `"), where.startswith("key` in `")
    path = re.sub(r"\[(\d+)\]", r".\1", where.rstrip("`").removeprefix("$")).lstrip(".")
    while "[...]" in path:
        path = _with_key(path, raw, message)
    if of_key:
        return f"{path}: of each key, {text[:1].lower()}{text[1:]}"
    unknown = re.match(r"Object contains unknown field `(.*)`", text)
    if unknown:
        name = unknown[1]
        full = f"{path}.{name}" if path else name
        return f"{full}: there is no such setting{_nearest(name, path)}"
    missing = re.match(r"Object missing required field `(.*)`", text)
    if missing:
        full = f"{path}.{missing[1]}" if path else missing[1]
        return f"{full}: this setting is required"
    value = _value_at(raw, path)
    if text.startswith("Invalid enum value") and isinstance(value, str):
        possible = _values_at(path)
        close = difflib.get_close_matches(value, possible, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        return f"{path}: {value!r} is not one of {', '.join(possible)}{hint}"
    given = f" (it is {value!r})" if path and not isinstance(value, dict | list) else ""
    return f"{path}: {text[:1].lower()}{text[1:]}{given}" if path else text


def _with_key(path: str, raw: dict[str, Any], message: str) -> str:
    """``path`` with the key of the entry at fault in place of its first ``[...]``, as msgspec writes any key."""
    before, _, after = path.partition("[...]")
    mapping = _value_at(raw, before)
    for key in mapping if isinstance(mapping, dict) else ():
        alone = copy.deepcopy(raw)
        found = _value_at(alone, before)
        found.clear()
        found[key] = mapping[key]
        try:
            msgspec.convert(alone, Config)
        except msgspec.ValidationError as error:
            if str(error) == message:
                return f"{before}.{key}{after}"
    return f"{before}.*{after}"


def _value_at(raw: Any, path: str) -> Any:
    for part in filter(None, path.split(".")):
        if isinstance(raw, list) and part.isdigit() and int(part) < len(raw):
            raw = raw[int(part)]
        elif isinstance(raw, dict):
            raw = raw.get(part, raw.get(int(part)) if part.isdigit() else None)
        else:
            return None
    return raw


def _nearest(name: str, path: str) -> str:
    here = _fields_at(path)
    close = difflib.get_close_matches(name, here, n=1)
    if close:
        return f"; did you mean {f'{path}.' if path else ''}{close[0]}?"
    elsewhere = dict(_all_fields(Config, ""))
    same = [full for full, last in elsewhere.items() if last == name]
    if not same:
        found = difflib.get_close_matches(name, set(elsewhere.values()), n=1, cutoff=0.75)
        same = [full for full, last in elsewhere.items() if found and last == found[0]]
    if same:
        return f"; did you mean {same[0]}?"
    return f"; {path or 'the top level'} has {', '.join(here)}"


def _struct_at(path: str) -> Any:
    """The Struct at ``path``; a position in a list, or a key of a mapping, is in the one around it."""
    struct: Any = Config
    for part in filter(None, path.split(".")):
        struct = dict(_structs(struct)).get(part, struct)
    return struct


def _fields_at(path: str) -> list[str]:
    return [field.name for field in msgspec.structs.fields(_struct_at(path))]


def _values_at(path: str) -> list[str]:
    """The values of the enum at ``path``, which may also be null."""
    parent, _, name = path.rpartition(".")
    (field,) = (field for field in msgspec.structs.fields(_struct_at(parent)) if field.name == name)
    info = msgspec.inspect.type_info(field.type)
    types = info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)
    return [str(value) for each in types if isinstance(each, msgspec.inspect.EnumType) for value in each.cls]


def _structs(struct: type[msgspec.Struct]) -> Iterator[tuple[str, type[msgspec.Struct]]]:
    """The fields of ``struct`` that are Structs, or lists or mappings of them."""
    for field in msgspec.structs.fields(struct):
        info = msgspec.inspect.type_info(field.type)
        for found in _inner(info):
            yield field.name, found


def _inner(info: object) -> Iterable[type[msgspec.Struct]]:
    match info:
        case msgspec.inspect.StructType(cls=cls):
            yield cls
        case msgspec.inspect.ListType(item_type=item) | msgspec.inspect.DictType(value_type=item):
            yield from _inner(item)
        case msgspec.inspect.UnionType(types=types):
            for each in types:
                yield from _inner(each)
        case msgspec.inspect.Metadata(type=inner):
            yield from _inner(inner)


def _all_fields(struct: type[msgspec.Struct], prefix: str) -> Iterator[tuple[str, str]]:
    inner = dict(_structs(struct))
    for field in msgspec.structs.fields(struct):
        yield f"{prefix}{field.name}", field.name
        if field.name in inner:
            yield from _all_fields(inner[field.name], f"{prefix}{field.name}.")


# --- tokens -------------------------------------------------------------------------------------------------


def _resolve_tokens(config: Config) -> Config:
    """Replace token names by ids, and check the ids against the vocabulary."""
    sampling = config.sampling
    vocabulary = _vocabulary(config)
    size = max(vocabulary.values()) + 1
    resolved = {
        name: _ids(name, getattr(sampling, name), vocabulary, size)
        for name in ("allowed_token_ids", "stop_token_ids")
    }
    tasks = [_resolve_task(number, task, vocabulary, size) for number, task in enumerate(config.tasks)]
    config = msgspec.structs.replace(
        config, sampling=msgspec.structs.replace(sampling, **resolved), tasks=tasks
    )
    names = {number: name for name, number in vocabulary.items()}
    for task in config.tasks:
        of_task = config.sampling_of(task)
        never = [t for t in of_task.stop_token_ids if t not in of_task.allowed_token_ids]
        if of_task.allowed_token_ids and never:
            raise ConfigError(
                f"task {task.name}: sampling.stop_token_ids: {names.get(int(never[0]), never[0])!r} is not among "
                "sampling.allowed_token_ids, so that it is never sampled and stops nothing"
            )
    return config


def _resolve_task(number: int, task: Task, vocabulary: Mapping[str, int], size: int) -> Task:
    """The task's own token names as ids."""
    named = {name: getattr(task.sampling, name) for name in ("allowed_token_ids", "stop_token_ids")}
    ids = {
        name: _ids(name, own, vocabulary, size, f"tasks.{number}.")
        for name, own in named.items()
        if own is not None
    }
    return msgspec.structs.replace(task, sampling=msgspec.structs.replace(task.sampling, **ids))


def _vocabulary(config: Config) -> Mapping[str, int]:
    from rollart.random_model import random_vocabulary, vocabulary

    if config.model.random is not None:
        return random_vocabulary(config.model.random)
    assert config.model.path is not None
    folder = Path(config.model.path)
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ConfigError(f"model.path: {folder} is no Hugging Face model folder: it has no {name}")
    try:
        return vocabulary(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: can't read the vocabulary of {folder}: {error}") from None


def _ids(
    name: str, tokens: list[int | str], vocabulary: Mapping[str, int], size: int, prefix: str = ""
) -> list[int]:
    ids: list[int] = []
    for position, token in enumerate(tokens):
        where = f"{prefix}sampling.{name}.{position}"
        if isinstance(token, str):
            if token not in vocabulary:
                close = difflib.get_close_matches(token, vocabulary, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise ConfigError(f"{where}: the tokenizer's vocabulary has no token {token!r}{hint}")
            token = vocabulary[token]
        if not 0 <= token < size:
            raise ConfigError(f"{where}: token id {token} is outside the vocabulary (0 to {size - 1})")
        ids.append(token)
    if len(set(ids)) != len(ids):
        raise ConfigError(f"{prefix}sampling.{name}: a token is there twice")
    return ids
