"""Configuration: what is wrong is named, what is written is read back, and all of it is used."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import tomllib
import types
import typing
from dataclasses import fields, replace
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import keyfed
from keyfed.config.load import (
    SECTIONS,
    Config,
    DataConfig,
    ModelConfig,
    TrainConfig,
    apply_settings,
    check,
    coerce,
    config_from,
    differences,
    dump_toml,
    read_config,
    set_value,
    to_document,
)
from keyfed.config.schema import out_of_bounds
from keyfed.errors import ConfigError
from keyfed.federated.local import LocalOptions
from keyfed.federated.methods import METHODS, build_method, method_options
from keyfed.federated.spec import MethodSpec, Part

SOURCE = Path(keyfed.__file__).parent


# Names


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "modle.embed=3",
            r'"modle" is not a section \(did you mean model\?\)\. Sections: data, model, train, participation, upload',
        ),
        ("data.vocba=3", r"data\.vocba is not an option \(did you mean data\.vocab|did you mean vocab\?\)"),
        ("train.round=3", r"train\.round is not an option \(did you mean .*rounds\?\)\. Options: rounds, cohort"),
        ("model.droput=0.1", r"did you mean .*dropout\?"),
        ("method.epoch=2", r'method\.epoch is not an option of "fedavg" \(did you mean .*epochs\?\)'),
        ("lrr=2", r"did you mean .*lr\?"),
        ("rounds=2", r"did you mean train\.rounds\?"),
        ("method.mu=2", r"Options: optimiser, lr, momentum"),
        ("zzzzz.q=1", r'"zzzzz" is not a section\. Sections'),
        ("a.b.c=1", r'"a\.b" is not a section'),
        ("train.rounds", r'--set got "train\.rounds"; expected section\.key=value'),
        ("=3", r'--set got "=3"'),
    ],
)
def test_what_does_not_exist_is_named_with_the_nearest(setting, message):
    with pytest.raises(ConfigError, match=message):
        apply_settings(Config(), [setting])


def test_unknown_methods_and_models_name_the_nearest():
    with pytest.raises(ConfigError, match=r'method "fedvag" is not known \(did you mean fedavg\?\)'):
        set_value(Config(method="fedvag"), "method.lr", 1)
    with pytest.raises(ConfigError, match=r"did you mean fedsgd\?"):
        config_from({"method": {"name": "fed-sgd", "lr": 1}}, "x.toml")
    with pytest.raises(ConfigError, match=r"did you mean fedavg\?"):
        build_method(MethodSpec("fedavgg"))
    with pytest.raises(ConfigError, match=r'method\.epochs is not an option of "fedsgd"'):
        build_method(MethodSpec("fedsgd", {"epochs": 2}))
    with pytest.raises(ConfigError, match=r"momentum=0\.9 is an option of optimiser=sgd"):
        build_method(MethodSpec("fedavg", {"optimiser": "adam", "momentum": 0.9}))


def test_settings_are_applied_in_order():
    config = apply_settings(
        Config(), ["train.rounds=3", "lr = 0.5", "method.clip=none", "data.vocab=none", "train.rounds=4"]
    )
    assert config.train.rounds == 4
    assert config.options == {"lr": 0.5, "clip": None}
    assert config.data.vocab is None
    assert config.data.name == "chat"


# Values


@pytest.mark.parametrize(
    ("value", "annotation", "want"),
    [
        ("3", int, 3),
        (3, int, 3),
        (3.0, int, 3),
        ("1e3", int, 1000),
        ("-2", int, -2),
        ("123456789012345678901", int, 123456789012345678901),
        ("none", int | None, None),
        ("None", int | None, None),
        (None, int | None, None),
        ("5", int | None, 5),
        ("1e-3", float, 0.001),
        (2, float, 2.0),
        ("none", float | None, None),
        ("true", bool, True),
        ("OFF", bool, False),
        (True, bool, True),
        ("no", bool | None, False),
        ("none", bool | None, None),
        ("stream", Literal["stream", "sentences"], "stream"),
        ("a=b c", str, "a=b c"),
        ("none", str, "none"),
        ("none", str | None, None),
        (7, str, "7"),
        ("x", typing.Optional[str], "x"),  # noqa: UP045
    ],
)
def test_values_become_their_type(value, annotation, want):
    got = coerce(value, annotation, "here")
    assert got == want
    assert type(got) is type(want)


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        ("2.5", int, "expected a whole number"),
        ("two", int, "expected a whole number"),
        ("", int, "expected a whole number"),
        ("1e400", int, "expected a whole number"),
        ("nan", int, "expected a whole number"),
        (True, int, "expected a whole number"),
        (None, int, "expected a whole number"),
        ("none", int, "expected a whole number"),
        ([1], int, "expected a whole number"),
        ("x", float, "expected a finite number"),
        ("nan", float, "expected a finite number"),
        ("inf", float, "expected a finite number"),
        (True, float, "expected a finite number"),
        (None, float, "expected a finite number"),
        ("maybe", bool, "expected true or false"),
        (1, bool, "expected true or false"),
        ("steam", Literal["stream", "sentences"], "expected one of stream, sentences"),
        (None, Literal["stream", "sentences"], "expected one of stream, sentences"),
        ("x", int | None, "expected a whole number"),
    ],
)
def test_other_values_are_refused_with_what_was_expected(value, annotation, expected):
    with pytest.raises(ConfigError, match=rf"^data\.key is .*{expected}"):
        coerce(value, annotation, "data.key")


def is_union(hint) -> bool:
    return isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union  # the latter of a Literal


def test_every_field_and_option_has_a_type_that_coerce_knows():
    known = (int, float, bool, str)
    hints = [hint for section in SECTIONS.values() for hint in typing.get_type_hints(section).values()]
    hints += [
        hint for method in METHODS.values() for key, hint in typing.get_type_hints(method).items() if key != "return"
    ]
    for hint in hints:
        parts = typing.get_args(hint) if is_union(hint) else (hint,)
        kinds = [p for p in parts if p is not type(None)]
        assert len(kinds) == 1, hint
        assert kinds[0] in known or typing.get_origin(kinds[0]) is Literal, hint


# Files


@functools.cache
def values(hint) -> st.SearchStrategy:
    """Values of a field, None where it is allowed; a text is never the word "none" where None is."""
    parts = typing.get_args(hint) if is_union(hint) else (hint,)
    options = []
    for part in parts:
        if part is type(None):
            options.append(st.none())
        elif typing.get_origin(part) is Literal:
            options.append(st.sampled_from(typing.get_args(part)))
        elif part is str:
            options.append(st.text(max_size=12).filter(lambda t: t.lower() != "none"))
        else:
            options.append(
                {
                    int: st.integers(-(2**62), 2**62),
                    bool: st.booleans(),
                    float: st.floats(allow_nan=False, allow_infinity=False),
                }[part]
            )
    return st.one_of(options)


hints_of = functools.cache(typing.get_type_hints)


@functools.cache
def section_of(section) -> st.SearchStrategy:
    hints = hints_of(section)
    return st.builds(section, **{f.name: values(hints[f.name]) for f in fields(section)})


@st.composite
def configs(draw: st.DrawFn) -> Config:
    method = draw(st.sampled_from(sorted(METHODS)))
    hints = hints_of(METHODS[method])
    options = {name: p.default for name, p in method_options(method).items()}
    for name in options:
        tried = {**options, name: draw(values(hints[name]))}
        with contextlib.suppress(ConfigError):  # a value the method refuses: its default stays
            build_method(MethodSpec(method, tried))
            options = tried
    mediator = draw(st.none() | st.builds(_attention, st.floats(1e-6, 1e6), st.floats(1e-6, 1e6) | st.none()))
    server = draw(st.none() | st.builds(_adam, st.floats(1e-9, 1e9)))
    return Config(*(draw(section_of(s)) for s in SECTIONS.values()), method, options, mediator, server)


def _attention(temperature: float, bound: float | None) -> Part:
    return Part("attention", {"norm": "frobenius", "temperature": temperature, "bound": bound, "beta": 0.5})


def _adam(lr: float) -> Part:
    return Part("adam", {"lr": lr, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3, "bias_correction": False})


@settings(max_examples=60, deadline=None)
@given(config=configs())
def test_what_is_written_is_read_back(config):
    document = to_document(config)
    text = dump_toml({**document, "made": {"commit": None, "block": 1}})
    again = config_from(tomllib.loads(text), "run.toml")
    assert again == config
    assert to_document(again) == document
    assert differences(document, to_document(again)) == []


@pytest.mark.parametrize("method", METHODS)
def test_defaults_are_written_in_full_and_read_back(method):
    config = Config(method=method)
    document = to_document(config)
    assert {s: set(v) for s, v in document.items() if s != "method"} == {
        s: {f.name for f in fields(c)} for s, c in SECTIONS.items()
    }
    assert set(document["method"]) == {"name", *method_options(method)}
    again = config_from(tomllib.loads(dump_toml(document)), "run.toml")
    assert to_document(again) == document
    assert (again.data, again.model, again.train, again.method) == (
        config.data,
        config.model,
        config.train,
        config.method,
    )


@pytest.mark.parametrize("name", ['a "b" \\ c', "tab\tnewline\nreturn\r", "ü😀", "\x00\x7f", "\U000e0001", "' # ="])
def test_any_name_survives_toml(name):
    config = Config(data=DataConfig(name=name, dir=name))
    assert config_from(tomllib.loads(dump_toml(to_document(config))), "x").data == config.data


def test_a_file_is_read_and_what_is_wrong_in_it_named(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[train]\nrounds = 7\n[method]\nname = "fedsgd"\nlr = 2\n[made]\nby = 1\n', "utf-8")
    config = read_config(path)
    assert (config.train.rounds, config.method, config.options) == (7, "fedsgd", {"lr": 2.0})
    for content, message in [
        ("[train\n", "not valid TOML"),
        ("rounds = 3\n", r"rounds is 3; expected a section \[rounds\]"),
        ("[[train]]\nrounds = 3\n", r"expected a section \[train\]"),
        ("[trian]\nrounds = 3\n", r"did you mean train\?"),
        ("[train]\nronds = 3\n", r"did you mean .*rounds\?"),
        ('[train]\nrounds = "many"\n', r"train\.rounds is .*many.*expected a whole number"),
        ("[train.rounds]\nx = 3\n", r"train\.rounds is .*expected a whole number"),
        ('[method]\nname = "fedprix"\nlr = 1\n', "is not known"),
        ('method = "fedsgd"\n', r"method is .*fedsgd.*expected a section \[method\]"),
    ]:
        path.write_text(content, "utf-8")
        with pytest.raises(ConfigError, match=message):
            read_config(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="save it as UTF-8"):
        read_config(path)
    with pytest.raises(ConfigError, match="expected a TOML file"):
        read_config(tmp_path / "none.toml")


def test_the_command_line_may_name_another_method_than_the_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[method]\nname = "fedsgd"\nlr = 2\n', "utf-8")
    assert read_config(path, "fedavg").method == "fedavg"


def test_differences_name_every_key_that_changed():
    old, new = Config(), apply_settings(Config(), ["train.seed=2", "lr=0.5", "data.vocab=none"])
    assert differences(to_document(old), to_document(new)) == [
        "data.vocab: 10000 → None",
        "method.lr: 0.006 → 0.5",
        "train.seed: 1 → 2",
    ]


# Sense


def cut(config: Config, batches: str) -> Config:
    return replace(config, data=replace(config.data, batches=batches))


def test_the_defaults_make_sense():
    assert check(Config()) == cut(Config(), Config().data.batching)


@pytest.mark.parametrize(
    ("name", "given", "taken"),
    [
        ("sotu", None, "stream"),
        ("chat", None, "packed"),
        ("irc", None, "packed"),
        ("chat", "stream", "stream"),
        ("sotu", "packed", "packed"),
        ("./notes", None, "stream"),
    ],
)
def test_messages_are_packed_unless_the_user_says_otherwise(name, given, taken):
    config = check(Config(data=DataConfig(name=name, batches=given)))
    assert config.data.batches == config.data.batching == taken
    assert to_document(config)["data"]["batches"] == taken  # which is what run.toml has


BOUNDS = {
    f"{section}.{f.name}": {
        what: f.metadata[what] for what in ("least", "above", "share", "inside") if what in f.metadata
    }
    for section, declared in SECTIONS.items()
    for f in fields(declared)
    if not f.metadata.keys().isdisjoint(("least", "above", "share", "inside"))
}


@pytest.mark.parametrize("key", BOUNDS)
def test_a_value_beyond_the_bounds_of_its_option_is_refused_by_name(key):
    (what, bound), *others = BOUNDS[key].items()
    assert not others, "one bound an option"
    inside, at = (0, 1) if what == "share" else (0.5, 0) if what == "inside" else (bound + 1, bound)
    if what == "least":
        inside, at = bound, bound - 1
    base = set_value(Config(), "privacy.noise", 1.0) if key.startswith("privacy.") else Config()
    with pytest.raises(ConfigError, match=rf"{key} is {at}(\.0)?; (at least|expected)"):
        check(set_value(base, key, at))
    section = key.partition(".")[0]
    assert out_of_bounds(section, getattr(set_value(base, key, inside), section)) == []


def test_all_problems_are_listed_at_once():
    config = Config(
        data=DataConfig(
            clients=0, vocab=4, window=0, max_sentences=0, max_tokens=0, min_clients=0, unseen=1.0, alpha=0.0
        ),
        model=ModelConfig(dropout=1.0, embed=0, hidden=0, layers=0),
        train=TrainConfig(
            rounds=-1, cohort=0, eval_every=0, valid_tokens=0, checkpoint_every=0, block=0, workers=0, ngram_order=0
        ),
        options={"lr": 0.0, "epochs": 0, "batch_size": -1, "clip": -1.0},
    )
    with pytest.raises(ConfigError) as caught:
        check(config)
    said = str(caught.value).split("; ")
    for section, of in [
        ("data", ["clients", "vocab", "window", "max_sentences", "max_tokens", "min_clients", "unseen", "alpha"]),
        ("model", ["dropout", "embed", "hidden", "layers"]),
        ("train", ["rounds", "cohort", "eval_every", "valid_tokens", "checkpoint_every", "block", "workers"]),
        ("train", ["ngram_order"]),
        ("method", ["lr", "epochs", "batch_size", "clip"]),
    ]:
        for key in of:
            assert any(line.startswith(f"{section}.{key} is ") for line in said), f"{section}.{key}"


@pytest.mark.parametrize(
    "config",
    [
        Config(train=TrainConfig(rounds=0)),
        Config(data=DataConfig(unseen=0.0, vocab=None)),
        Config(options={"clip": None}),
        Config(model=ModelConfig(dropout=0.99)),
    ],
)
def test_limits_that_make_sense_are_taken(config):
    assert check(config) == cut(config, config.data.batching)


# Nothing is an option that nobody reads

OWNERS = {
    DataConfig: {"data", "d"},
    ModelConfig: {"model", "m"},
    TrainConfig: {"train", "t"},
}


def attributes_read() -> set[tuple[str, str]]:
    """(owner, attribute) of every `owner.attribute` and `….owner.attribute` read outside config/load.py."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        if path == SOURCE / "config/load.py":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = node.value
                if isinstance(owner, ast.Attribute):
                    found.add((owner.attr, node.attr))
                elif isinstance(owner, ast.Name):
                    found.add((owner.id, node.attr))
    return found


