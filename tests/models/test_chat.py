"""Chat templates: the text that transformers makes of a conversation, and what is refused."""

import json
import time
from importlib import metadata

import pytest

from minimha.models import chat
from minimha.models.tokens import SubwordTokenizer, from_file

pytest.importorskip("jinja2", reason="jinja2, which renders templates, is missing")
ROLES = """{% for message in messages %}
    {%- if loop.first and message.role != 'system' %}
<|start|>system
You are kind.<|end|>
    {% endif %}
<|start|>{{ message['role'] }}
{{ message.content | trim }}<|end|>
{% endfor %}
{% if add_generation_prompt %}
<|start|>assistant
{% endif %}
"""
TURNS = """{%- if messages[0].role == 'system' -%}
  {%- set system = '<<SYS>>\\n' ~ messages[0].content ~ '\\n<</SYS>>\\n\\n' -%}
  {%- set rest = messages[1:] -%}
{%- else -%}
  {%- set system, rest = '', messages -%}
{%- endif -%}
{%- set ns = namespace(turns=0, last='none') -%}
{%- for message in rest -%}
  {%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
    {{- raise_exception('roles must alternate: ' ~ message.role) -}}
  {%- endif -%}
  {%- if message.role == 'user' -%}
    {{- bos_token ~ '[INST] ' ~ (system if loop.first else '') ~ message.content ~ ' [/INST]' -}}
    {%- set ns.turns = ns.turns + 1 -%}
  {%- else -%}
    {% generation %}{{ ' ' ~ message.content ~ ' ' ~ eos_token }}{% endgeneration %}
  {%- endif -%}
  {%- set ns.last = message.role -%}
{%- endfor -%}
{{- ns.turns }} {{ ns.last }} {{ unk_token is defined }}{{ pad_token is defined }}
"""
TOOLS = """{{ bos_token }}
{%- macro header(role) -%}
<|{{ role }}|>{{ "\\n\\n" }}
{%- endmacro %}
{% if tools is none %}Today is {{ strftime_now('%Y') }}.{% endif %}
{# a comment #}
{% for message in messages if message.role != 'system' %}
    {% if message.hidden is defined and message.hidden %}{% continue %}{% endif %}
    {% if loop.index > 3 %}{% break %}{% endif %}
{{ header(message.role) }}{{ message | tojson }}
    {{- message.content.split(' ')[-1] | upper }} {{ {'ä': [1, none, true]} | tojson(indent=2) }}
{% endfor %}
{{ dict(a=1).items() | list }}{{ messages | map(attribute='role') | join(', ') }}
{{- header('assistant') if add_generation_prompt }}"""
TEMPLATES = {"roles": ROLES, "turns": TURNS, "tools": TOOLS}
SYSTEM = {"role": "system", "content": 'Be brief. <ä & "b">\n'}
FIRST = {"role": "user", "content": "  Who are you?  "}
SECOND = {"role": "assistant", "content": "A model's 'voice'."}
THIRD = {"role": "user", "content": "Sing!\nNow."}
CONVERSATIONS = [
    [FIRST], [SYSTEM, FIRST], [FIRST, SECOND, THIRD], [SYSTEM, FIRST, SECOND, THIRD],
    [FIRST, SECOND, THIRD, SECOND, FIRST],
]  # fmt: skip
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "?"}


@pytest.fixture
def words():
    """A tokenizer of words that adds <s> before a text."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is missing")
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(
            {"?": 0, "<s>": 1, "</s>": 2, "who": 3, "sings": 4}, unk_token="?"
        )
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    return made


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("where", ["file", "text", "list"])
def test_the_text_is_transformers(name, where, words, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is missing")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **SPECIAL)
    theirs.chat_template = TEMPLATES[name]
    theirs.save_pretrained(tmp_path)
    own = tmp_path / "chat_template.jinja"
    assert own.exists()
    if where != "file":
        own.unlink()
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        named = [
            {"name": "other", "template": "x"},
            {"name": "default", "template": theirs.chat_template},
        ]
        config["chat_template"] = theirs.chat_template if where == "text" else named
        config["bos_token"] = {"__type": "AddedToken", "content": "<s>", "special": True}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = from_file(tmp_path / "tokenizer.json")
    for messages in CONVERSATIONS:
        wanted = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert ours.chat(messages) == wanted
    assert ours.chat("Who?") == ours.chat([{"role": "user", "content": "Who?"}])
    assert ours.encode("who </s>") == [1, 3, 2]
    assert ours.encode("who </s>", add_special_tokens=False) == [3, 2]


def test_what_a_template_refuses_is_said_with_its_words():
    template = chat.Template("here", TURNS, SPECIAL)
    with pytest.raises(ValueError, match=r"^here cannot be rendered: roles must alternate: user$"):
        template.render([FIRST, FIRST])
    assert template.render([FIRST]).startswith("<s>[INST]")
    for messages in ([], 3, [FIRST, "text"], [{"role": "user", "content": {1, 2}}]):
        with pytest.raises(TypeError, match="messages "):
            template.render(messages)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "time or",
        ),
        ("{{ 'x' * 10**11 }}", "MemoryError"),
        ("{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", "memory|MemoryError|2..24"),
        ("{{ 9**(9**9) }}", "time or memory"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ raise_exception.__globals__.x }}", "'__globals__' of 'function' object is unsafe"),
        ("{{ messages.append(1) }}", "append"),
        ("{% set ns = namespace(_a=1) %}", "a namespace has the name '_a'"),
        ("{% set ns = namespace() %}{% set ns.__init__ = 1 %}", "has the name '__init__'"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ open('/etc/passwd') }}", "'open' is undefined"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages[0].role.x.y }}", "has no attribute 'x'"),
    ],
)
def test_a_hostile_template_ends_in_a_sentence(source, sentence):
    start = time.monotonic()
    with pytest.raises(ValueError, match=f"here cannot be rendered: .*({sentence})"):
        chat.Template("here", source, {}).render("Hello")
    assert time.monotonic() - start < 20


def test_a_folder_without_a_template_is_refused(tmp_path):
    for content, sentence in (
        ({}, "has no chat template: expected chat_template in tokenizer_config.json, or"),
        ({"chat_template": [{"name": [1], "template": ""}, 3]}, r"has \[1\]: expected one named"),
        ({"chat_template": 3}, "chat_template is 3: expected a template, or a list of them"),
        (
            {"chat_template": [{"name": "rag", "template": ""}]},
            "has rag: expected one named default",
        ),
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match=sentence):
            chat.of_folder(tmp_path)
    with pytest.raises(ValueError, match="the model has no chat template"):
        SubwordTokenizer(None).chat("Hello")


def test_an_old_jinja2_is_refused(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "3.1.5")
    with pytest.raises(
        ValueError, match=r"jinja2, from 3.1.6 on, which is not installed: pip inst"
    ):
        chat.Template("here", "x", {})
