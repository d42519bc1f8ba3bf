"""Render a conversation as the text that a model continues, by the model's chat template.

A template is a program written by the model's authors, who may not be trusted. It runs in jinja2's
sandbox, in a process with limits on time and memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from minimha.models.child import Child
from minimha.models.files import read_bytes, read_json

Messages: TypeAlias = "str | Sequence[Mapping[str, Any]]"

CONFIG, OWN_FILE, KEY = "tokenizer_config.json", "chat_template.jinja", "chat_template"
LARGEST = 2**20  # bytes of a template
OLDEST = 3, 1, 6  # of jinja2: the sandboxes before it can be left
TOKENS = [f"{role}_token" for role in ("bos", "eos", "unk", "pad", "sep", "cls", "mask")]
# What transformers gives templates, of whose namespaces and dict only harmless names remain.
CODE = """
import datetime
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

class Generation(Extension):
    tags = {"generation"}  # marks what a model writes
    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.Scope(body, lineno=line)

def checked(name):
    if str(name).startswith("_"):
        raise TemplateError(f"a namespace has the name {name!r}")
    return name

class Names(Namespace):
    def __init__(*args, **kwargs):
        given = dict(*args[1:], **kwargs)
        Namespace.__init__(args[0], {checked(name): value for name, value in given.items()})
    def __setitem__(self, name, value):
        Namespace.__setitem__(self, checked(name), value)

def fail(message):
    raise TemplateError(message)

def to_json(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)

class Chat:
    def __init__(self, source):
        self.environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
        self.environment.filters["tojson"] = to_json
        self.environment.globals |= {
            "raise_exception": fail, "namespace": Names, "dict": lambda *a, **k: dict(*a, **k),
            "strftime_now": lambda form: datetime.datetime.now().strftime(form)}
        self.template = self.environment.from_string(source)
    def render(self, names):
        text = self.template.render(**names)
        return text if len(text) <= 2**24 else fail("the text has more than 2**24 characters")

make = Chat
"""


class Template:
    """A chat template and the names of special tokens that it may use.

    Parameters
    ----------
    where : str
        The template's file, for error messages.
    source : str
        The text of the template.
    tokens : mapping of str to str
        The special tokens, such as bos_token.

    Raises
    ------
    ValueError
        jinja2 is missing or too old, or the text is no template.
    """

    def __init__(self, where: str, source: str, tokens: Mapping[str, str]) -> None:
        from importlib import metadata  # here: it loads many modules

        try:
            version = metadata.version("jinja2")
        except metadata.PackageNotFoundError:
            version = "0"
        if tuple(int("0" + part) for part in version.split(".")[:3] if part.isdigit()) < OLDEST:
            raise ValueError(
                f"{where} is rendered by the package jinja2, from {'.'.join(map(str, OLDEST))} on, "
                f"which is not installed: pip install 'minimha[models]'"
            )
        self._tokens = {**tokens}
        self._child = Child(CODE, f"{where} cannot be rendered", source)

    def render(self, messages: Messages) -> str:
        """Return the text of a conversation, up to the place where the model's answer begins.

        Parameters
        ----------
        messages : str, or sequence of mapping
            Mappings like {"role": "user", "content": "Hello"}; the template decides which keys it
            reads. A str is one message of the user.

        Raises
        ------
        TypeError, ValueError
            The messages have another form, the template refuses them, or rendering exceeds a limit
            on time, memory or length.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        is_listed = isinstance(messages, Sequence) and all(isinstance(m, Mapping) for m in messages)
        if not is_listed or not messages:
            raise TypeError(f"messages is {messages!r}: expected a text, or a list of dicts")
        given: dict[str, Any] = {"messages": [{**m} for m in messages], "tools": None}
        given |= {"documents": None, "add_generation_prompt": True, **self._tokens}
        try:
            return str(self._child.ask("render", given))
        except TypeError as error:
            raise TypeError(f"messages has a value that JSON cannot hold: {error}") from None


def of_folder(folder: Path) -> Template:
    """Return the chat template of a model's folder; raise ValueError if it has none.

    The file chat_template.jinja takes precedence over the entry in tokenizer_config.json. The entry
    is a template, or a list of named templates, of which "default" is used.
    """
    own, config = folder / OWN_FILE, folder / CONFIG
    settings = read_json(config) if config.exists() else {}
    found, where = settings.get(KEY), f"{config}'s {KEY}"
    if own.exists():
        found, where = read_bytes(own, LARGEST).decode(errors="replace"), str(own)
    if isinstance(found, list):
        named = {str(one.get("name")): one.get("template") for one in found if hasattr(one, "get")}
        found = named.get("default")
        if found is None:
            raise ValueError(
                f"{where} has {', '.join(map(str, named))}: expected one named default"
            )
    if found is None:
        raise ValueError(
            f"{folder} has no chat template: expected {KEY} in {CONFIG}, or {OWN_FILE}"
        )
    if not isinstance(found, str):
        raise ValueError(f"{where} is {found!r}: expected a template, or a list of them")
    given = {role: settings.get(role) for role in TOKENS}
    texts = {r: t.get("content") if isinstance(t, Mapping) else t for r, t in given.items()}
    return Template(where, found, {r: text for r, text in texts.items() if isinstance(text, str)})