def test_every_option_is_read_by_somebody():
    read = attributes_read()
    for section, owners in OWNERS.items():
        for f in fields(section):
            assert any((owner, f.name) in read for owner in owners), f"{section.__name__}.{f.name} is never read"


def test_every_option_is_documented():
    for section in SECTIONS.values():
        for f in fields(section):
            assert f.metadata.get("help"), f"{section.__name__}.{f.name}"
    for name, method in METHODS.items():
        for option in method_options(name):
            assert f"\n      {option}: " in (method.__doc__ or ""), f"{name}.{option}"


@pytest.mark.parametrize("method", METHODS)
def test_every_option_of_a_method_reaches_it(method):
    """Each option changes the method that is built: its solver, its server rule or its numbers."""
    function = METHODS[method].build
    tree = ast.parse(Path(function.__code__.co_filename).read_text("utf-8"))
    body = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == function.__name__)
    used = {n.id for n in ast.walk(body) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    assert set(inspect.signature(function).parameters) <= used
    local = {f.name for f in fields(LocalOptions)}
    assert set(method_options(method)) <= used | local


def test_every_option_of_local_training_is_read():
    sources = [Path(inspect.getsourcefile(part)).read_text("utf-8") for part in (LocalOptions, METHODS["fedavg"].build)]
    read = {n.attr for text in sources for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Attribute)}
    assert {f.name for f in fields(LocalOptions)} <= read


def test_a_configuration_cannot_be_changed_in_place():
    config = Config()
    with pytest.raises(AttributeError):
        config.train.rounds = 3  # type: ignore[misc]
    assert replace(config, method="fedsgd").method == "fedsgd"
